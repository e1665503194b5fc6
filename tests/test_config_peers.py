"""`peers`, and pools that hold models of other servers: what their names make, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.config import Config, load_config
from laya.config.pools import away_of, first_of
from laya.config.remote import read_url
from laya.errors import ConfigError
from laya.routing.rules import Decision, RequestFacts, Rules


def loaded(folder: Path, text: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path, {})


def test_settings_of_a_peers_model_follow_from_its_name(tmp_path: Path) -> None:
    text = "ttl: 5m\nmax_seq_len: 4096\nqueue_size: 3\npeers: {attic: {url: 'https://attic/laya', key_env: KEY}}"
    config = loaded(tmp_path, text)
    model = config.for_model("attic/org/m:4b")
    assert model.remote is not None and model.remote.urls[0].text == "https://attic/laya/v1"
    assert (model.engine, model.peer, model.remote.model, model.remote.key_env) == (
        "remote", "attic", "org/m:4b", "KEY",
    )  # fmt: skip
    assert (model.ttl_s, model.max_seq_len, model.queue_size) == (None, None, 3)
    assert (
        read_url("http://[::1]:8000/v1").host == "::1"
        and read_url("http://BÜCHER.example").host == "xn--bcher-kva.example"
    )
    other = config.for_model("cellar/m")
    assert (other.engine, other.peer, other.ttl_s) == ("llamacpp", None, 300)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peers: {attic: {url: attic}}", "peers.attic.url: 'attic' is no address: write https://host/v1"),
        ("peers: {attic: {url: 'http://bad host'}}", "peers.attic.url: 'http://bad host' is no address"),
        ("peers: {attic: {url: 'http://ünï..example'}}", "is no address"),
        ("peers: {attic: {url: 'http://a/my path'}}", "letters that must be percent-encoded: /my%20path"),
        ("peers: {attic: {}}", "url"),
        ("peers: []", "peers: expected names with their settings, got []"),
        ("peers: {a/b: {url: 'http://a'}}", "the name of a peer is letters, digits and . _ - alone"),
        ("peers: {attic: {url: 'http://a', key_file: nowhere}}", "peers.attic.key_file: there is no file 'nowhere'"),
        ("peers: {attic: {url: 'http://a', key_env: A, key_file: b}}", "the key is in one place"),
        ("peers: {attic: {url: 'http://a', kee_env: A}}", "Did you mean key_env"),
        ("peers: {org: {url: 'http://a'}}\nmodels: {org/m: {}}", "org/m is called as a model of this peer would be"),
    ],
)
def test_peers_that_cannot_be_say_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, text)
    assert words in error.value.message


@pytest.mark.parametrize(
    "text", ["http://me:hunter2@a b/v1", "http://a/v1?key=hunter2", "x://me:hunter2@a", "http://a#hunter2"]
)
def test_addresses_that_are_refused_are_told_without_their_secrets(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_url(text)
    assert "hunter2" not in error.value.message and error.value.message


MIXED = """
peers: {attic: {url: "http://attic"}}
models: {far: {engine: remote, url: "http://far/v1"}}
routing:
  pools: {mixed: [near, far, attic/m], afar: [far, attic/m]}
  rules: [RULE]
"""


def test_only_rules_that_spill_over_lead_a_pool_to_other_servers(tmp_path: Path) -> None:
    config = loaded(tmp_path, MIXED.replace("RULE", "{model: burst, to: mixed, spillover: true, fallbacks: [near]}"))
    assert first_of(config) == {"mixed": ("near",), "afar": ("far", "attic/m")}
    rules = Rules(config.routing, away_of(config))
    assert rules.decide(RequestFacts(model="mixed")) == Decision(("mixed",))
    assert rules.decide(RequestFacts(model="burst")) == Decision(("mixed", "far", "attic/m", "near"), "rule 1", True)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{model: x, to: mixed}", "far of another server serves by rules alone: one with `to: mixed` and `spillover"),
        ("{model: x, to: near, spillover: true}", "routing.rules.0.spillover: there is nowhere to spill over to"),
    ],
)
def test_members_that_nothing_leads_to_are_told(tmp_path: Path, rule: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, MIXED.replace("RULE", rule))
    assert words in error.value.message
