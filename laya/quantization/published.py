"""Owns: how a folder of 4-bit weights names its tensors and its settings, so that vLLM and other loaders take it, and
whether one that was written is whole: every linear layer in 4 bits, every router at 16 bits or more.

Reads headers only: it is no tensor library's business.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from laya.errors import BadModelFile, EngineFailed
from laya.memory.safetensors import SafeTensor, model_files, read_tables
from laya.memory.source import LocalFile
from laya.quantization.kinds import FULL_TYPES

IS_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate|gate\.e_score_correction_bias)(\.weight|\.bias)?$")
_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
# Mixtral's experts have other names in what is published, and loads, than in the model that AutoRound sees.
_MIXTRAL = re.compile(r"(\.block_sparse_moe\.experts\.\d+)\.(gate|up|down)_proj\.")
_MIXTRAL_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def published(model_type: str, name: str) -> str:
    """The name of a tensor as checkpoints of this family have it."""
    if model_type != "mixtral":
        return name
    return _MIXTRAL.sub(lambda found: f"{found[1]}.{_MIXTRAL_NAMES[found[2]]}.", name)


def settings_of(kind: str, group: int, kept: Iterable[str]) -> dict[str, Any]:
    """quantization_config. kept: tensors that were not quantized; matrices among them in layers are named in it."""
    matrices = sorted(name.removesuffix(".weight") for name in kept if IS_ROUTER.search(name))
    common: dict[str, Any] = {"quant_method": kind, "bits": 4, "group_size": group}
    if kind == "awq":
        return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": [*matrices, "lm_head"]}
    dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in matrices}
    return common | {
        "sym": True, "desc_act": False, "true_sequential": False, "lm_head": False, "checkpoint_format": "gptq",
        "dynamic": dynamic,
    }  # fmt: skip


def tensors_of(folder: Path) -> dict[str, SafeTensor]:
    """The headers of a folder's safetensors files, by the tensors' names."""
    files = {file.name: LocalFile(file) for file in sorted(folder.glob("*.safetensors"))}
    tables = read_tables(model_files(str(folder), files, None))
    return {name: tensor for table in tables for name, tensor in table.items() if name != "__metadata__"}


def linear_stems(folder: Path) -> frozenset[str]:
    """The linear layers of a model's decoder, without `.weight`: what is to be quantized.

    Raises BadModelFile for experts in one tensor, which loaders of 4-bit weights do not take.
    """
    stems = set()
    for name, tensor in tensors_of(folder).items():
        if not _IN_LAYER.search(name) or IS_ROUTER.search(name) or len(tensor.shape) < 2:
            continue
        if len(tensor.shape) > 2 or not name.endswith(".weight"):
            raise BadModelFile(f"{folder}: {name} has the shape {list(tensor.shape)}: only matrices can be packed.")
        stems.add(name.removesuffix(".weight"))
    return frozenset(stems)


def widths_of(folder: Path) -> frozenset[int]:
    """Inputs of each linear layer: a group of weights that share a scale must divide them."""
    tensors = tensors_of(folder)
    return frozenset(int(tensors[f"{stem}.weight"].shape[1]) for stem in linear_stems(folder))


def check_whole(folder: Path, stems: frozenset[str]) -> dict[str, Any]:
    """What lies in the folder. Raises EngineFailed, naming the tensor, where it is not what was to be."""
    tensors = tensors_of(folder)
    quantized = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    for names, what in ((stems - quantized, "was not quantized"), (quantized - stems, "is none of the model's layers")):
        if names:
            raise EngineFailed(f"{min(names)} {what}, nor are {len(names) - 1} others as they should be.")
    packed = {f"{stem}.{part}" for stem in quantized for part in ("qweight", "qzeros", "scales", "g_idx")}
    kept = {name: tensor.dtype for name, tensor in tensors.items() if name not in packed}
    for name, dtype in kept.items():
        if dtype not in FULL_TYPES:
            raise EngineFailed(f"{name} became {dtype}: it needs 16 bits at least.")
    n_experts = sum(bool(_EXPERT.search(name)) for name in quantized)
    n_bytes = sum(end - start for start, end in (tensors[name].data_offsets for name in packed & tensors.keys()))
    return {
        "quantized": {"experts": n_experts, "others": len(quantized) - n_experts},
        "quantized_bytes": n_bytes,
        "quantized_weights": sum(8 * math.prod(tensors[f"{stem}.qweight"].shape) for stem in quantized),
        "routers": sum(bool(IS_ROUTER.search(name)) for name in kept),
        "kept": dict(sorted(kept.items())),
    }


def read_settings(folder: Path) -> dict[str, Any]:
    """A model's config.json. Raises BadModelFile for one that is quantized already."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise BadModelFile(f"{folder} is quantized already ({method}): name the model that it was made of.")
    return config
