"""Owns: bytes an engine takes to compute with: graphs, outputs, tables, its own overhead. Sources: docs/memory.md."""

from __future__ import annotations

from laya.memory.load import Load
from laya.types import KIB

BOUND_FACTOR = 2  # on the activations of a graph that was not measured


def compute(load: Load) -> int:
    shape, settings = load.facts.shape, load.settings
    n_head_kv = max(shape.n_head_kv, default=0)
    k, v = n_head_kv * shape.head_dim_k, n_head_kv * shape.head_dim_v
    q = max(shape.n_head, default=0) * max(shape.head_dim_k, shape.head_dim_v)
    widths = shape.recurrent
    used, expert = shape.n_expert_used, shape.n_ff_expert
    experts = max(3 * used * expert, used * (shape.n_embd + expert), 3 * shape.n_ff_shared)
    dense = {3: 3 * shape.n_ff, 2: shape.n_embd + shape.n_ff}.get(load.facts.n_ff_matrices, 0)
    feed_forward = 5 * shape.n_embd + max(dense, experts)
    attention = 2 * q + k + v + 5 * shape.n_embd
    recurrent = 4 * (widths.inner + 2 * widths.groups * widths.state)
    layer = max(feed_forward, attention + recurrent) * (BOUND_FACTOR if shape.bound else 1)
    activations = 4 * settings.n_ubatch * layer
    logits = 4 * load.output_rows * shape.n_vocab + 4 * settings.n_ubatch * 5 * shape.n_embd
    mask = 2 * settings.n_ubatch * settings.slot_tokens * (BOUND_FACTOR if shape.bound else 1)
    # Attention computes in f16: an f32 cache is copied, one layer at a time.
    copies = 2 * load.cells * (k + v) if settings.kv_cache_dtype == "f32" else 0
    return max(activations, logits) + mask + copies + 64 * KIB


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
