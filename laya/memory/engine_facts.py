"""Owns: what an engine build takes beside the model's own bytes, as measured; the only place with such constants.

Each figure is a slope of VmHWM over one variable at a time (`laya bench memory` measures the sums again; the table is
in docs/memory.md). They are rounded up: a plan may be a little over, never under. Knows no model and no machine.
"""

from __future__ import annotations

import platform

import msgspec

from laya.types import KIB, MIB


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Run-time costs of one engine build, in bytes."""

    name: str
    repack_types: frozenset[str]  # weight types it copies into another layout at load, beside the mapped file
    process_bytes: int  # the child with its libraries, before a model
    token_bytes: int  # per vocabulary entry
    merge_bytes: int  # per BPE merge
    tensor_bytes: int  # per tensor: graph nodes and their allocator
    cell_bytes: int  # per token of context: cell metadata, the prompt as text, as ids and as JSON
    sequence_bytes: int  # per sequence: slot, sampler, connection
    candidate_bytes: int  # per vocabulary entry and sequence: the sampler's candidates
    grammar_bytes: int  # per byte of vocabulary text: tables for constrained answers, once for the process
    thread_bytes: int  # per compute thread
    n_batch: int  # tokens computed at once in chat: what a cancelled prefill still finishes
    n_batch_gpu: int  # n_batch where layers lie on a GPU
    n_batch_shared: int  # the same where sequences share a pool: each step gives every other one a token
    projector_factor: float  # a projector's file and its compute buffer, over the file
    makes_room_first: bool  # in its prompt cache, so that the limit holds; else it looks after a sequence was saved


_AVX2 = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
# What some build of llama.cpp repacks on some CPU (AVX-512, AMX, Arm i8mm): the bound for a build not measured.
_ANY_CPU = _AVX2 | {"Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS"}

# xllamacpp 2026.10.11549 on Linux x86-64: one AVX2 build for every CPU, so what it repacks is the same everywhere.
XLLAMACPP = EngineFacts(
    name="xllamacpp",
    repack_types=_AVX2,
    process_bytes=36 * MIB,
    token_bytes=224,
    merge_bytes=248,
    tensor_bytes=14 * KIB,
    cell_bytes=208,
    sequence_bytes=160 * KIB,
    candidate_bytes=12,
    grammar_bytes=104,
    thread_bytes=160 * KIB,
    n_batch=128,
    n_batch_gpu=512,  # llama.cpp's own: a card that reads 1000 tokens/s is done with it in half a second
    n_batch_shared=64,  # chats get 1.6 times the tokens beside a prompt that is read 10 % slower (docs/memory.md)
    projector_factor=1.4,
    makes_room_first=True,
)
# A llama-server of the user's own, or another CPU family: every repack that exists anywhere is counted, and builds
# before 2026 keep to the prompt cache's limit only after they passed it.
LLAMA_SERVER = msgspec.structs.replace(XLLAMACPP, name="llama-server", repack_types=_ANY_CPU, makes_room_first=False)


def built_in_engine() -> EngineFacts:
    """The facts of the engine that ships with Laya, on this CPU family."""
    return XLLAMACPP if platform.machine().lower() in ("x86_64", "amd64") else LLAMA_SERVER
