"""The grid of contexts and sequences, on the figures of the article that lost its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_gguf import MakeGguf

from laya.errors import ConfigError
from laya.memory import Budget, read_facts
from laya.memory.engine_facts import built_in_engine
from laya.memory.facts import ModelFacts
from laya.memory.grid import grid
from laya.memory.params import read_params
from laya.memory.planner import Model
from laya.types import GIB, AskedSettings

SEVEN_B = {"n_layer": 32, "n_head": 32, "n_head_kv": 32, "n_embd": 4096, "n_ff": 11008, "n_vocab": 32000}


@pytest.fixture
def seven_b(tmp_path: Path) -> Model:
    path = tmp_path / "7b.json"
    path.write_text(json.dumps({"arch": "llama", "params": SEVEN_B}))
    return _model(read_params(path))


def _model(facts: ModelFacts) -> Model:
    return Model(id="7b", facts=facts, engine=built_in_engine(), n_cores=4)


def limited(n_bytes: int) -> Budget:
    return Budget(bytes=n_bytes, limit="memory available", memory_bytes=n_bytes)


def test_cache_of_seven_billion_parameters_is_the_articles(seven_b: Model) -> None:
    rows = grid(seven_b, AskedSettings(), limited(60 * GIB))
    need = {(cell.max_num_seqs, cell.max_seq_len): cell.need_bytes for row in rows for cell in row}
    assert need[2, 4096] - need[1, 4096] == pytest.approx(2 * GIB, rel=0.01)  # 512 KiB a token
    assert need[8, 4096] - need[1, 4096] == pytest.approx(14 * GIB, rel=0.01)
    assert need[8, 32768] > 128 * GIB
    fits = {(cell.max_num_seqs, cell.max_seq_len): cell.fits for row in rows for cell in row}
    assert fits[1, 4096]
    assert not fits[8, 32768]


def test_grid_grows_along_both_sides_and_holds_what_was_asked(seven_b: Model) -> None:
    rows = grid(seven_b, AskedSettings(max_seq_len=5000, max_num_seqs=3), limited(60 * GIB))
    assert [row[0].max_num_seqs for row in rows] == [1, 2, 3, 4, 8, 16]
    assert 5000 in [cell.max_seq_len for cell in rows[0]]
    for line in (*rows, *zip(*rows, strict=True)):
        assert [cell.need_bytes for cell in line] == sorted(cell.need_bytes for cell in line)


def test_grid_ends_at_the_trained_length(make_gguf: MakeGguf) -> None:
    model = _model(read_facts(make_gguf(n_ctx_train=1000)))
    (only,) = {cell.max_seq_len for row in grid(model, AskedSettings(), limited(GIB)) for cell in row}
    assert only == 1000
    with pytest.raises(ConfigError, match="1001"):
        grid(model, AskedSettings(max_seq_len=1001), limited(GIB))
