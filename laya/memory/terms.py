"""Owns: the table of memory terms: one row each, with its formula in words and the function that computes it.

A term reads one `Load` (a model, decided settings, an engine) and nothing else, so a plan is this table summed. A new
device, architecture or cost is a row or a branch here. Knows no machine and no budget. Sources: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from laya.errors import ConfigError
from laya.memory.engine_facts import EngineFacts
from laya.memory.facts import ModelFacts
from laya.memory.ggml import GgmlType, kv_cache_type
from laya.types import KIB, PlannedSettings

BOUND_FACTOR = 2  # on the activations of a graph that was not measured
DRAFT_KV_TYPE = "f16"  # llama.cpp keeps a draft model's cache at f16


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One model as it would be loaded."""

    facts: ModelFacts
    settings: PlannedSettings
    engine: EngineFacts
    draft: ModelFacts | None = None
    projector_bytes: int = 0  # of the projector's file

    @property
    def n_streams(self) -> int:
        """Separate caches: one a sequence, or one for all when they share a pool."""
        return 1 if self.settings.kv_unified else self.settings.max_num_seqs

    @property
    def cells(self) -> int:
        """Tokens of cache the engine allocates in all."""
        return self.settings.slot_tokens * self.n_streams

    @property
    def output_rows(self) -> int:
        """Rows of logits computed at once: one a sequence, or the whole batch where embeddings are asked for."""
        if not self.facts.shape.is_causal:
            return 0
        return self.settings.max_num_seqs if self.settings.task == "chat" else self.settings.n_batch


class Term(NamedTuple):
    """A row of the table."""

    name: str
    device: str
    formula: str
    bytes_of: Callable[[Load], int]


def weights(load: Load) -> int:
    return load.facts.weights_bytes


def repack(load: Load) -> int:
    facts, types = load.facts, load.engine.repack_types
    if load.settings.mmap:
        return sum(n_bytes for name, n_bytes in facts.matrix_bytes.items() if name in types or name.startswith("type "))
    # Read into memory, a repacked matrix exists once; only an embedding that is the output too exists twice.
    return facts.tied_output[1] if facts.tied_output and facts.tied_output[0] in types else 0


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


def draft(load: Load) -> int:
    if load.draft is None:
        return 0
    settings = msgspec.structs.replace(load.settings, kv_cache_dtype=DRAFT_KV_TYPE, task="chat")
    own = msgspec.structs.replace(load, facts=load.draft, settings=settings, draft=None, projector_bytes=0)
    vocabulary = own.engine.token_bytes * own.facts.n_tokens + own.engine.merge_bytes * own.facts.n_merges
    buffers = sum(term(own) for term in (weights, repack, kv_cache, state, compute, output))
    return buffers + model_overhead(own) + vocabulary


def projector(load: Load) -> int:
    return round(load.engine.projector_factor * load.projector_bytes)


TERMS = (
    Term("weights", "cpu", "bytes of the tensors in the file; mapped pages are resident once used", weights),
    Term("repack", "cpu", "a second copy of the matrices whose type the engine lays out anew", repack),
    Term("kv_cache", "cpu", "padded tokens x sum over layers of K row + V row", kv_cache),
    Term("state", "cpu", "recurrent state, f32, layers x sequences x widths", state),
    Term("compute", "cpu", "4 x n_ubatch x widest point of the graph + 2 x n_ubatch x context (mask)", compute),
    Term("output", "cpu", "logits of the rows computed at once, and the sampler's candidates", output),
    Term("grammar", "cpu", "tables for answers held to a JSON schema or grammar, made at the first one", grammar),
    Term("overhead", "cpu", "process, vocabulary, graph, cells, sequences, threads", overhead),
    Term("draft", "cpu", "the draft model: all of the above but the process", draft),
    Term("projector", "cpu", "1.4 x the projector's file", projector),
)


def terms_by_device(load: Load) -> dict[str, dict[str, int]]:
    """Device -> term -> bytes; terms that are nothing are left out."""
    devices: dict[str, dict[str, int]] = {}
    for term in TERMS:
        n_bytes = term.bytes_of(load)
        if n_bytes:
            devices.setdefault(term.device, {})[term.name] = n_bytes
    return devices
