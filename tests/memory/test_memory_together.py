"""Which models coexist, and what asking for one does to another."""

from __future__ import annotations

from pathlib import Path

import msgspec
from small_gguf import MakeGguf

from laya.memory import Budget, plan_file
from laya.memory.together import coexisting, meetings
from laya.types import AskedSettings, Plan

SHAPE = {"n_layer": 8, "n_head_kv": 4}


def test_coexisting_sets_are_the_largest_and_all_of_them() -> None:
    needs = {"a": 4, "b": 3, "c": 2, "d": 9}
    assert coexisting(needs, 9) == [("c", "b", "a"), ("d",)]
    assert coexisting(needs, 6) == [("c", "b"), ("c", "a")]
    assert coexisting({}, 9) == []
    many = {str(n): 1 for n in range(40)}
    assert len(coexisting(many, 100)[0]) == 12


def test_asked_model_stays_whole_shrinks_or_makes_the_other_leave(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**SHAPE)
    open_, fixed = AskedSettings(), AskedSettings(max_seq_len=32768, max_num_seqs=2, kv_cache_dtype="f16")

    def planned(asked: AskedSettings, n_bytes: int, path: Path = path) -> Plan:
        return plan_file(path, asked, msgspec.structs.replace(plenty, bytes=n_bytes), model_id="m")

    plans = {"open": planned(open_, plenty.bytes), "fixed": planned(fixed, plenty.bytes)}
    asked = {"open": open_, "fixed": fixed}

    def found(budget_bytes: int, pinned: list[str]) -> dict[str, str]:
        each = meetings(plans, pinned, budget_bytes, lambda name, n_bytes: planned(asked[name], n_bytes))
        return {meeting.asked: meeting.outcome for meeting in each}

    need = plans["fixed"].need_bytes
    assert found(2 * need, []) == {"open": "beside", "fixed": "beside"}
    assert found(2 * need - 1, []) == {"open": "smaller", "fixed": "unloads"}
    assert found(2 * need - 1, ["open"]) == {"open": "smaller", "fixed": "refused"}
    assert found(need, ["fixed"]) == {"open": "refused", "fixed": "unloads"}
