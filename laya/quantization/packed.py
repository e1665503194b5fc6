"""Owns: the numbers that a folder of 4-bit weights stands for, in AWQ's and GPTQ's layouts, exactly, tensor by tensor.

Written from the layouts, not with a quantizer's or an engine's code, so that it is a check of what they wrote. Knows no
model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from laya.errors import BadModelFile

BITS, PER_WORD = 4, 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble of a word -> column
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """[in, out / 8], [groups, out / 8], [groups, out] -> the weight, [out, in] in float32."""
    levels, zeros = _columns(qweight, AWQ_ORDER), _columns(qzeros, AWQ_ORDER)
    group = levels.shape[0] // zeros.shape[0]
    wide_zeros, wide_scales = (each.repeat_interleave(group, 0) for each in (zeros, scales.float()))
    return ((levels - wide_zeros).float() * wide_scales).t().contiguous()


def unpack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, *, is_v2: bool = False) -> Tensor:
    """[in / 8, out], [groups, out / 8], [groups, out], [in] -> the weight, [out, in] in float32.

    is_v2: zero points are kept as they are; in the older and usual form less one.
    """
    order = tuple(range(PER_WORD))
    levels = _columns(qweight.t().contiguous(), order).t()
    zeros = _columns(qzeros, order) + (0 if is_v2 else 1)
    group = g_idx.long()
    return ((levels - zeros[group]).float() * scales.float()[group]).t().contiguous()


def _columns(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Eight columns of each word of 32 bits."""
    columns = torch.empty((*words.shape, PER_WORD), dtype=torch.int32)
    for nibble, column in enumerate(order):
        columns[..., column] = (words >> BITS * nibble) & 15  # the shift keeps the sign, the mask takes it away
    return columns.reshape(words.shape[0], -1)


def weights(folder: Path) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, weight, whether it was quantized: of all tensors, as the model had them before.

    Raises BadModelFile where the config names another layout or a part of a weight is missing.
    """
    layout = _layout(folder)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        where = {name: file for file in files for name in list(file.keys())}
        for name, file in where.items():
            stem, _, part = name.rpartition(".")
            if part not in PARTS:
                yield name, file.get_tensor(name), False
            elif part == "qweight":
                yield f"{stem}.weight", _weight(folder, layout, stem, where), True


def _weight(folder: Path, layout: dict[str, Any], stem: str, where: dict[str, Any]) -> Tensor:
    wanted = PARTS if layout["quant_method"] == "gptq" else PARTS[:3]
    missing = [f"{stem}.{part}" for part in wanted if f"{stem}.{part}" not in where]
    if missing:
        raise BadModelFile(f"{folder}: there is no {missing[0]}")
    parts = [where[f"{stem}.{part}"].get_tensor(f"{stem}.{part}") for part in wanted]
    if layout["quant_method"] == "awq":
        return unpack_awq(*parts)
    return unpack_gptq(*parts, is_v2=layout.get("checkpoint_format") == "gptq_v2")


def _layout(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes()).get("quantization_config") or {}
    if found.get("quant_method") not in ("awq", "gptq") or found.get("bits") != BITS:
        raise BadModelFile(
            f"{folder}: its quantization_config has quant_method {found.get('quant_method')!r} and bits "
            f"{found.get('bits')!r}; read here are awq and gptq with {BITS}."
        )
    return found
