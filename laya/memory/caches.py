"""Owns: bytes a model keeps of the tokens it has seen: the KV cache and recurrent state. Sources: docs/memory.md."""

from __future__ import annotations

from laya.errors import ConfigError
from laya.memory.facts import ModelFacts
from laya.memory.ggml import GgmlType, kv_cache_type
from laya.memory.load import Load


def kv_cache(load: Load) -> int:
    ggml_type = kv_cache_type(load.settings.kv_cache_dtype)
    return load.cells * kv_bytes_per_token(load.facts, ggml_type)


def kv_bytes_per_token(facts: ModelFacts, ggml_type: GgmlType) -> int:
    """Bytes of one token in the caches of all layers. Raises ConfigError where the type's blocks do not fit a head."""
    shape = facts.shape
    for width in (shape.head_dim_k, shape.head_dim_v):
        if shape.kv_elements and width % ggml_type.block:
            raise ConfigError(
                f"kv_cache_dtype {ggml_type.name.lower()} stores blocks of {ggml_type.block}, and the heads of this "
                f"model are {width} wide: use f16.",
                param="kv_cache_dtype",
            )
    return sum(ggml_type.row_bytes(k) + ggml_type.row_bytes(v) for k, v in shape.kv_elements)


def state(load: Load) -> int:
    shape, widths = load.facts.shape, load.facts.shape.recurrent
    conv = max(widths.conv_kernel - 1, 0) * (widths.inner + 2 * widths.groups * widths.state)
    per_layer = conv + widths.state * widths.inner
    per_layer += widths.token_shift * shape.n_embd + shape.n_embd * widths.head_size
    per_layer += max(widths.l_cache - 1, 0) * shape.n_embd
    n_head = max(shape.n_head, default=0)
    per_layer += widths.kda_head_dim * n_head * (3 * max(widths.conv_kernel - 1, 0) + widths.kda_head_dim)
    return 4 * shape.n_layer * load.settings.max_num_seqs * per_layer
