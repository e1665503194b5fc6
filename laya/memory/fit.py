"""Owns: the search from what was asked to what fits, in the fixed order sequences, context, KV type, with its reasons.

What the user set is never changed: when the rest cannot make it fit, the plan says so and suggests. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from laya.memory.advice import suggestions, verdict
from laya.memory.machine import Budget
from laya.memory.planner import Choice, Model, check_asked, decide, kv_types_for, need_bytes, price
from laya.memory.sizes import size_text
from laya.types import AskedSettings, DevicePlan, Plan

DEFAULT_NUM_SEQS = 2  # one person and one program; each further one costs the whole KV cache again
AIM_TOKENS = {"chat": 32768, "embed": 2048, "rerank": 2048}
FLOOR_TOKENS = {"chat": 4096, "embed": 512, "rerank": 512}
AUTO_KV_TYPES = ("f16", "q8_0")  # below q8_0 answers change visibly: that is the user's to choose


def choices(model: Model, asked: AskedSettings) -> Iterator[Choice]:
    """Every choice in the order it is tried; each differs from the one before in one setting."""
    seqs = [asked.max_num_seqs] if asked.max_num_seqs else list(range(DEFAULT_NUM_SEQS, 0, -1))
    lengths = [asked.max_seq_len] if asked.max_seq_len else auto_lengths(model, asked)
    kv_types = [asked.kv_cache_dtype] if asked.kv_cache_dtype else list(kv_types_for(model, AUTO_KV_TYPES))
    first = Choice(max_num_seqs=seqs[0], max_seq_len=lengths[0], kv_cache_dtype=kv_types[0].lower())
    yield first
    for n in seqs[1:]:
        first = msgspec.structs.replace(first, max_num_seqs=n)
        yield first
    for tokens in lengths[1:]:
        first = msgspec.structs.replace(first, max_seq_len=tokens)
        yield first
    for name in kv_types[1:]:
        first = msgspec.structs.replace(first, kv_cache_dtype=name)
        yield first


def auto_lengths(model: Model, asked: AskedSettings) -> list[int]:
    """Powers of two from the aim, or the largest the model was trained for, down to the floor."""
    longest = min(model.shape.n_ctx_train, asked.kv_pool_tokens or model.shape.n_ctx_train)
    floor = FLOOR_TOKENS[asked.task]
    if longest <= floor:
        return [longest]
    lengths = [1 << min(AIM_TOKENS[asked.task].bit_length() - 1, longest.bit_length() - 1)]
    while lengths[-1] // 2 >= floor:
        lengths.append(lengths[-1] // 2)
    return lengths


def fit(model: Model, asked: AskedSettings, budget: Budget) -> Plan:
    """The first choice that fits, or the smallest with `fits` False. Raises ConfigError for impossible settings."""
    check_asked(model, asked)
    tried: list[tuple[Choice, int]] = []
    for choice in choices(model, asked):
        tried.append((choice, need_bytes(model, asked, choice)))
        if tried[-1][1] <= budget.bytes:
            break
    chosen, need = tried[-1]
    fits = need <= budget.bytes
    settings = decide(model, asked, chosen)
    wanted = tried[0][0]
    return Plan(
        model=model.id,
        fits=fits,
        devices=[
            DevicePlan(device=device, budget_bytes=budget.bytes, terms=terms, total_bytes=sum(terms.values()))
            for device, terms in price(model, settings).items()
        ],
        settings=settings,
        reasons=_reasons(model, asked, tried, budget),
        suggestions=[] if fits else suggestions(model, asked, wanted, budget),
        verdict=verdict(model, asked, chosen, budget),
        exact=model.shape.bound is None,
        notes=_notes(model, asked, chosen),
    )


def _reasons(model: Model, asked: AskedSettings, tried: list[tuple[Choice, int]], budget: Budget) -> dict[str, str]:
    chosen = tried[-1][0]
    reasons = {}
    if asked.max_num_seqs is None:
        reasons["max_num_seqs"] = "the default; each sequence costs a KV cache of its own"
    if asked.max_seq_len is None:
        reasons["max_seq_len"] = _length_reason(model, asked, chosen.max_seq_len)
    if asked.kv_cache_dtype is None:
        reasons["kv_cache_dtype"] = "the default; nothing is lost"
    for (before, need), (after, _) in pairwise(tried):
        name = next(name for name in Choice.__struct_fields__ if getattr(before, name) != getattr(after, name))
        reasons[name] = (
            f"instead of {getattr(tried[0][0], name)}: {_choice_text(before)} would need {size_text(need)} of "
            f"{size_text(budget.bytes)}"
        )
    if asked.n_threads is None:
        reasons["n_threads"] = "the cores that are available"
    return reasons


def _length_reason(model: Model, asked: AskedSettings, tokens: int) -> str:
    trained = model.shape.n_ctx_train
    if tokens == trained:
        return "the length it was trained for"
    if tokens == AIM_TOKENS[asked.task]:
        return f"enough for long documents; trained for {trained}"
    if asked.kv_pool_tokens is not None and asked.kv_pool_tokens < trained:
        return f"the largest power of two in a pool of {asked.kv_pool_tokens} tokens"
    return f"the largest power of two below the {trained} tokens it was trained for"


def _choice_text(choice: Choice) -> str:
    return f"{choice.max_num_seqs} x {choice.max_seq_len} tokens at {choice.kv_cache_dtype}"


def _notes(model: Model, asked: AskedSettings, chosen: Choice) -> list[str]:
    shape, notes = model.shape, []
    if shape.bound:
        notes.append(f"upper bound: {shape.bound}")
    if model.projector_bytes:
        notes.append("the projector is counted at 1.4 x its file, an upper bound")
    if chosen.max_seq_len > shape.n_ctx_train:
        longer = chosen.max_seq_len
        notes.append(f"max_seq_len {longer} relies on the file's rope scaling, trained {shape.n_ctx_train}")
    if decide(model, asked, chosen).kv_unified:
        notes.append("sequences share one pool of KV tokens: every request gets a ceiling, so that none overflows it")
    return notes
