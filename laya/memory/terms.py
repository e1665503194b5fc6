"""Owns: the table of memory terms: one row each, with its formula in words and the function that computes it.

A term reads one `Load` (a model, decided settings, an engine) and nothing else, so a plan is this table summed. A new
device, architecture or cost is a row or a branch here. Knows no machine and no budget. Sources: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from laya.memory.buffers import compute, grammar, model_overhead, output, overhead
from laya.memory.caches import kv_cache, state
from laya.memory.load import Load

DRAFT_KV_TYPE = "f16"  # llama.cpp keeps a draft model's cache at f16


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
