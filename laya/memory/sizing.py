"""Owns: what a file's size and a model's shape tell of weights whose tensor table is not there. Knows no file."""

from __future__ import annotations

from laya.memory.ggml import type_named
from laya.memory.shape import ModelShape
from laya.memory.weights import INPUT_LAYER, WeightGroup

# A quantized file holds its most sensitive matrices in a larger type. They are taken to be Q6_K; what larger ones
# and a vocabulary can move is in the margin.
LARGER_TYPE = "Q6_K"
MARGIN = 1.03


def n_parameters(shape: ModelShape) -> int:
    """Weights of a model of this shape: gated feed-forward, all experts, an output matrix beside the embedding."""
    embedding = shape.n_vocab * (shape.n_embd + shape.n_embd_per_layer * shape.n_layer)
    return embedding + shape.n_vocab * shape.n_embd + sum(_layer_parameters(shape))


def _layer_parameters(shape: ModelShape) -> list[int]:
    q = shape.head_dim_k * max(shape.n_head, default=0)
    widths = shape.recurrent
    n_expert = shape.n_expert or shape.n_expert_used
    routed = 3 * (n_expert * shape.n_ff_expert + shape.n_ff_shared) + n_expert
    feed_forward = shape.n_embd * (routed if n_expert else 3 * shape.n_ff)
    attention = [shape.n_embd * (2 * q + layer.k + layer.v) if layer.k else 0 for layer in shape.layers]
    mixer = shape.n_embd * (3 * widths.inner + 2 * widths.groups * widths.state)
    state = [mixer if layer.state else 0 for layer in shape.layers]
    return [feed_forward + a + s for a, s in zip(attention, state, strict=True)]


def matrix_bytes_of_size(shape: ModelShape, file_bytes: int, weights_type: str) -> int:
    """Bytes of the file that are matrices of `weights_type`, from above: all but what must be in a larger type."""
    own, larger = type_named(weights_type), type_named(LARGER_TYPE)
    if own is None or larger is None:
        return file_bytes
    own_bytes, larger_bytes = own.block_bytes / own.block, larger.block_bytes / larger.block
    if own_bytes >= larger_bytes:
        return file_bytes
    count = n_parameters(shape)
    in_own = (count * larger_bytes - file_bytes) / (larger_bytes - own_bytes)
    return min(file_bytes, round(MARGIN * own_bytes * min(max(in_own, 0), count)))


def even_groups(shape: ModelShape, file_bytes: int) -> tuple[WeightGroup, ...]:
    """The file's bytes by layer, as if every weight had the same type."""
    layers, embedding = _layer_parameters(shape), shape.n_vocab * shape.n_embd
    each = file_bytes / max(1, n_parameters(shape))
    experts = shape.n_expert * shape.n_ff_expert * shape.n_embd
    rows = [WeightGroup(INPUT_LAYER, False, round(each * embedding), round(each * embedding))]
    for il, parameters in enumerate(layers):
        dense = parameters - 3 * experts
        rows.append(
            WeightGroup(il, False, round(each * dense), round(each * shape.n_embd * max(shape.n_ff, shape.n_embd)))
        )
        if experts:
            rows.append(WeightGroup(il, True, round(3 * each * experts), round(each * experts)))
    rest = file_bytes - sum(row.n_bytes for row in rows)
    return (*rows, WeightGroup(shape.n_layer, False, max(rest, 0), max(rest, 0)))
