"""Owns: bytes a model keeps of the tokens it has seen: the KV cache and recurrent state. Sources: docs/memory.md."""

from __future__ import annotations

from laya.errors import ConfigError
from laya.memory.facts import ModelFacts
from laya.memory.families import ROLLS_BACK
from laya.memory.ggml import GgmlType, kv_cache_type
from laya.memory.layers import LayerShape
from laya.memory.load import Load

STATE_BYTES = 4  # recurrent state is f32 whatever the type of the cache


def kv_by_layer(load: Load) -> tuple[int, ...]:
    """Bytes of the cache of each layer, all sequences together."""
    ggml_type = kv_cache_type(load.settings.kv_cache_dtype)
    check_blocks(load.facts, ggml_type)
    return tuple(_layer_bytes(layer, load, ggml_type) for layer in load.facts.shape.layers)


def _layer_bytes(layer: LayerShape, load: Load, ggml_type: GgmlType) -> int:
    row = ggml_type.row_bytes(layer.k) + ggml_type.row_bytes(layer.v)
    tokens = load.cells_of(layer) * (row + ggml_type.row_bytes(layer.index))
    return tokens + layer.n_cross * load.settings.max_num_seqs * row


def state_by_layer(load: Load) -> tuple[int, ...]:
    """Bytes of recurrent state of each layer, all sequences together, with what a draft may have to roll back."""
    kept = load.n_rollback if load.facts.shape.architecture in ROLLS_BACK else 0
    copies = load.settings.max_num_seqs * (1 + kept)
    return tuple(STATE_BYTES * copies * (layer.conv + layer.state) for layer in load.facts.shape.layers)


def sequence_bytes(load: Load) -> int:
    """Bytes that one sequence of the full length keeps in all layers, as the engine copies them out."""
    settings = load.settings
    of_sequences = settings.slot_tokens if settings.kv_unified else load.cells
    tokens = settings.max_seq_len if settings.kv_unified else settings.slot_tokens
    return sum(kv_by_layer(load)) * tokens // of_sequences + sum(state_by_layer(load)) // settings.max_num_seqs


def draft_layers_kv(load: Load, dtype: str) -> int:
    """Bytes of the cache of the layers that predict further tokens: each as wide as the widest of the model's."""
    row_bytes = kv_cache_type(dtype).row_bytes
    widest = max((row_bytes(layer.k) + row_bytes(layer.v) for layer in load.facts.shape.layers), default=0)
    return load.facts.shape.n_layer_nextn * load.cells * widest


def kv_bytes_per_token(facts: ModelFacts, ggml_type: GgmlType) -> int:
    """Bytes one more token takes in all layers that keep every token; windows and state do not grow with it.

    Raises ConfigError where the type's blocks do not fit a head.
    """
    check_blocks(facts, ggml_type)
    rows = [layer for layer in facts.shape.layers if not layer.window]
    return sum(sum(map(ggml_type.row_bytes, (layer.k, layer.v, layer.index))) for layer in rows)


def check_blocks(facts: ModelFacts, ggml_type: GgmlType) -> None:
    """Raise ConfigError, naming both widths, where the type's blocks do not divide a head of the model."""
    for width in head_widths(facts):
        if width % ggml_type.block:
            raise ConfigError(
                f"kv_cache_dtype {ggml_type.name.lower()} stores blocks of {ggml_type.block}, and the heads of this "
                f"model are {width} wide: use f16.",
                param="kv_cache_dtype",
            )


def head_widths(facts: ModelFacts) -> set[int]:
    """The widths of all heads that keep tokens."""
    rows = [(layer.head_k, layer.head_v, layer.index) for layer in facts.shape.layers if layer.n_head_kv]
    return {width for row in rows for width in row if width}
