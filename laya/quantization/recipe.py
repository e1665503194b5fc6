"""Owns: which type each tensor of a model gets for a kind of file: llama.cpp's mixtures, tensor by tensor.

The rules are those of llama.cpp's own quantizer (a test holds them to files that it wrote); beyond them, routers, norms
and vectors of a source that has them in fewer than 16 bits are kept at F32. Knows no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from laya.errors import BadModelFile, ConfigError
from laya.memory.ggml import GGML_TYPES, GgmlType, type_named
from laya.memory.gguf import TensorInfo
from laya.quantization.kinds import FILE_KINDS, FULL_TYPES

# Where a row is no whole number of blocks of 256: types with blocks of 32.
_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}

# Matrices that every mixture leaves as they are, by a part of their name; routers and norms are `is_protected`.
_KEPT_PARTS = (
    "altup", "laurel", "per_layer_model_proj", "ffn_gate_tid2eid.weight", "ssm_conv1d", "shortconv.conv.weight",
    "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight", "time_mix_w0.weight",
    "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight",
    "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight",
    "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight", "attn_rel_b.weight",
    ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger",
    "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
_ROUTER_PARTS = ("ffn_gate_inp", "exp_probs_b")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_HEAD = "output.weight"
_CLASSES = (
    ("attn_qkv.weight", "attention_qkv"), ("attn_kv_b.weight", "attention_kv_b"), ("attn_v.weight", "attention_v"),
    ("attn_k.weight", "attention_k"), ("attn_q.weight", "attention_q"), ("attn_output.weight", "attention_output"),
    ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"), ("ffn_down", "ffn_down"),
)  # fmt: skip
_VALUE_CLASSES = ("attention_v", "attention_qkv", "attention_kv_b")
_LAYER = re.compile(r"blk\.(\d+)\.")


class ModelSizes(NamedTuple):
    """What the mixtures look at."""

    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    n_expert: int

    @property
    def n_gqa(self) -> int:
        return self.n_head // self.n_head_kv if self.n_head_kv else 0

    @property
    def is_70b(self) -> bool:
        return self.architecture == "llama" and self.n_layer == 80 and self.n_head != self.n_head_kv


class Target(NamedTuple):
    """A tensor and the type it gets. why: router, norm, vector, kept (as it is), recipe, asked, fallback (a row is no
    whole number of the blocks of `wanted`)."""

    tensor: TensorInfo
    type: GgmlType
    why: str
    wanted: GgmlType

    @property
    def own_type(self) -> GgmlType:
        return GGML_TYPES[self.tensor.type_id]

    @property
    def tensor_class(self) -> str:
        return class_of(self.tensor.name)

    @property
    def n_bytes(self) -> int:
        n_columns, *others = self.tensor.shape
        n_rows = 1
        for length in others:
            n_rows *= length
        return n_rows * self.type.row_bytes(n_columns)

    @property
    def is_protected(self) -> bool:
        return is_protected(self.tensor)


def class_of(name: str) -> str:
    """The class of a tensor as a recipe knows it: router, norm, head, embeddings, attention_v, ffn_down, ..., other."""
    if any(part in name for part in _ROUTER_PARTS):
        return "router"
    if "_norm" in name:
        return "norm"
    if name == _HEAD:
        return "head"
    if name in _EMBEDDINGS:
        return "embeddings"
    return next((known for part, known in _CLASSES if part in name), "other")


def is_protected(tensor: TensorInfo) -> bool:
    """Whether it has at least 16 bits in every file: a router, its bias, a norm, a vector."""
    return class_of(tensor.name) in ("router", "norm") or _n_dims(tensor) < 2


def sizes_of(metadata: Mapping[str, Any], path: object) -> ModelSizes:
    """Raises BadModelFile where the header is not that of a model."""
    architecture = metadata.get("general.architecture")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        value = value[0] if isinstance(value, tuple) and value else value
        if not isinstance(value, int):
            raise BadModelFile(f"{path}: no model that can be quantized: its header has no {architecture}.{key}.")
        return value

    n_head = number("attention.head_count", 0)
    return ModelSizes(
        architecture=str(architecture),
        n_layer=number("block_count"),
        n_head=n_head,
        n_head_kv=number("attention.head_count_kv", n_head),
        n_expert=number("expert_count", 0),
    )


def in_file_order(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """As llama.cpp's quantizer goes through them, which some of its rules count by, and writes them."""

    def place(tensor: TensorInfo) -> tuple[int, bytes]:
        found = _LAYER.match(tensor.name)
        return int(found[1]) if found else -1, tensor.name.encode()

    return sorted(tensors, key=place)


