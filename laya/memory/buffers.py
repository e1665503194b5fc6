"""Owns: bytes an engine takes to compute with: graphs, outputs, tables, its own overhead. Sources: docs/memory.md."""

from __future__ import annotations

from laya.memory.ggml import kv_cache_type
from laya.memory.load import Load
from laya.memory.widths import TWO_MASKS, beside_attention, beside_feed_forward, beyond_dense
from laya.types import KIB

ROTATED_V = 64  # elements of a value that are rotated together
BOUND_FACTOR = 2  # on a graph that was not measured


def compute(load: Load) -> int:
    """The graph of one batch on the CPU: its widest point, or its logits, and what attention needs beside it."""
    shape, n_ubatch = load.facts.shape, load.settings.n_ubatch
    feed_forward = 4 * n_ubatch * _feed_forward_width(load)
    attention = 4 * n_ubatch * _attention_width(load)
    layer = max(feed_forward, attention, 4 * n_ubatch * beyond_dense(load))
    logits = 4 * load.output_rows * shape.n_vocab + 4 * n_ubatch * 5 * shape.n_embd
    graph = max(layer, logits) + _masks(load) + _rotations(load)
    return graph * (BOUND_FACTOR if shape.bound else 1) + _copy(load) + 64 * KIB


def _feed_forward_width(load: Load) -> int:
    """Elements of one token at the widest point of a feed-forward layer."""
    shape = load.facts.shape
    used, expert = shape.n_expert_used, shape.n_ff_expert
    # What experts give is laid where their gates were, if it fits there.
    given = shape.n_embd if shape.n_embd > 2 * expert else 0
    experts = max(used * (3 * expert + given), 3 * shape.n_ff_shared)
    dense = {3: 3 * shape.n_ff, 2: shape.n_embd + shape.n_ff}.get(load.facts.n_ff_matrices, 0)
    return beside_feed_forward(shape, _is_rotated(load)) + max(dense, experts)


def _attention_width(load: Load) -> int:
    """Elements of one token at the widest point of attention."""
    shape = load.facts.shape
    q = max(shape.n_head, default=0) * max(shape.head_dim_k, shape.head_dim_v)
    # An encoder computes keys and values too, though it keeps none.
    dense = max(shape.n_head_kv, default=0) * (shape.head_dim_k + shape.head_dim_v)
    kept = max((layer.k + layer.v for layer in shape.layers), default=0)
    return (3 if _is_rotated(load) else 2) * q + max(dense, kept) + beside_attention(shape)


def _is_rotated(load: Load) -> bool:
    """Whether keys, values and queries are rotated, as they are for a quantized cache that is not compressed."""
    has_rows = load.facts.shape.is_causal and not load.facts.shape.head_dim_v_mla
    return has_rows and kv_cache_type(load.settings.kv_cache_dtype).block > 1


def _masks(load: Load) -> int:
    """f16, a batch by the tokens of one stream: one for layers that see all, one for those that look back a window."""
    shape, n_ubatch = load.facts.shape, load.settings.n_ubatch
    if not shape.is_causal:
        # An encoder has no cache to look at, only the batch.
        return 2 * n_ubatch * n_ubatch * (2 if shape.architecture in TWO_MASKS else 1)
    sees_all = any(layer.k and not layer.window for layer in shape.layers)
    all_tokens = load.settings.slot_tokens if sees_all else 0
    return 2 * n_ubatch * (all_tokens + load.window_cells // load.n_streams)


def _rotations(load: Load) -> int:
    """f32 matrices that rotate keys (as wide as a power of two divides a head) and values, for each of the caches."""
    if not _is_rotated(load):
        return 0
    layers, head = load.facts.shape.layers, load.facts.shape.head_dim_k
    n_caches = len({bool(layer.window) for layer in layers if layer.k})
    return n_caches * 4 * ((head & -head) ** 2 + ROTATED_V**2)


def _copy(load: Load) -> int:
    """Attention computes in f16: an f32 cache is copied, one layer at a time."""
    if load.settings.kv_cache_dtype != "f32":
        return 0
    return 2 * max((load.cells_of(layer) * (layer.k + layer.v) for layer in load.facts.shape.layers), default=0)


def output(load: Load) -> int:
    shape, settings, engine = load.facts.shape, load.settings, load.engine
    if settings.task != "chat":
        # Rows of logits are kept even by an encoder, which computes none.
        return 4 * settings.n_batch * (shape.n_embd + shape.n_vocab)
    rows = 4 * settings.max_num_seqs * (shape.n_vocab + shape.n_embd)
    return rows + engine.candidate_bytes * settings.max_num_seqs * shape.n_vocab


def grammar(load: Load) -> int:
    return load.engine.grammar_bytes * load.facts.vocabulary_bytes if load.settings.task == "chat" else 0


def overhead(load: Load) -> int:
    facts, settings, engine = load.facts, load.settings, load.engine
    vocabulary = engine.token_bytes * facts.n_tokens + engine.merge_bytes * facts.n_merges
    workers = engine.sequence_bytes * settings.max_num_seqs + engine.thread_bytes * settings.n_threads
    return engine.process_bytes + vocabulary + workers + model_overhead(load)


def model_overhead(load: Load) -> int:
    """What each model in the process takes beside its buffers."""
    return load.engine.tensor_bytes * load.facts.n_tensors + load.engine.cell_bytes * load.cells
