"""Owns: the search from what was asked to what fits: sequences, context, KV type, layers on GPUs, with its reasons.

What the user set is never changed: when the rest cannot make it fit, the plan says so and suggests. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, takewhile

import msgspec

from laya.memory.advice import suggestions, verdict
from laya.memory.growth import grown
from laya.memory.limits import Limits, is_within, limits_of, tightest
from laya.memory.machine import Budget
from laya.memory.placement import CPU
from laya.memory.planner import Choice, Model, check_asked, decide, kv_types_for, price, uses_gpus
from laya.memory.prompt_cache import with_prompt_cache
from laya.memory.rates import MachineRates
from laya.memory.sizes import size_text
from laya.types import AskedSettings, DevicePlan, Plan, PlannedSettings

DEFAULT_REASON = "the default; each sequence costs a KV cache of its own"
DEFAULT_NUM_SEQS = 2  # one person and one program; each further one costs the whole KV cache again
AIM_TOKENS = {"chat": 32768, "embed": 2048, "rerank": 2048, "decide": 2048}
FLOOR_TOKENS = {"chat": 4096, "embed": 512, "rerank": 512, "decide": 512}
MOSTLY_ON_GPUS = 0.5  # of the layers: with fewer on GPUs, none of the context is given up for one more
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


class _Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A choice with what it costs."""

    asked: AskedSettings
    choice: Choice
    settings: PlannedSettings
    priced: dict[str, dict[str, int]]


def fit(
    model: Model, asked: AskedSettings, budget: Budget, rates: MachineRates | None = None, *, suggests: bool = True
) -> Plan:
    """The first choice that fits, or the smallest with `fits` False. Raises ConfigError for impossible settings.

    rates: with them, `max_num_seqs: auto` also grows where more sequences gain and memory is spare.
    suggests: False leaves out what to change where nothing fits, which costs many times the answer itself.
    """
    check_asked(model, asked)
    limits = limits_of(model, asked, budget)
    tried: list[_Tried] = []
    for choice in _candidates(model, asked):
        tried.append(_tried(model, asked, choice))
        if is_within(tried[-1].priced, limits):
            break
    chosen, wanted = tried[-1], tried[0].choice
    fits = is_within(chosen.priced, limits)
    reasons = _reasons(model, asked, tried, limits)
    if len(tried) == 1 and fits and _may_grow(model, asked):
        growth = grown(model, asked, chosen.choice, budget, rates)
        chosen = _tried(model, asked, growth.choice)
        has_grown = growth.choice != wanted
        reasons["max_num_seqs"] = growth.reason if has_grown else f"{DEFAULT_REASON}; {growth.reason}"
    if asked.prompt_cache_bytes is None and fits:
        chosen, reasons["prompt_cache_bytes"] = _with_prompt_cache(model, chosen, limits)
    return Plan(
        model=model.id,
        fits=fits,
        devices=[
            DevicePlan(device=device, budget_bytes=limits[device], terms=terms, total_bytes=sum(terms.values()))
            for device, terms in chosen.priced.items()
        ],
        settings=chosen.settings,
        reasons=reasons,
        suggestions=[] if fits or not suggests else suggestions(model, asked, _outside(chosen.choice, wanted), budget),
        verdict=verdict(model, asked, chosen.choice, budget),
        exact=model.shape.bound is None,
        notes=_notes(model, asked, chosen),
    )


def _outside(chosen: Choice, wanted: Choice) -> Choice:
    """What was wanted, with layers in RAM where that was tried."""
    return msgspec.structs.replace(wanted, offloads=chosen.offloads)


def _with_prompt_cache(model: Model, tried: _Tried, limits: Limits) -> tuple[_Tried, str]:
    asked, reason = with_prompt_cache(model, tried.asked, tried.choice, limits)
    return _tried(model, asked, tried.choice), reason


def _tried(model: Model, asked: AskedSettings, choice: Choice) -> _Tried:
    settings = decide(model, asked, choice)
    return _Tried(asked=asked, choice=choice, settings=settings, priced=price(model, settings))


def _may_grow(model: Model, asked: AskedSettings) -> bool:
    """Whether the speed model says anything of more sequences: chat, on the CPU, as many slots as sequences."""
    has_pool = asked.kv_pool_tokens is not None or asked.kv_pool_chat_tokens is not None
    is_open = asked.max_num_seqs is None and not has_pool
    return is_open and asked.task == "chat" and not uses_gpus(model, asked)


def _candidates(model: Model, asked: AskedSettings) -> Iterator[Choice]:
    """Every choice in the order it is tried with all layers on the GPUs, then with what they do not hold in RAM."""
    inside = list(choices(model, asked))
    yield from inside
    if uses_gpus(model, asked) and (asked.gpu_layers is None or asked.experts_on_cpu is None):
        outside = [msgspec.structs.replace(choice, offloads=True) for choice in inside]
        yield from outside if _keeps_context(model, asked, outside[-1]) else outside[-1:]


def _keeps_context(model: Model, asked: AskedSettings, smallest: Choice) -> bool:
    """Whether a shorter context is not worth what it brings to the GPUs.

    A token uses few of the experts that stay in RAM; and where most layers do, the CPU decides the speed.
    """
    has_experts = model.shape.n_expert > 0 and asked.experts_on_cpu is None
    return has_experts or decide(model, asked, smallest).gpu_layers < (model.shape.n_layer + 1) * MOSTLY_ON_GPUS


