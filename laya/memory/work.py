"""Owns: what a token makes an engine compute with: a model's weights by type and part. Knows no time and no machine.

A token passes every matrix of the layers, some experts of a layer that has them, and the output matrix. An embedding
is looked up, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from laya.memory.ggml import GGML_TYPES
from laya.memory.gguf import TensorInfo

if TYPE_CHECKING:
    from laya.memory.facts import ModelFacts

Part = Literal["layers", "experts", "output"]
_LOOKED_UP = frozenset(
    {"token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"}
)
_BITS = {kind.name: 8 * kind.block_bytes / kind.block for kind in GGML_TYPES.values()}


class Matrices(msgspec.Struct, frozen=True, kw_only=True):
    """The matrices of one part that have one type."""

    part: Part
    type_name: str
    elements: int

    @property
    def n_bytes(self) -> float:
        return self.elements * _BITS.get(self.type_name, 16) / 8


def matrices_of(tensors: Iterable[TensorInfo]) -> tuple[Matrices, ...]:
    """The matrices in a tensor table; an embedding without an output matrix beside it is the output matrix."""
    tensors = list(tensors)
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    sums: dict[tuple[Part, str], int] = {}
    for tensor in tensors:
        part = _part(tensor.name, is_tied)
        if part is not None and len(tensor.shape) > 1:
            elements = 1
            for width in tensor.shape:
                elements *= width
            sums[part, tensor.type_name] = sums.get((part, tensor.type_name), 0) + elements
    return tuple(Matrices(part=part, type_name=name, elements=n) for (part, name), n in sums.items())


def _part(name: str, is_tied: bool) -> Part | None:
    if name == "output.weight" or (name == "token_embd.weight" and is_tied):
        return "output"
    if name in _LOOKED_UP:
        return None
    return "experts" if "_exps." in name else "layers"


def work_of(facts: ModelFacts) -> tuple[Matrices, ...]:
    """The matrices of a model; without a tensor table, from its size and shape, all of its main type."""
    if facts.matrices:
        return facts.matrices
    shape = facts.shape
    type_name = max(facts.matrix_bytes, key=lambda name: facts.matrix_bytes[name], default="F16")
    elements = round(8 * facts.weights_bytes / _BITS.get(type_name, 16))
    output = min(shape.n_vocab * shape.n_embd, elements // 2)
    experts = min(3 * shape.n_expert * shape.n_ff_expert * shape.n_embd * shape.n_layer, elements - output)
    parts: dict[Part, int] = {"layers": elements - output - experts, "experts": experts, "output": output}
    return tuple(Matrices(part=part, type_name=type_name, elements=n) for part, n in parts.items() if n)