def targets(
    tensors: Sequence[TensorInfo],
    sizes: ModelSizes,
    kind: str,
    *,
    embeddings: GgmlType | None = None,
    head: GgmlType | None = None,
    has_imatrix: bool = False,
) -> list[Target]:
    """The type of every tensor, in the file's order. Raises ConfigError for embeddings and head that are one tensor."""
    is_tied = not any(tensor.name == _HEAD for tensor in tensors)
    if is_tied and embeddings and head and embeddings != head:
        raise ConfigError(
            f"--head {head.name.lower()}: this model's head is its embeddings, for which --embeddings "
            f"{embeddings.name.lower()} was given: give one of them."
        )
    mixture = _Mixture(kind, sizes, tensors, is_tied=is_tied, has_imatrix=has_imatrix)
    found = []
    for tensor in in_file_order(tensors):
        own = GGML_TYPES[tensor.type_id]
        asked = embeddings if tensor.name in _EMBEDDINGS else head if tensor.name == _HEAD else None
        if tensor.name == _EMBEDDINGS[0] and is_tied:
            asked = asked or head
        if is_protected(tensor):
            is_full = own.name in FULL_TYPES or own.name.startswith("I")
            why = {"router": "router", "norm": "norm"}.get(class_of(tensor.name), "vector")
            kept = own if is_full or own.name == "F64" else GGML_TYPES[0]
            found.append(Target(tensor, kept, why, kept))
        elif not _is_quantizable(tensor):
            found.append(Target(tensor, own, "kept", own))
        else:
            wanted = asked or mixture.type_of(tensor)
            fitting = _fitting(wanted, tensor)
            why = "fallback" if fitting != wanted else "asked" if asked else "recipe"
            found.append(Target(tensor, fitting, why, wanted))
    return found


def _n_dims(tensor: TensorInfo) -> int:
    return max((index + 1 for index, length in enumerate(tensor.shape) if length > 1), default=1)


def _is_quantizable(tensor: TensorInfo) -> bool:
    name = tensor.name
    is_float = tensor.type_name not in ("I8", "I16", "I32", "I64", "F64")
    is_kept = name in _KEPT_NAMES or any(part in name for part in _KEPT_PARTS)
    return is_float and name.endswith("weight") and not is_kept


def _fitting(wanted: GgmlType, tensor: TensorInfo) -> GgmlType:
    """`wanted`, or what has the blocks for rows of this length."""
    n_columns = tensor.shape[0]
    if n_columns % wanted.block == 0:
        return wanted
    smaller = type_named(_FALLBACKS.get(wanted.name, "F16"))
    return smaller if smaller and n_columns % smaller.block == 0 else GGML_TYPES[1]


def _uses_more_bits(layer: int, n_layers: int) -> bool:
    return layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2


