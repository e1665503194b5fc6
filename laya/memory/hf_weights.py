"""Owns: bytes of a Hugging Face model's weights: summed over its tensor tables, or computed from its config.

Both give the same sums, split by what a tensor-parallel engine shares out among GPUs and what each of them holds
whole. Knows no settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from laya.memory.hf_config import HfConfig
from laya.memory.hf_names import DTYPE_BYTES, QUANTIZED_BITS
from laya.memory.hf_parameters import is_gated, is_tied, parameters_of
from laya.memory.safetensors import DTYPE_BITS, SafeTensor
from laya.memory.shape import ModelShape
from laya.memory.weights import INPUT_LAYER, WeightGroup

_LAYERS, _EXPERTS = ".layers.", ".experts."
# What stands before the number of a layer, the number, and what follows.
NUMBERED = re.compile(r"(.*?\b(?:layers|layer|h|blocks|block)\.)(\d+)\.(.*)")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
               "embed_in.weight", "embeddings.weight", "embedding.weight")  # fmt: skip
OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight")
_ENCODER = re.compile(
    r"(?:model\.|thinker\.)*(?:vision|visual|vit|audio|image|speech|sound|multi_modal|mm_|mlp1|connector|aligner|"
    r"embed_vision|embed_audio|patch)"
)
_NEXTN = re.compile(r"(?:model\.|language_model\.)*mtp")
_GATES = ("gate_proj", "gate_up", "w3.", "linear_v")
_SCALES = ("_scale", "scale_inv", "scales", "zeros", "zero_point")
_PACKED = frozenset({"I32", "U8", "F4"})
# Matrices that every GPU of a tensor-parallel group holds whole: latent attention's compressions and the routers.
_WHOLE = ("_a_proj", "indexer", "router", ".gate.weight", "a_proj_with_mqa")


class HfWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes unless the name says otherwise."""

    total_bytes: int
    layer_bytes: tuple[int, ...]  # of each layer of the language model, with its experts
    expert_bytes: tuple[int, ...]  # of those, the routed experts
    whole_bytes: int  # of `total_bytes`, what each GPU of a tensor-parallel group holds whole
    nextn_bytes: int  # of `total_bytes`, layers for multi-token prediction, which are loaded only when asked for
    embedding_bytes: int
    output_bytes: int  # 0 where the embedding is the output matrix too
    by_dtype: dict[str, int]  # of matrices
    float32_bytes: int
    n_tensors: int
    n_parameters: int  # 0 where a packed format hides it
    is_gated: bool
    is_computed: bool  # True: from the config alone


class _Kind(msgspec.Struct):
    """Tensors of one layer that differ only in the number of their expert."""

    name: str  # without its numbers
    layer: int  # -1 outside of one
    dtype: str
    rank: int
    is_expert: bool
    n_tensors: int
    n_bytes: int


def _kinds(tables: Iterable[dict[str, SafeTensor]]) -> list[_Kind]:
    """The tensors by kind, of which a model has a thousand where it has a hundred thousand tensors."""
    sums: dict[tuple[str, str, str, str, int], list[int]] = {}
    for tensors in tables:
        for name, tensor in tensors.items():
            before, _, after = name.partition(_LAYERS)
            # An expert's number is cut out; this loop is most of the time that a plan of a large model takes.
            place, marker, rest = after.partition(_EXPERTS)
            if marker:
                number, _, tail = rest.partition(".")
                place, rest = place + marker, tail if number.isdigit() else rest
            first, last = tensor.data_offsets
            key = (before, place, rest, tensor.dtype, len(tensor.shape))
            found = sums.get(key)
            if found is None:
                sums[key] = [1, last - first]
            else:
                found[0] += 1
                found[1] += last - first
    return [_kind(*key, *found) for key, found in sums.items()]


def _kind(before: str, place: str, rest: str, dtype: str, rank: int, n_tensors: int, n_bytes: int) -> _Kind:
    """before: what stands before ".layers."; place and rest: what follows, cut at the experts."""
    is_expert = place.endswith(_EXPERTS)
    numbered = NUMBERED.match(f"{before}{_LAYERS}{place}{rest}" if place else before)
    layer = int(numbered[2]) if numbered else -1
    name = numbered[1] + numbered[3] if numbered else before
    return _Kind(name, layer, dtype, rank, is_expert, n_tensors, n_bytes)


def weights_of(tables: Iterable[dict[str, SafeTensor]], shape: ModelShape) -> HfWeights:
    """The sums over the tensor tables of a model's files."""
    kinds = _kinds(tables)
    in_model = [kind for kind in kinds if not _ENCODER.match(kind.name)]
    matrices = [kind for kind in kinds if kind.rank > 1]
    by_dtype: dict[str, int] = {}
    for kind in matrices:
        by_dtype[kind.dtype] = by_dtype.get(kind.dtype, 0) + kind.n_bytes
    dense, experts, nextn = [0] * shape.n_layer, [0] * shape.n_layer, 0
    for kind in in_model:
        if kind.layer >= shape.n_layer or _NEXTN.match(kind.name):
            nextn += kind.n_bytes
        elif kind.layer >= 0:
            (experts if kind.is_expert else dense)[kind.layer] += kind.n_bytes
    is_packed = any(kind.dtype in _PACKED for kind in matrices)
    return HfWeights(
        total_bytes=sum(kind.n_bytes for kind in kinds),
        layer_bytes=tuple(map(sum, zip(dense, experts, strict=True))),
        expert_bytes=tuple(experts),
        whole_bytes=sum(kind.n_bytes for kind in kinds if _is_whole(kind)),
        nextn_bytes=nextn,
        embedding_bytes=sum(kind.n_bytes for kind in in_model if kind.name.endswith(EMBEDDINGS)),
        output_bytes=sum(kind.n_bytes for kind in in_model if kind.name.endswith(OUTPUTS)),
        by_dtype=by_dtype,
        float32_bytes=sum(kind.n_bytes for kind in kinds if kind.dtype == "F32"),
        n_tensors=sum(kind.n_tensors for kind in kinds),
        n_parameters=0 if is_packed else sum(_elements(kind) for kind in kinds),
        is_gated=any(gate in kind.name for kind in matrices for gate in _GATES),
        is_computed=False,
    )


