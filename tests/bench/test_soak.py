"""The soaks, short: everything at once, and nothing of it left. LAYA_FULL=1 runs those of a release.

Times are figures of the benches, never asserted here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from laya.bench import soak
from laya.bench.soak_clients import Ask, judged
from laya.bench.soak_engines import engines_soak, shown
from laya.bench.soak_stub import stub_soak

FULL = os.environ.get("LAYA_FULL") == "1"  # the counts of a release instead of those of every change
CUT = httpx.RemoteProtocolError("incomplete chunked read")
STREAM = Ask("/v1/chat/completions", {"model": "m", "stream": True}, "data: [DONE]\n\n")


@pytest.mark.timeout(900)
def test_requests_by_the_thousand_leave_nothing_in_the_gateway() -> None:
    report = stub_soak(100_000 if FULL else 12_000)
    assert report["wrong_answers"] == {}
    assert report["outcomes"]["failed"] == report["outcomes"]["cancelled"] == 0
    assert report["leaks_nothing"], report


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_engines_that_are_killed_loaded_and_reloaded_leave_nothing(smollm2_path: Path) -> None:
    report = engines_soak(smollm2_path, 600 if FULL else 20, seed=1, every_s=3.0 if FULL else 1.0)
    assert report["faults"] == []
    assert report["n_tracebacks"] == 0, report["log"]
    assert report["in_flight"] == report["unaccounted"] == report["busy_slots"] == 0
    assert report["clients_saw"]["whole"] > 0
    assert report["passed"], shown(report)


def test_bench_prints_one_json_line_last(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--stub", "--requests", "1000"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["arrivals"] >= 1000


def test_default_model_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAYA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="laya pull"):
        soak.main(["--minutes", "0"])


@pytest.mark.parametrize(
    ("status", "text", "is_cut", "end"),
    [
        (200, 'data: {"choices": []}\n\ndata: [DONE]\n\n', False, "whole"),
        (200, 'data: {"error": {"code": "engine_crashed"}}\n\n', True, "engine_crashed"),
        (503, '{"error": {"code": "queue_timeout"}}', False, "queue_timeout"),
        (503, '{"error": "it is loading", "code": "model_loading"}', False, "model_loading"),
    ],
)
def test_expected_ends_are_no_faults(status: int, text: str, is_cut: bool, end: str) -> None:
    assert judged(STREAM, status, text, broke=CUT if is_cut else None) == (end, None)


@pytest.mark.parametrize(
    ("status", "text", "is_cut"),
    [
        (200, 'data: {"choices": []}\n\n', False),  # cut off, as if complete
        (200, 'data: {"choices": []}\n\n', True),  # cut off without a word
        (200, 'data: {"error": {"code": "engine_crashed"}}\n\n', False),  # broken off, and framed as if it were not
        (200, 'data: {"error": {"code": "what"}}\n\n', True),
        (200, 'data: {"error": {"code": "engine_crashed"}}\n\ndata: [DONE]\n\n', False),
        (500, "Internal Server Error", False),
        (503, '{"error": {"code": "queue_timeout"}}', True),  # a refusal is whole
        (404, '{"error": {"code": "model_not_found"}}', False),
        (501, '{"error": {"code": "not_supported"}}', False),
    ],
)
def test_other_ends_are_faults(status: int, text: str, is_cut: bool) -> None:
    assert judged(STREAM, status, text, broke=CUT if is_cut else None)[1] is not None


def test_whole_answer_has_no_other_way_to_say_that_it_broke_off() -> None:
    raw = Ask("/v1/embeddings", {"model": "m"}, '"embedding"', is_raw=True)
    assert judged(raw, 200, '{"data": [', broke=CUT) == ("broken off", None)
    assert judged(raw, 200, '{"data": [')[1] is not None
    assert judged(Ask("/api/chat", {"model": "m"}, '"done":true'), 200, '{"error": "x"}\n{"done":true}')[1] is not None
