"""What an engine that died at its ceiling is refused with: the settings that its plan would have fitted with."""

from __future__ import annotations

import msgspec
import pytest

from laya.bench.stub_gateway import stub_plan
from laya.engines.ceiling import LimitHit
from laya.engines.hooks import Ending
from laya.errors import EngineOutOfMemory
from laya.gateway.outgrown import Outgrown
from laya.types import MIB, Suggestion

DIED = Ending(
    peak_bytes=800 * MIB, limit_hit=LimitHit(limit_bytes=800 * MIB, peak_bytes=800 * MIB, by_kernel=True)
)  # fmt: skip


def test_what_died_anyway_is_refused_with_what_would_have_fitted() -> None:
    flags = ("--max-num-seqs 1", "--max-seq-len 4096")
    suggestions = [Suggestion(flags=each, total_bytes=500 * MIB, note="") for each in flags]
    plan = msgspec.structs.replace(stub_plan(8), model="big", fits=False, suggestions=suggestions)
    outgrown = Outgrown()
    outgrown.insist("big")
    outgrown.ended("big", plan, DIED)
    with pytest.raises(EngineOutOfMemory) as caught:
        outgrown.check("big")
    assert caught.value.details["suggestions"] == list(flags)
    assert "What fits: --max-num-seqs 1; --max-seq-len 4096." in caught.value.message
    assert "`models.big.max_num_seqs: 1` in config.yaml" in caught.value.message


def test_what_its_plan_held_for_fitting_is_refused_without_suggestions_but_with_advice() -> None:
    outgrown = Outgrown()
    for _ in range(2):
        outgrown.check("liar")
        outgrown.ended("liar", stub_plan(1), DIED)
    with pytest.raises(EngineOutOfMemory, match="Lower max_seq_len or max_num_seqs") as caught:
        outgrown.check("liar")
    assert caught.value.details["suggestions"] == []