def groups_of(weights: HfWeights) -> tuple[WeightGroup, ...]:
    """The same bytes by where a layer-wise engine may lay them. What is in no layer goes with the output."""
    n_layer, widest = len(weights.layer_bytes), max(weights.embedding_bytes, weights.output_bytes)
    rows = [WeightGroup(INPUT_LAYER, False, weights.embedding_bytes, weights.embedding_bytes)]
    for il, (n_bytes, expert) in enumerate(zip(weights.layer_bytes, weights.expert_bytes, strict=True)):
        rows.append(WeightGroup(il, False, n_bytes - expert, (n_bytes - expert) // 3))
        if expert:
            rows.append(WeightGroup(il, True, expert, expert // 3))  # one tensor each of gates, ups and downs
    rest = max(0, weights.total_bytes - sum(row.n_bytes for row in rows))
    return (*rows, WeightGroup(n_layer, False, rest, min(rest, widest)))


def _is_whole(kind: _Kind) -> bool:
    """Whether each GPU of a tensor-parallel group holds these whole."""
    return kind.rank < 2 or bool(_ENCODER.match(kind.name)) or any(part in kind.name for part in _WHOLE)


def _elements(kind: _Kind) -> int:
    if kind.name.endswith(_SCALES):
        return 0
    return kind.n_bytes * 8 // DTYPE_BITS.get(kind.dtype, 8)


def computed_weights(config: HfConfig, shape: ModelShape) -> HfWeights:
    """The sums as the config alone gives them: parameters by formula times the bytes of its types."""
    counts = parameters_of(config, shape)
    whole, bits = 8 * dtype_bytes(config), quantized_bits(config)
    is_experts_only = quantization(config) == "mxfp4"
    linear = counts.linear * (whole if bits is None or is_experts_only else bits) / 8
    expert = counts.expert * (whole if bits is None else bits) / 8
    layers, rest = round(linear + expert), (counts.encoder + counts.other) * whole // 8
    embedding = counts.embedding * whole // 8
    name = _dtype_name(whole // 8)
    return HfWeights(
        total_bytes=layers + rest + embedding,
        layer_bytes=(-(-layers // max(1, shape.n_layer)),) * shape.n_layer,
        expert_bytes=(round(expert) // max(1, shape.n_layer),) * shape.n_layer,
        whole_bytes=rest,
        nextn_bytes=0,
        embedding_bytes=embedding if is_tied(config) else embedding // 2,
        output_bytes=0 if is_tied(config) else embedding // 2,
        by_dtype={name: layers + embedding},
        float32_bytes=layers + embedding + rest if whole == 32 else 0,
        n_tensors=shape.n_layer * (14 + 3 * shape.n_expert) + 3,
        n_parameters=counts.total,
        is_gated=is_gated(config),
        is_computed=True,
    )


def dtype_bytes(config: HfConfig) -> int:
    """Bytes of a weight that is not quantized; 2 where the config is silent, as half precision is what is published."""
    told = config.get("torch_dtype", "dtype") or config.outer.get("torch_dtype") or config.outer.get("dtype")
    name = str(told).removeprefix("torch.") if told else "bfloat16"
    found = DTYPE_BYTES.get(name)
    if found is None:
        config.fail(f"is corrupt: torch_dtype is {told!r}; known are {', '.join(sorted(DTYPE_BYTES))}")
    return found


def _dtype_name(n_bytes: int) -> str:
    return {4: "F32", 2: "BF16"}.get(n_bytes, "I8")


def _quantization_config(config: HfConfig) -> dict[str, Any]:
    found = config.get("quantization_config", "compression_config") or config.outer.get("quantization_config")
    return found if isinstance(found, dict) else {}


def quantization(config: HfConfig) -> str | None:
    """The method of `quantization_config`, or None."""
    settings = _quantization_config(config)
    if not settings:
        return None
    method = settings.get("quant_method")
    if isinstance(method, str):
        return method.lower()
    return "bitsandbytes" if "load_in_4bit" in settings or "load_in_8bit" in settings else "unknown"


def quantized_bits(config: HfConfig) -> float | None:
    """Bits of a quantized weight with its scales and zero points; None: not quantized, or in a way nobody knows."""
    method, settings = quantization(config), _quantization_config(config)
    if method is None:
        return None
    if method == "bitsandbytes":
        return 4.5 if settings.get("load_in_4bit") or settings.get("_load_in_4bit") else 8.1
    fixed = QUANTIZED_BITS.get(method)
    if fixed is not None:
        return fixed
    if method == "modelopt":
        return 4.51 if "FP4" in str(settings.get("quant_algo", settings.get("quantization"))).upper() else 8.02
    told = _group(settings)
    bits = next((told[key] for key in ("bits", "w_bit", "num_bits", "nbits") if isinstance(told.get(key), int)), 0)
    if not 1 <= bits <= 16:
        return None
    size = next((told[key] for key in ("group_size", "q_group_size") if isinstance(told.get(key), int)), 128)
    return float(bits + (16 + bits) / size if size > 0 else bits + 0.02)


def _group(settings: dict[str, Any]) -> dict[str, Any]:
    """Where the bits stand: compressed-tensors has them by group of layers, others at the top."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        return settings
    first: Any = next(iter(groups.values()), None)
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else settings
