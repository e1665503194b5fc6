"""The soaks, short: everything at once, and nothing of it left. LAYA_FULL=1 runs those of a release.

Times are figures of the benches, never asserted here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from laya.bench import soak, soak_engines, soak_stub
from laya.bench.soak_clients import Ask, judged
from laya.bench.soak_stub import GROWTH_LIMIT_BYTES, is_prompt, stub_soak
from laya.types import MIB

FULL = os.environ.get("LAYA_FULL") == "1"  # the counts of a release instead of those of every change
CUT = httpx.RemoteProtocolError("incomplete chunked read")
STREAM = Ask("/v1/chat/completions", {"model": "m", "stream": True}, "data: [DONE]\n\n")


@pytest.mark.timeout(900)
def test_requests_by_the_thousand_leave_nothing_in_the_gateway() -> None:
    report = stub_soak(100_000 if FULL else 12_000)
    assert report["wrong"] == [], report


def test_bench_prints_one_json_line_last(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--stub", "--requests", "3001"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["arrivals"] >= 1000


GOOD_STUB: dict[str, Any] = {
    "asked": {"served": 7, "refused": 3},
    "wrong_answers": {},
    "arrivals": 10,
    "in_flight": 0,
    "outcomes": {"served": 7, "refused": 3, "failed": 0, "cancelled": 0},
    "rounds_after_warm_up": 3,
    "rss_growth_bytes": GROWTH_LIMIT_BYTES - 1,
    "files_growth": 18,
}
GOOD_ENGINES: dict[str, Any] = {
    "clients_saw": {"whole": 5, "left": 2, "engine_crashed": 1},
    "faults": [],
    "broken": {"kill": 1},
    "arrivals": 7,
    "outcomes": {"served": 5, "refused": 0, "failed": 1, "cancelled": 1},
    "in_flight": 0,
    "unaccounted": 0,
    "busy_slots": 0,
    "served_after": 3,
    "after": {"processes": 0, "reserved_bytes": 0},
    "files_growth": 4,
    "n_tracebacks": 0,
    "exit_code": 0,
}


def test_what_is_right_is_not_found_fault_with() -> None:
    assert soak_stub.wrong_with(GOOD_STUB) == soak_engines.wrong_with(GOOD_ENGINES) == []
    assert is_prompt({"p99_ms": 19.9}) and not is_prompt({"p99_ms": 20.0})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"wrong_answers": {"whole": 1}}, "not the right ones: {'whole': 1}"),
        ({"in_flight": 1}, "1 requests without an end"),
        ({"outcomes": {"served": 6, "refused": 3, "failed": 1, "cancelled": 0}}, "outcomes"),
        ({"outcomes": {"served": 6, "refused": 3, "failed": 0, "cancelled": 0}}, "outcomes"),
        ({"arrivals": 11}, "11 arrivals"),
        ({"rounds_after_warm_up": 1}, "too few requests"),
        ({"rss_growth_bytes": 5 * MIB}, "memory grew by 5242880 bytes"),
        ({"files_growth": 19}, "19 files more"),
    ],
)
def test_each_leak_before_a_stub_is_found(changed: dict[str, Any], words: str) -> None:
    (found,) = soak_stub.wrong_with(GOOD_STUB | changed)
    assert words in found


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"faults": ["/v1/completions first: 500"]}, "1 answers that are none"),
        ({"n_tracebacks": 1}, "1 tracebacks"),
        ({"in_flight": 1}, "1 requests without an end"),
        ({"unaccounted": -1}, "-1 arrivals without an outcome"),
        ({"arrivals": 5}, "5 arrivals of 8 asked"),
        ({"arrivals": 9}, "9 arrivals of 8 asked"),
        ({"outcomes": {"served": 4}}, "4 served, 5 whole"),
        ({"outcomes": {"served": 8}}, "8 served, 5 whole"),
        ({"broken": {}}, "nothing was broken"),
        ({"served_after": 2}, "2 of 3 models"),
        ({"busy_slots": 1}, "1 slots compute for nobody"),
        ({"after": {"processes": 1, "reserved_bytes": 0}}, "1 processes left"),
        ({"after": {"processes": 0, "reserved_bytes": 7}}, "7 bytes still reserved"),
        ({"files_growth": 5}, "5 files more"),
        ({"exit_code": -9}, "exit code -9"),
    ],
)
def test_each_leak_of_engines_is_found(changed: dict[str, Any], words: str) -> None:
    (found,) = soak_engines.wrong_with(GOOD_ENGINES | changed)
    assert words in found


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
