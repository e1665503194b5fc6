"""The `traces` section: what a receiver's URL and a file of headers may be, and what is said where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.config import Config, load_config, read_headers
from laya.config.traces import is_installed
from laya.errors import ConfigError

URL = "http://127.0.0.1:4318/v1/traces"
NO_URL = "traces.endpoint: expected a URL that begins with http:// or https://, got"
NO_PLACE = "traces.endpoint: it names no host, or no port that can be"


def load(folder: Path, traces: str) -> Config:
    (folder / "config.yaml").write_text(f"version: 1\ntraces: {{{traces}}}\n")
    return load_config(folder / "config.yaml", {})


def message(folder: Path, traces: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, traces)
    return caught.value.message.removeprefix(f"{folder}/config.yaml:2: ")


def test_traces_are_off_and_their_values_are_read(tmp_path: Path) -> None:
    assert Config().traces.endpoint is None
    (tmp_path / "headers").write_text("\n# a key\nAuthorization: Bearer a:b\nx-team:  ml \n")
    traces = load(tmp_path, f"endpoint: '{URL}', sample_ratio: 0.1, headers_file: headers").traces
    assert (traces.endpoint, traces.sample_ratio, traces.headers_file) == (URL, 0.1, str(tmp_path / "headers"))
    assert read_headers(tmp_path / "headers") == {"authorization": "Bearer a:b", "x-team": "ml"}
    assert read_headers(None) == {}


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        ("endpont: x", "traces.endpont is not a key here. Did you mean endpoint?"),
        ("endpoint: grpc://host:4317/v1/traces", f"{NO_URL} grpc"),
        ("endpoint: 'localhost:4318'", f"{NO_URL} no scheme"),
        ("endpoint: 'http:///v1/traces'", NO_PLACE),
        ("endpoint: 'http://host:99999/v1/traces'", NO_PLACE),
        ("endpoint: 'http://host:4318'", "traces.endpoint: it has no path; receivers of OTLP take"),
        ("endpoint: 'http://me:hunter2@host/v1/traces'", "traces.endpoint: a password does not belong into a URL"),
        ("sample_ratio: 2", "traces.sample_ratio: expected a number >= 0 and <= 1, got 2"),
        ("headers_file: nowhere", "traces.headers_file: there is no file 'nowhere'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_by_its_key(tmp_path: Path, traces: str, said: str) -> None:
    told = message(tmp_path, traces)
    assert told.startswith(said) and "hunter2" not in told


def test_a_line_that_is_no_header_is_named_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("a: b\nhunter2\n")
    told = message(tmp_path, "headers_file: headers")
    assert told == "traces.headers_file: 'headers': line 2 is not `name: value`"
    (tmp_path / "headers").write_bytes(b"a: \xff\n")
    assert message(tmp_path, "headers_file: headers") == "traces.headers_file: 'headers': it is not text"


def test_without_the_extra_the_config_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed()
    monkeypatch.setattr("laya.config.traces._EXPORTER", "opentelemetry_that_is_not_there.exporter")
    told = message(tmp_path, f"endpoint: '{URL}'")
    assert told == "traces.endpoint: what sends traces is not here: pip install 'laya-llm[otel]'"
    assert load(tmp_path, "sample_ratio: 0.5").traces.endpoint is None
