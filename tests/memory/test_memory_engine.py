"""A plan against a real engine: what the child comes to hold is never above what was planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.bench.memory import measure_row


@pytest.mark.engine
def test_peak_of_the_child_is_within_the_plan_and_the_plan_is_close(smollm2_path: Path) -> None:
    row = measure_row(smollm2_path, {"max_num_seqs": 2, "max_seq_len": 2304, "n_threads": 1})
    assert row["peak_bytes"] <= row["plan_bytes"], row
    assert row["in_band"], row
