"""`server.api_keys`: where a digest comes from, what an entry grants, and messages that show no key."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import jsonschema
import pytest
import yaml

from laya.config import load_config
from laya.config.keys import expiry_of, grant_of
from laya.config.reference import json_schema
from laya.config.units import parse_moment
from laya.errors import ConfigError
from laya.types import KeyGrant

SECRET = "a-secret-of-the-orchestrator"
SHA = sha256(SECRET.encode()).hexdigest()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text(SECRET + "\n")


def grant(entry: str) -> KeyGrant:
    Path("config.yaml").write_text(f"server:\n  api_keys:\n    - {entry}\n")
    (key,) = load_config(None, {"KEY": SECRET, "SHORT": "abc"}).server.api_keys
    return grant_of(key)


def message(entry: str) -> str:
    with pytest.raises(ConfigError) as caught:
        grant(entry)
    return caught.value.message


@pytest.mark.parametrize(
    "source",
    [f"sha256: {SHA}", f"sha256: {SHA.upper()}", "key_file: secret", "key_file: ./secret", "key: '${env.KEY}'"],
)
def test_digest_comes_from_one_of_three_places(source: str) -> None:
    made = grant(f"{{name: a, {source}}}")
    assert (made.sha256, made.role, made.models) == (SHA, "admin", ())
    assert SECRET not in repr(made)
    jsonschema.validate(yaml.safe_load(Path("config.yaml").read_text().replace(SHA.upper(), SHA)), json_schema())


def test_entry_grants_what_it_says() -> None:
    made = grant(
        f"{{name: a, sha256: {SHA}, role: user, models: [x, y], expires: 2030-01-31, max_concurrent: 2, "
        f"requests_per_minute: 3, tokens_per_minute: 4, priority: bulk, max_priority: default}}"
    )
    assert made == KeyGrant(
        name="a", sha256=SHA, role="user", models=("x", "y"), expires_s=parse_moment("2030-02-01T00:00Z"),
        max_concurrent=2, requests_per_minute=3, tokens_per_minute=4, priority="bulk", max_priority="default",
    )  # fmt: skip


@pytest.mark.parametrize("written", ["2030-01-31T18:00Z", "2030-01-31T19:00+01:00", "2030-01-31 18:00:00"])
def test_moment_has_a_zone(written: str) -> None:
    assert grant(f"{{name: a, sha256: {SHA}, expires: '{written}'}}").expires_s == 1896112800
    assert grant(f"{{name: a, sha256: {SHA}, expires: 2030-01-31T18:00:00Z}}").expires_s == 1896112800


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("{name: a}", "sha256 is missing"),
        (f"{{name: a, sha256: {SHA}, key_file: secret}}", "one of them is enough"),
        ("{name: a, key_file: nothing}", "nothing: No such file"),
        ("{name: a, key_file: 3}", "expected the name of a file"),
        ("{name: a, key_file: config.yaml}", "one word of 16 characters"),
        ("{name: a, key: '${env.SHORT}'}", "one word of 16 characters"),
        (f"{{name: a, key: {SECRET}}}", "plain key"),
        (f"{{name: a, sha256: {SHA}, role: root}}", "role"),
        (f"{{name: a, sha256: {SHA}, expires: soon}}", "no day or moment"),
        (f"{{name: a, sha256: {SHA}, expires: 2030-13-01}}", "cannot be read"),
        (f"{{name: a, sha256: {SHA}, max_concurrent: 0}}", "max_concurrent"),
        (f"{{name: a, sha256: {SHA}, tokens: 3}}", "tokens"),
        (f"{{name: a, sha256: {SHA}, priority: high}}", "priority"),
        (f"{{name: a, sha256: {SHA}, priority: system, max_priority: bulk}}", "more urgent than max_priority bulk"),
    ],
)
def test_wrong_entry_is_named_and_no_key_shown(entry: str, word: str) -> None:
    said = message(entry)
    assert word in said and "config.yaml:" in said
    assert SECRET not in said


def test_span_counts_from_now() -> None:
    assert 29.9 * 86400 < expiry_of("30d") - expiry_of("1m") < 30 * 86400
    for text in ("0d", "2001-01-01"):
        with pytest.raises(ConfigError, match="past"):
            expiry_of(text)
