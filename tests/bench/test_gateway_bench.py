"""The gateway bench runs the path it names, and says so where it can't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laya.bench import gateway, peers


def test_bench_prints_one_json_line_last_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    gateway.main(["--requests", "100", "--pairs", "1", "--row", "0", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["connections"] for row in report["rows"]] == [1, 8, 64]
    assert all(row["laya_per_s"] > 0 and row["direct_per_s"] > 0 for row in report["rows"])
    assert all(row["bare_relay_cpu_us_per_request"] > 0 for row in report["rows"])
    assert list(tmp_path.iterdir()) == []


def test_unknown_peer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gateway.main(["--against", "nobody"])
    assert "'nobody' is not one of envoy, vllm-router" in capsys.readouterr().err


def test_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="make bench-peers"), peers.running("envoy", 1):
        pass
