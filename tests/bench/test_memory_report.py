"""The memory bench's judgement: its band, its summary, and that its cells are what they are said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laya.bench.generated_models import SHAPES
from laya.bench.memory import CELLS, SMOLLM2, in_band, main, summary
from laya.bench.memory_speed import Judged, words
from laya.bench.memory_vllm import vllm_cells
from laya.errors import ConfigError
from laya.types import MIB


@pytest.mark.parametrize(
    ("plan_mib", "peak_mib", "expected"),
    [(100, 100, True), (116, 100, True), (117, 100, False), (99, 100, False), (220, 200, True), (221, 200, False)],
)
def test_band_is_a_tenth_over_and_sixteen_mib_where_all_is_small(plan_mib: int, peak_mib: int, expected: bool) -> None:
    assert in_band(plan_mib * MIB, peak_mib * MIB) is expected


def row(cell: str, plan_mib: int, peak_mib: int) -> dict[str, Any]:
    plan, peak = plan_mib * MIB, peak_mib * MIB
    judged = {"ratio": plan / peak, "in_band": in_band(plan, peak), "compute_ratio": 1.01, "speed": None}
    return {"cell": cell, "plan_bytes": plan, "peak_bytes": peak} | judged


def test_summary_tells_the_worst_of_large_and_small_cells_apart() -> None:
    found = summary([row("a", 110, 100), row("b", 412, 400), row("c", 450, 400)])
    assert found["n_cells"] == 3
    assert not found["in_band"]
    assert found["out_of_band"] == ["c"]
    assert (found["lowest_ratio"], found["highest_ratio"]) == (1.03, 1.125)
    assert found["small_most_over_bytes"] == 10 * MIB
    assert (found["speeds"], found["speeds_within"], found["speed_within_range"]) == (0, 0, None)


def test_speeds_in_their_range_are_counted_over_all_cells_and_the_others_marked() -> None:
    within, outside = (Judged(measured=n, low=1.0, high=2.0, is_within=n < 2) for n in (1.5, 3.0))
    speed = {"first_token_s": within, "decode_tokens_per_s": outside, "decode_all_tokens_per_s": within}
    found = summary([row("a", 110, 100) | {"speed": speed}, row("b", 110, 100)])
    assert (found["speeds"], found["speeds_within"], found["speed_within_range"]) == (3, 2, 0.667)
    assert words(speed) == "1.5 s to the first token (1-2), 3 tok/s (1-2, OUTSIDE), 1.5 tok/s all at once (1-2)"


def test_cells_cover_what_the_bench_promises() -> None:
    asked = [cell.asked for cell in CELLS]
    assert len(CELLS) >= 24
    assert len({cell.words for cell in CELLS}) == len(CELLS)
    assert {cell.model for cell in CELLS} == {SMOLLM2, *SHAPES}
    assert {each.max_seq_len for each in asked} >= {512, 2048, 4096, 8192, 16384, 32768}
    assert {each.max_num_seqs for each in asked} == {1, 2, 4, 8}
    assert {each.kv_cache_dtype for each in asked} == {"f16", "q8_0"}
    assert {each.mmap for each in asked} == {True, False}


def test_words_that_no_cell_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="gemma9"):
        main(["--only", "gemma9"])


def test_cells_of_vllm_are_those_that_a_folder_was_trained_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no Hugging Face folder"):
        vllm_cells([tmp_path])
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048, "vocab_size": 4096}')
    assert [cell.words.rpartition(tmp_path.name)[2] for cell in vllm_cells([tmp_path])] == [" 1 x 512", " 4 x 1024"]
    for options in (["--engine", "vllm"], ["--model", str(tmp_path)]):
        with pytest.raises(ConfigError, match="--engine vllm and --model FOLDER go together"):
            main(options)
