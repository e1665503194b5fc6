"""Plans against real engines: what the child comes to hold is never above its plan, and the plan is close."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.bench.generated_models import generated
from laya.bench.memory import Cell, asked_cell, measure_cell
from laya.types import MIB

CELLS = [
    asked_cell("smollm2", 2, 512, "q8_0"),
    asked_cell("dense", 2, 1024, mmap=False),
    asked_cell("dense", 2, 1024, prompt_cache_bytes=24 * MIB),
    asked_cell("moe", 2, 2048, kv_pool_tokens=2048),
    asked_cell("window", 1, 2048),
    asked_cell("oss", 1, 512),
    asked_cell("latent", 1, 512, "q8_0"),
    asked_cell("delta", 2, 512),
]


@pytest.mark.engine
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.words)
def test_peak_of_the_child_is_within_its_plan_and_the_plan_is_close(
    cell: Cell, smollm2_path: Path, laya_home: Path
) -> None:
    folder = laya_home / "generated"
    model = smollm2_path if cell.model == "smollm2" else generated(cell.model, vocabulary=smollm2_path, folder=folder)
    row = measure_cell(cell, model, n_threads=1)
    assert row["in_band"], row
    # The engine prints its figure in MiB with two digits.
    assert 0.998 <= row["compute_ratio"] <= 1.35, row
