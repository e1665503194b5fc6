"""The expert router's bench holds each side to the oracle and prints one JSON line last."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from laya.bench import expert_router
from laya.modeling.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="NOT RUN: no native core here")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other by spinning, which beside other programs takes minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_bench_prints_a_line_with_every_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_router, "CASES", (expert_router.Case(4, 64, 8, 2),))
    monkeypatch.setattr(expert_router, "BLOCKS", 1)
    expert_router.main(["--no-compile"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report.keys() == {"cases", "hardware"}
    row = report["cases"][0]
    wanted = {"tokens", "hidden", "experts", "top_k", "fused_us", "folded_us", "eager_us", "selection_us"}
    assert wanted | {"fused_baseline_us", "choice_in_core_us", "fused_token_by_token_us"} < row.keys()
    assert row["compiled_us"] is None
    assert all(row["profile"][side][group] > 0 for side in ("eager", "folded") for group in ("linear", "top-k"))
    assert report["hardware"]["instructions"] in ("avx512", "avx2", "baseline")


def test_side_that_chooses_otherwise_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.select_rows
    monkeypatch.setattr(cpu, "select_rows", lambda *args: (right(*args)[0], right(*args)[1].flip(-1)))
    with pytest.raises(SystemExit, match="selection does not choose as the oracle does"):
        expert_router.measure(expert_router.Case(4, 64, 8, 2), compiles=False)


def test_side_that_takes_another_way_than_its_name_says_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "gate_op", cpu.gate_rows)
    with pytest.raises(SystemExit, match=r"op is to run \{'laya::gate': 1\} and ran \{\}"):
        expert_router.measure(expert_router.Case(4, 64, 8, 2), compiles=False)
