"""Checkpoints that are not whole are refused before an engine is spent on them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from laya.errors import BadModelFile
from laya.memory.hf import local_model
from laya.memory.hf_complete import check_complete

ENDS = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
LAYER = ["self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
DENSE = ENDS + [f"model.layers.{number}.{name}" for number in range(4) for name in LAYER]


def folder(path: Path, names: list[str], **config: object) -> Path:
    path.mkdir(exist_ok=True)
    figures = {"model_type": "llama", "hidden_size": 8, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(figures | config))
    table = {
        name: {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8 * number, 8 * number + 8]}
        for number, name in enumerate(names)
    }
    header = json.dumps(table).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 * len(names)))
    return path


def check(path: Path, names: list[str], **config: object) -> None:
    check_complete(local_model(folder(path, names, **config)))


def test_whole_models_pass(tmp_path: Path) -> None:
    check(tmp_path / "dense", DENSE)
    check(tmp_path / "tied", [name for name in DENSE if name != "lm_head.weight"], tie_word_embeddings=True)
    packed = [name.replace("lm_head.weight", "lm_head.qweight") for name in DENSE]
    check(tmp_path / "packed", packed)


def test_layers_of_several_kinds_pass(tmp_path: Path) -> None:
    """One dense layer before others with experts, and layers that share keys and values."""
    experts = [f"model.layers.{number}.mlp.experts.{e}.up_proj.weight" for number in (1, 2, 3) for e in range(2)]
    first = [f"model.layers.0.{name}" for name in LAYER]
    check(tmp_path / "first-dense", ENDS + first + experts)
    shared = [name for name in DENSE if "layers.3.self_attn" not in name and "layers.2.self_attn" not in name]
    check(tmp_path / "shared", shared)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadModelFile, match=r"down_proj|token embeddings|lm_head"):
        check(tmp_path, [each for each in DENSE if each != name])


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    experts = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in range(4) for e in range(8)]
    with pytest.raises(BadModelFile, match=r"lacks model.layers.1.mlp.experts.5.up_proj.weight"):
        check(tmp_path, ENDS + [name for name in experts if "layers.1.mlp.experts.5" not in name])


def test_what_no_other_layer_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"has model.layers.1.mlp.extra.weight, which its other layers have not"):
        check(tmp_path, [*DENSE, "model.layers.1.mlp.extra.weight"])
