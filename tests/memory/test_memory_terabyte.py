"""A model of a terabyte is planned from the headers of its 30 files, within the memory of a small process."""

from __future__ import annotations

from pathlib import Path

from laya.bench.fresh_plan import plan_in_a_fresh_process
from laya.bench.plan_terabyte import N_SHARDS, write_model
from laya.memory.facts import read_facts

MOST_MIB = 200


def test_planning_a_terabyte_takes_the_memory_of_its_headers(tmp_path: Path) -> None:
    first = write_model(tmp_path)
    assert len(list(tmp_path.iterdir())) == N_SHARDS
    planned = plan_in_a_fresh_process(first)
    assert planned["weights_bytes"] == read_facts(first).weights_bytes > 10**12
    assert planned["peak_mib"] < MOST_MIB
