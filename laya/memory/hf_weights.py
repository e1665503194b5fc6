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
from laya.memory.safetensors import SafeTensor
from laya.memory.shape import ModelShape

_LAYER = re.compile(r"\.(?:layers|layer|h|blocks|block)\.(\d+)\.")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
               "embed_in.weight", "embeddings.weight", "embedding.weight")  # fmt: skip
_OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight")
_ENCODER = re.compile(
    r"(?:model\.|thinker\.)*(?:vision|visual|vit|audio|image|speech|sound|multi_modal|mm_|mlp1|connector|aligner|"
    r"embed_vision|embed_audio|patch)"
)
_NEXTN = re.compile(r"(?:model\.|language_model\.)*mtp")
_GATES = ("gate_proj", "gate_up", "w3.", "linear_v")
# Matrices that every GPU of a tensor-parallel group holds whole: latent attention's compressions and the routers.
_WHOLE = ("_a_proj", "indexer", "router", ".gate.weight", "a_proj_with_mqa")


class HfWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes unless the name says otherwise."""

    total_bytes: int
    layer_bytes: tuple[int, ...]  # of each layer of the language model
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


class _Sums:
    """What is added up while tensors pass by."""

    def __init__(self, n_layer: int) -> None:
        self.layers = [0] * n_layer
        self.by_dtype: dict[str, int] = {}
        self.total = self.whole = self.nextn = self.embedding = self.output = self.float32 = 0
        self.n_tensors = self.n_elements = 0
        self.is_gated = self.is_packed = False

    def add(self, tensor: SafeTensor) -> None:
        name, n_bytes = tensor.name, tensor.n_bytes
        self.n_tensors += 1
        self.total += n_bytes
        is_matrix = len(tensor.shape) > 1
        if is_matrix:
            self.by_dtype[tensor.dtype] = self.by_dtype.get(tensor.dtype, 0) + n_bytes
        if tensor.dtype == "F32":
            self.float32 += n_bytes
        self._count(tensor)
        if _ENCODER.match(name):
            self.whole += n_bytes
            return
        if not is_matrix or any(part in name for part in _WHOLE):
            self.whole += n_bytes
        found = _LAYER.search(name)
        layer = int(found[1]) if found else -1
        if layer >= len(self.layers) or _NEXTN.match(name):
            self.nextn += n_bytes
        elif layer >= 0:
            self.layers[layer] += n_bytes
            self.is_gated = self.is_gated or (is_matrix and any(gate in name for gate in _GATES))
        elif name.endswith(_EMBEDDINGS):
            self.embedding += n_bytes
        elif name.endswith(_OUTPUTS):
            self.output += n_bytes

    def _count(self, tensor: SafeTensor) -> None:
        self.is_packed = self.is_packed or tensor.dtype in ("I32", "U8", "F4")
        if not tensor.name.endswith(("_scale", "scale_inv", "scales", "zeros")):
            elements = 1
            for size in tensor.shape:
                elements *= size
            self.n_elements += elements


def weights_of(tensors: Iterable[SafeTensor], shape: ModelShape) -> HfWeights:
    """The sums over the tensor tables of a model's files."""
    sums = _Sums(shape.n_layer)
    for tensor in tensors:
        sums.add(tensor)
    return HfWeights(
        total_bytes=sums.total,
        layer_bytes=tuple(sums.layers),
        whole_bytes=sums.whole,
        nextn_bytes=sums.nextn,
        embedding_bytes=sums.embedding,
        output_bytes=sums.output,
        by_dtype=sums.by_dtype,
        float32_bytes=sums.float32,
        n_tensors=sums.n_tensors,
        n_parameters=0 if sums.is_packed else sums.n_elements,
        is_gated=sums.is_gated,
        is_computed=False,
    )


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