class _Mixture:
    """Counts the tensors it was asked of, as some rules are by how many came before."""

    def __init__(
        self, kind: str, sizes: ModelSizes, tensors: Sequence[TensorInfo], *, is_tied: bool, has_imatrix: bool
    ) -> None:
        self.kind, self.sizes = kind, sizes
        self.base = FILE_KINDS[kind].base_type
        self.is_tied, self.has_imatrix = is_tied, has_imatrix
        self.n_values = sum(class_of(tensor.name) in _VALUE_CLASSES for tensor in tensors)
        self.n_seen_values = self.n_seen_downs = 0

    def type_of(self, tensor: TensorInfo) -> GgmlType:
        name = self.base if self.base in FULL_TYPES else self._name(tensor, class_of(tensor.name))
        found = type_named(name)
        assert found is not None
        return found

    def _name(self, tensor: TensorInfo, tensor_class: str) -> str:
        if tensor_class == "head" or (self.is_tied and tensor_class == "embeddings"):
            base = type_named(self.base)
            assert base is not None
            if self.sizes.architecture == "falcon" or tensor.shape[0] % base.block or self.base == "Q8_0":
                return "Q8_0"
            return "Q6_K"
        if tensor_class in _VALUE_CLASSES:
            self.n_seen_values += 1
            return self._value(self.n_seen_values - 1)
        if tensor_class == "ffn_down":
            self.n_seen_downs += 1
            return self._down(self._layer(tensor, self.n_seen_downs - 1))
        if tensor_class == "attention_k":
            return "Q8_0" if self.sizes.n_expert == 8 else self.base
        return self._attention_output() if tensor_class == "attention_output" else self.base

    def _layer(self, tensor: TensorInfo, count: int) -> int:
        """Experts are counted by their layer, everything else as it comes."""
        found = _LAYER.match(tensor.name)
        return int(found[1]) if self.sizes.n_expert > 1 and found else count

    def _value(self, count: int) -> str:
        kind, sizes = self.kind, self.sizes
        chosen = self.base
        if kind == "q2_k":
            chosen = "Q4_K" if sizes.n_gqa >= 4 else "Q3_K"
        elif kind == "q3_k_m":
            chosen = "Q5_K" if count < 2 else "Q4_K"
        elif kind == "q3_k_l" or (kind in ("iq4_nl", "iq4_xs") and sizes.n_gqa >= 4):
            chosen = "Q5_K"
        elif kind in ("q4_k_m", "q5_k_m") and _uses_more_bits(count, self.n_values):
            chosen = "Q6_K"
        elif kind == "q4_k_s" and count < 4:
            chosen = "Q5_K"
        if sizes.is_70b and chosen in ("Q3_K", "Q4_K"):
            chosen = "Q5_K"
        return "Q8_0" if sizes.n_expert == 8 else chosen

    def _down(self, layer: int) -> str:
        kind, n_layers = self.kind, self.sizes.n_layer
        is_falcon, is_early = self.sizes.architecture == "falcon", layer < n_layers // 8
        more = _uses_more_bits(layer, n_layers)
        if kind == "q2_k":
            return "Q3_K"
        if kind == "q3_k_m":
            return "Q5_K" if layer < n_layers // 16 else "Q4_K" if not is_falcon or more else "Q3_K"
        if kind == "q3_k_l":
            return "Q4_K" if is_falcon else "Q5_K"
        if kind == "q4_k_m" and is_falcon:
            return "Q6_K" if layer < n_layers // 16 else "Q5_K" if more else "Q4_K"
        if kind in ("q4_k_m", "q5_k_m"):
            return "Q6_K" if more else self.base
        if is_early and kind in ("iq4_nl", "iq4_xs") and not self.has_imatrix:
            return "Q5_K"
        if is_early and kind == "q4_k_s" and not is_falcon:
            return "Q5_K"
        if is_early and kind in ("q4_0", "q5_0") and self.has_imatrix:
            return "Q4_1" if kind == "q4_0" else "Q5_1"
        return self.base

    def _attention_output(self) -> str:
        kind = self.kind
        if self.sizes.architecture == "falcon":
            return "Q4_K" if kind == "q3_k_l" else self.base
        if self.sizes.n_expert == 8:
            raised = ("q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq4_xs")
            return "Q5_K" if kind in raised else self.base
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(kind, self.base)