def _reasons(model: Model, asked: AskedSettings, tried: list[_Tried], limits: Limits) -> dict[str, str]:
    chosen = tried[-1].choice
    reasons = {}
    if asked.max_num_seqs is None:
        reasons["max_num_seqs"] = DEFAULT_REASON
    if asked.max_seq_len is None:
        reasons["max_seq_len"] = _length_reason(model, asked, chosen.max_seq_len)
    if asked.kv_cache_dtype is None:
        reasons["kv_cache_dtype"] = "the default; nothing is lost"
    reasons |= _split_reasons(model, asked, tried, limits)
    inside = list(takewhile(lambda each: not each.choice.offloads, tried))
    outside = tried[len(inside) :]
    for before, after in pairwise(outside if len(outside) > 1 else inside):
        name = next(name for name in Choice.__struct_fields__ if _differs(name, before.choice, after.choice))
        if _differs(name, tried[0].choice, chosen):
            reasons[name] = f"instead of {getattr(tried[0].choice, name)}: {_too_much(before, limits)}"
    if asked.n_threads is None:
        reasons["n_threads"] = "the cores that are available"
    return reasons


def _split_reasons(model: Model, asked: AskedSettings, tried: list[_Tried], limits: Limits) -> dict[str, str]:
    """Why layers and experts lie where they do, for what was not asked."""
    if not any(model.gpu_free_bytes):
        return {}
    if asked.gpu_layers == 0:
        return {}
    settings, every = tried[-1].settings, model.shape.n_layer + 1
    reasons = {}
    last_inside = next((each for each in reversed(tried) if not each.choice.offloads), tried[0])
    if asked.gpu_layers is None and settings.gpu_layers == every:
        reasons["gpu_layers"] = "all, and the output matrix"
    elif asked.gpu_layers is None:
        reasons["gpu_layers"] = f"instead of {every}: {_too_much(last_inside, limits)}"
    if asked.experts_on_cpu is None and settings.experts_on_cpu:
        reasons["experts_on_cpu"] = f"instead of 0: {_too_much(last_inside, limits)}"
    if len(model.gpu_free_bytes) > 1 and not asked.gpus and not asked.tensor_split and settings.gpus:
        n_gpus = len(settings.gpus)
        reasons["tensor_split"] = (
            "as few GPUs as hold it" if n_gpus < len(model.gpu_free_bytes) else f"layers on each of {n_gpus} GPUs"
        ) + (", each filled by the same share" if n_gpus > 1 else "")
    return reasons


def _too_much(tried: _Tried, limits: Limits) -> str:
    """`2 x 32768 tokens at f16 would need 9.1 GiB of 8.0 GiB on gpu0`."""
    device, need, limit = tightest(tried.priced, limits)
    where = "" if device == CPU else f" on {device}"
    return f"{_choice_text(tried.choice)} would need {size_text(need)} of {size_text(limit)}{where}"


def _differs(name: str, one: Choice, other: Choice) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def _length_reason(model: Model, asked: AskedSettings, tokens: int) -> str:
    trained = model.shape.n_ctx_train
    if not model.shape.is_length_known:
        return "the length it was trained for (n_ctx_train) is not given" + (
            "; enough for long documents" if tokens == AIM_TOKENS[asked.task] else ""
        )
    if tokens == trained:
        return "the length it was trained for"
    if tokens == AIM_TOKENS[asked.task]:
        return f"enough for long documents; trained for {trained}"
    if asked.kv_pool_tokens is not None and asked.kv_pool_tokens < trained:
        return f"the largest power of two in a pool of {asked.kv_pool_tokens} tokens"
    return f"the largest power of two below the {trained} tokens it was trained for"


def _choice_text(choice: Choice) -> str:
    return f"{choice.max_num_seqs} x {choice.max_seq_len} tokens at {choice.kv_cache_dtype}"


def _notes(model: Model, asked: AskedSettings, chosen: _Tried) -> list[str]:
    shape, notes = model.shape, []
    if shape.bound:
        notes.append(f"upper bound: {shape.bound}")
    if asked.n_threads is not None and asked.n_threads > model.n_cores:
        cores = f"{model.n_cores} core{'s' if model.n_cores > 1 else ''}"
        notes.append(f"n_threads {asked.n_threads} is more than the {cores} engines have here: llama.cpp gets slower")
    if asked.experts_on_cpu and not shape.n_expert:
        notes.append(f"experts_on_cpu changes nothing: {model.id} has no experts")
    if model.projector_bytes:
        notes.append("the projector is counted at 1.4 x its file, an upper bound")
    if chosen.choice.max_seq_len > shape.n_ctx_train:
        longer = chosen.choice.max_seq_len
        notes.append(f"max_seq_len {longer} relies on the file's rope scaling, trained {shape.n_ctx_train}")
    if model.correction:
        notes.append(model.correction.words())
    if chosen.settings.is_pool_short:
        notes.append("sequences share one pool of KV tokens: every request gets a ceiling, so that none overflows it")
    return notes
