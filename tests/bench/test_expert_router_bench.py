"""The expert router's bench holds each side to the oracle and prints one JSON line last."""

from __future__ import annotations

import json

import pytest

from laya.bench import expert_router
from laya.modeling.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="NOT RUN: no native core here")


def test_bench_prints_a_line_with_every_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_router, "CASES", (expert_router.Case(4, 64, 8, 2),))
    monkeypatch.setattr(expert_router, "BLOCKS", 1)
    expert_router.main(["--no-compile"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"fused_us", "op_us", "folded_us", "eager_us", "selection_us"} < report["cases"][0].keys()
    assert report["hardware"]["instructions"] in ("avx512", "avx2", "baseline")


def test_side_that_chooses_otherwise_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.select_rows
    monkeypatch.setattr(cpu, "select_rows", lambda *args: (right(*args)[0], right(*args)[1].flip(-1)))
    with pytest.raises(SystemExit, match="selection does not choose as the oracle does"):
        expert_router.measure(expert_router.Case(4, 64, 8, 2), compiles=False)
