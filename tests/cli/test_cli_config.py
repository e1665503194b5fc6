"""`laya config` and its exit codes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from laya.cli.config import config_app
from laya.config import Config, load_config
from laya.errors import ConfigError

runner = CliRunner()
SHA = hashlib.sha256(b"0123456789abcdef").hexdigest()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path))
    monkeypatch.setenv("SECRET", "hunter2-hunter2")


def test_check_says_ok_with_and_without_a_file() -> None:
    assert "there is no config.yaml" in runner.invoke(config_app, ["check"]).stdout
    Path("models").mkdir()
    Path("models/a.gguf").write_bytes(b"GGUF")
    Path("config.yaml").write_text("models: {a: {}}")
    assert runner.invoke(config_app, ["check"]).stdout == "ok: config.yaml, 1 model\n"
    assert json.loads(runner.invoke(config_app, ["check", "--json"]).stdout)["models"] == ["a"]


def test_show_has_every_key_that_can_be_said() -> None:
    Path("key").write_text("hunter3")
    Path("config.yaml").write_text(
        "peers: {attic: {url: 'http://attic', key_file: key}}\n"
        "models: {far: {engine: remote, url: 'http://far/v1', cost: {input_per_million: 2}}}\n"
    )
    text = runner.invoke(config_app, ["show"]).stdout
    shown = yaml.safe_load(text)
    assert set(Config.__struct_fields__) - set(shown) == set() and "hunter3" not in text
    assert shown["peers"]["attic"] == {
        "url": "http://attic", "key_env": None, "key_file": str(Path("key").absolute()), "ca_file": None,
        "connect_timeout_s": 5,
    }  # fmt: skip
    assert shown["models"]["far"]["cost"] == {"input_per_million": 2, "output_per_million": 0, "currency": "USD"}


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ("{currency: eur}", "currency: expected three capital letters, such as EUR, got 'eur'"),
        ('{currency: "EUR\\n"}', "currency: expected three capital letters"),
        ("{output_per_million: 1.0e+300}", "output_per_million: expected a number >= 0 and <= 1e+09"),
    ],
)
def test_prices_that_are_none_are_refused(cost: str, words: str) -> None:
    Path("config.yaml").write_text(f"models: {{far: {{engine: remote, url: 'http://far/v1', cost: {cost}}}}}")
    result = runner.invoke(config_app, ["check"])
    assert result.exit_code and words in str(result.exception)


def test_check_takes_its_file_as_the_other_verbs_do() -> None:
    Path("other.yaml").write_text("n_threads: 2\n")
    assert runner.invoke(config_app, ["check", "--config", "other.yaml"]).stdout == "ok: other.yaml, 0 models\n"
    result = runner.invoke(config_app, ["check", "other.yaml", "--config", "other.yaml"])
    assert isinstance(result.exception, ConfigError)
    assert "one file at a time" in result.exception.message


def test_check_of_a_wrong_file_is_exit_code_2() -> None:
    Path("wrong.yaml").write_text("max_seq_len: many")
    result = runner.invoke(config_app, ["check", "wrong.yaml"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    as_json = runner.invoke(config_app, ["check", "wrong.yaml", "--json"])
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["error"]["param"] == "max_seq_len"


def test_check_knows_the_arguments_of_the_engine() -> None:
    Path("config.yaml").write_text("models: {m: {args: {n_ctx: 4096}}}")
    error = runner.invoke(config_app, ["check"]).exception
    assert isinstance(error, ConfigError)
    assert error.message == "models.m.args.n_ctx fights the plan: use max_seq_len"
    Path("config.yaml").write_text("args: {sampling.xtc_probability: 0.1}")
    assert runner.invoke(config_app, ["check"]).exit_code == 0


def test_show_is_the_effective_configuration_without_secrets() -> None:
    Path("config.yaml").write_text(
        "max_seq_len: 4096\nttl: 5m\nargs:\n  header: ${env.SECRET}\n  api_key: abc\n"
        f"server:\n  port: 8123\n  api_keys: [{{name: me, sha256: {SHA}}}]\n"
        "models:\n  m: {max_seq_len: 512, kv_cache_dtype: f16}\n"
    )
    text = runner.invoke(config_app, ["show"]).stdout
    assert "hunter2" not in text
    assert "abc" not in text
    assert SHA not in text
    shown = yaml.safe_load(text)
    assert (shown["server"]["port"], shown["ttl"], shown["args"]["header"]) == (8123, 300, "${env.SECRET}")
    assert (shown["max_seq_len"], shown["kv_cache_dtype"], shown["max_num_seqs"]) == (4096, "auto", "auto")
    model = shown["models"]["m"]
    assert (model["max_seq_len"], model["kv_cache_dtype"], model["ttl"], model["queue_size"]) == (512, "f16", 300, 64)
    assert json.loads(runner.invoke(config_app, ["show", "--json"]).stdout)["models"] == shown["models"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:se@cret@db/laya", "postgresql://ann:(hidden)@db/laya"),
        ("postgresql://ann@db:5432/laya?password=secret&x=1", "postgresql://ann@db:5432/laya?password=(hidden)&x=1"),
        ("sqlite:////srv/laya.db", "sqlite:////srv/laya.db"),
    ],
)
def test_show_has_the_store_without_its_password(url: str, shown: str) -> None:
    Path("config.yaml").write_text(f"store: {{url: '{url}', keep: 7d}}\n")
    store = yaml.safe_load(runner.invoke(config_app, ["show"]).stdout)["store"]
    assert store == {"url": shown, "keep": 7 * 86400, "max_bytes": 2**30, "keep_usage": 400 * 86400}


def test_show_has_no_secret_of_any_address() -> None:
    Path("config.yaml").write_text("traces: {endpoint: 'http://h/v1/traces?x=1&api_token=secret'}\n")
    shown = yaml.safe_load(runner.invoke(config_app, ["show"]).stdout)["traces"]["endpoint"]
    assert shown == "http://h/v1/traces?x=1&api_token=(hidden)"


def test_show_and_example_are_files_that_load() -> None:
    for verb in ("show", "example"):
        path = Path(f"{verb}.yaml")
        path.write_text(runner.invoke(config_app, [verb]).stdout)
        config = load_config(path, {})
        assert config.for_model("x").asked() == load_config(None, {}).for_model("x").asked()
    assert "$schema" in json.loads(runner.invoke(config_app, ["schema"]).stdout)


def test_hash_key_makes_an_entry_that_loads() -> None:
    printed = runner.invoke(config_app, ["hash-key", "--name", "laptop"]).stdout
    key = next(line.removeprefix("#   ") for line in printed.splitlines() if line.startswith("#   "))
    Path("config.yaml").write_text(printed)
    (entry,) = load_config(None, {}).server.api_keys
    assert (entry.name, entry.sha256) == ("laptop", hashlib.sha256(key.encode()).hexdigest())
    assert len(key) > 24


def test_hash_key_takes_a_key_from_stdin_and_refuses_a_short_one() -> None:
    assert SHA in runner.invoke(config_app, ["hash-key", "--stdin"], input="0123456789abcdef\n").stdout
    result = runner.invoke(config_app, ["hash-key", "--stdin"], input="short\n")
    assert isinstance(result.exception, ConfigError)
    assert "short" not in result.exception.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server: {host: 0.0.0.0}", "server.host 0.0.0.0 is open to the network"),
        ("models: {m: {source: ./nope.gguf}}", "config.yaml:1: models.m: .*there is no such file"),
        ("models: {nothing-of-this-name: {}}", "models.nothing-of-this-name: The model .* does not exist"),
        ("max_seq_len: 100000000000000000000000", "max_seq_len: 1.* is too large: at most 4294967295"),
        (f"max_seq_len: 0x{'f' * 9000}", "max_seq_len: a number of 36000 bits is too large"),
        ("defaults: {seed: 100000000000000}", "defaults.seed: .*too large"),
        (f"server: {{max_body_bytes: '{'9' * 400}'}}", "more memory than any machine has"),
        ("ttl: .inf", "ttl: inf is not a time"),
        ("ttl: .nan", "ttl: nan is not a time"),
        ("queue_timeout_s: .inf", "queue_timeout_s: expected a number, got inf"),
    ],
)
def test_check_finds_what_serve_would_refuse(text: str, words: str) -> None:
    Path("config.yaml").write_text(text)
    error = runner.invoke(config_app, ["check"]).exception
    assert isinstance(error, ConfigError)
    assert re.search(words, error.message)


def test_check_warns_of_a_model_that_is_not_pulled() -> None:
    Path("config.yaml").write_text("models: {smollm2: {}}")
    result = runner.invoke(config_app, ["check"])
    assert (result.exit_code, result.stdout) == (0, "ok: config.yaml, 1 model\n")
    assert "warning: models.smollm2: " in result.stderr and "laya pull smollm2-135m" in result.stderr
    assert len(json.loads(runner.invoke(config_app, ["check", "--json"]).stdout)["warnings"]) == 1
