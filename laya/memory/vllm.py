"""Owns: the plan of a Hugging Face model in vLLM's terms, on GPUs or in RAM, and its search for what fits.

vLLM takes a share of each card and fills what is left of it with KV cache; Laya plans the other way round, from the
sequences it promises to the bytes they need, and says what vLLM's own share would hold. Knows no machine beyond the
cards and the RAM it is given. Formulas: vllm_cache.py, vllm_terms.py; where the bytes lie: vllm_place.py; see
docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from laya.errors import ConfigError
from laya.memory.advice import SHORTEST_TOKENS
from laya.memory.correction import NOTHING_LEARNED, Correction
from laya.memory.fit import AIM_TOKENS, FLOOR_TOKENS
from laya.memory.gpu import GpuMemory
from laya.memory.hf import HfFacts
from laya.memory.machine import Budget
from laya.memory.sizes import size_text
from laya.memory.vllm_cache import KvCapacity, VllmSettings
from laya.memory.vllm_place import VllmChoice, VllmModel, cache_of, devices_of, terms_of
from laya.memory.vllm_terms import CONTEXT_BYTES
from laya.types import AskedSettings, Plan, PlannedSettings, Suggestion

MOST_SEQS = 16  # tried first: vLLM computes sequences together, and they share the pool
MOST_SEQS_ON_CPU = 4
AUTO_KV_TYPES = ("auto", "fp8")
MAX_SUGGESTIONS = 4


def plan_vllm(
    found: HfFacts,
    asked: AskedSettings,
    host: Budget,
    cards: Sequence[GpuMemory],
    *,
    model_id: str,
    settings: VllmSettings | None = None,
    n_cores: int = 1,
    correction: Correction = NOTHING_LEARNED,
    gpu_correction: Correction = NOTHING_LEARNED,
) -> Plan:
    """The plan of a model that vLLM runs on the first tensor x pipeline cards; "gpu0" is the first of them. Without
    cards it is the plan of vLLM's CPU build, in RAM.

    correction, gpu_correction: what was learned of such engines, in RAM and on a card. Raises ConfigError for settings
    that no memory could give, or that ask for more cards than there are.
    """
    settings = settings or VllmSettings()
    _check(found, asked, settings, len(cards), model_id)
    n_gpus = settings.tensor_parallel_size * settings.pipeline_parallel_size
    limit_bytes = min(host.bytes, asked.memory_limit_bytes or host.bytes)
    model = VllmModel(
        id=model_id,
        found=found,
        cards=tuple(cards[:n_gpus]),
        settings=settings,
        host=msgspec.structs.replace(host, bytes=limit_bytes),
        n_cores=n_cores,
        correction=correction,
        gpu_correction=gpu_correction,
    )
    tried = []
    for choice in _tries(found, asked, on_cpu=not cards):
        tried.append(choice)
        if _fits(model, choice):
            break
    chosen = tried[-1]
    fits = _fits(model, chosen)
    return Plan(
        model=model_id,
        fits=fits,
        devices=devices_of(model, chosen),
        settings=_planned(model, asked, chosen),
        reasons=_reasons(model, asked, tried),
        suggestions=[] if fits else _suggestions(model, tried[0]),
        verdict=_verdict(model, chosen),
        exact=False,
        notes=_notes(model, chosen),
    )


def _check(found: HfFacts, asked: AskedSettings, settings: VllmSettings, n_cards: int, model_id: str) -> None:
    n_gpus, heads = settings.tensor_parallel_size * settings.pipeline_parallel_size, max(found.shape.n_head, default=0)
    if n_cards and n_gpus > n_cards:
        there = "is" if n_cards == 1 else "are"
        raise ConfigError(
            f"tensor_parallel_size {settings.tensor_parallel_size} x pipeline_parallel_size "
            f"{settings.pipeline_parallel_size} needs {n_gpus} GPUs; there {there} {n_cards}.",
            param="tensor_parallel_size",
        )
    if heads and heads % settings.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size {settings.tensor_parallel_size} does not divide the {heads} attention heads of "
            f"'{model_id}': vLLM refuses that.",
            param="tensor_parallel_size",
        )
    if settings.pipeline_parallel_size > found.shape.n_layer:
        raise ConfigError(
            f"pipeline_parallel_size {settings.pipeline_parallel_size} is above the {found.shape.n_layer} layers of "
            f"'{model_id}'.",
            param="pipeline_parallel_size",
        )
    trained = found.shape.n_ctx_train
    if asked.max_seq_len is not None and asked.max_seq_len > trained and not found.shape.has_rope_scaling:
        raise ConfigError(
            f"max_seq_len {asked.max_seq_len} is above the {trained} tokens that '{model_id}' was trained for, and its "
            f"config has no rope scaling: vLLM refuses that. Ask for {trained} or less.",
            param="max_seq_len",
        )


def _tries(found: HfFacts, asked: AskedSettings, *, on_cpu: bool) -> Iterator[VllmChoice]:
    """Every choice in the order it is tried: fewer sequences, shorter ones, then a smaller KV type."""
    most = MOST_SEQS_ON_CPU if on_cpu else MOST_SEQS
    counts = [asked.max_num_seqs] if asked.max_num_seqs else [most >> step for step in range(most.bit_length())]
    lengths = [asked.max_seq_len] if asked.max_seq_len else _lengths(found, asked)
    kinds = [asked.kv_cache_dtype] if asked.kv_cache_dtype else list(AUTO_KV_TYPES[: 1 if on_cpu else None])
    for count in counts:
        yield VllmChoice(max_num_seqs=count, max_seq_len=lengths[0], kv_cache_dtype=kinds[0])
    for length in lengths[1:]:
        yield VllmChoice(max_num_seqs=counts[-1], max_seq_len=length, kv_cache_dtype=kinds[0])
    for kind in kinds[1:]:
        yield VllmChoice(max_num_seqs=counts[-1], max_seq_len=lengths[-1], kv_cache_dtype=kind)


def _lengths(found: HfFacts, asked: AskedSettings) -> list[int]:
    trained, aim, floor = found.shape.n_ctx_train, AIM_TOKENS[asked.task], FLOOR_TOKENS[asked.task]
    longest = min(trained, aim)
    return [longest, *(1 << bits for bits in range(longest.bit_length() - 1, 0, -1) if floor <= 1 << bits < longest)]


def _fits(model: VllmModel, choice: VllmChoice) -> bool:
    return all(device.total_bytes <= device.budget_bytes for device in devices_of(model, choice))


def _planned(model: VllmModel, asked: AskedSettings, choice: VllmChoice) -> PlannedSettings:
    settings = model.settings
    slot = -(-choice.max_seq_len // settings.block_size) * settings.block_size
    return PlannedSettings(
        max_seq_len=choice.max_seq_len,
        slot_tokens=slot,
        max_num_seqs=choice.max_num_seqs,
        kv_cache_dtype=choice.kv_cache_dtype,
        kv_unified=False,
        kv_pool_tokens=choice.max_seq_len * choice.max_num_seqs,
        n_batch=settings.max_num_batched_tokens,
        n_ubatch=settings.max_num_batched_tokens,
        n_threads=asked.n_threads or model.n_cores,
        task=asked.task,
        mmap=asked.mmap,
        gpu_layers=model.found.shape.n_layer + 1 if model.cards else 0,
    )


def capacity_at_utilization(model: VllmModel, choice: VllmChoice) -> tuple[int, KvCapacity]:
    """What vLLM would take for its KV cache by its own share of the tightest card, and what that holds.

    The CUDA context is outside of vLLM's share, so it is left out here.
    """
    rooms, share = [], model.settings.tensor_parallel_size
    for number, terms in enumerate(terms_of(model, choice)):
        others = sum(n_bytes for name, n_bytes in terms.items() if name != "kv_cache") - CONTEXT_BYTES
        rooms.append(round(model.settings.gpu_memory_utilization * model.cards[number].total_bytes) - others)
    per_stage = [max(0, min(rooms[start : start + share])) for start in range(0, len(rooms), share)]
    return min(per_stage), cache_of(model, choice).capacity(per_stage, choice.max_seq_len)


def _notes(model: VllmModel, choice: VllmChoice) -> list[str]:
    settings, found = model.settings, model.found
    notes = ["compute, graphs and overhead are bounds from logged runs", *found.notes]
    notes += [each.words() for each in (model.correction, model.gpu_correction) if each]
    if model.cards and cache_of(model, choice).groups:
        room, held = capacity_at_utilization(model, choice)
        notes.insert(
            0,
            f"at gpu_memory_utilization {settings.gpu_memory_utilization} vLLM would keep {size_text(room)} a GPU for "
            f"its KV cache: {held.tokens} tokens, {held.max_concurrency:.2f} sequences of {choice.max_seq_len}",
        )
    if found.shape.bound and "not known" in found.shape.bound:
        notes.append(f"upper bound: {found.shape.bound}")
    if not settings.n_speculative_tokens and found.weights.nextn_bytes:
        notes.append("the layers for multi-token prediction are not loaded")
    return notes


def _reasons(model: VllmModel, asked: AskedSettings, tried: list[VllmChoice]) -> dict[str, str]:
    first, chosen = tried[0], tried[-1]
    trained = model.found.shape.n_ctx_train
    whole = "the length it was trained for" if chosen.max_seq_len == trained else f"trained for {trained}"
    kept = {
        "max_num_seqs": "the default for vLLM: sequences are computed together",
        "max_seq_len": whole,
        "kv_cache_dtype": "the default; nothing is lost",
    }
    reasons = {}
    for name, words in kept.items():
        if getattr(asked, name) is not None:
            continue
        if getattr(first, name) != getattr(chosen, name):
            devices = devices_of(model, first)
            tightest = min(devices, key=lambda device: device.budget_bytes - device.total_bytes)
            where = "in RAM" if tightest.device == "cpu" else "on a GPU"
            need, room = size_text(tightest.total_bytes), size_text(tightest.budget_bytes)
            words = f"instead of {getattr(first, name)}: that would need {need} of {room} {where}"
        reasons[name] = words
    return reasons


def _suggestions(model: VllmModel, wanted: VllmChoice) -> list[Suggestion]:
    """Up to four changes of what was wanted that fit."""
    found = []
    small = wanted.kv_cache_dtype if wanted.kv_cache_dtype.startswith("fp8") else "fp8"
    for n_seqs in sorted({wanted.max_num_seqs, 1}, reverse=True):
        for kind in dict.fromkeys((wanted.kv_cache_dtype, small) if model.cards else (wanted.kv_cache_dtype,)):
            choice = _longest_fitting(
                model, VllmChoice(max_num_seqs=n_seqs, max_seq_len=wanted.max_seq_len, kv_cache_dtype=kind)
            )
            if choice is not None:
                found.append(_suggestion(model, wanted, choice))
    return found[:MAX_SUGGESTIONS]


def _longest_fitting(model: VllmModel, choice: VllmChoice) -> VllmChoice | None:
    """The choice itself, or with the largest power of two of tokens that fits; None where not even a few do."""
    while choice.max_seq_len >= SHORTEST_TOKENS:
        if _fits(model, choice):
            return choice
        choice = msgspec.structs.replace(choice, max_seq_len=1 << (choice.max_seq_len - 1).bit_length() - 1)
    return None


def _suggestion(model: VllmModel, wanted: VllmChoice, choice: VllmChoice) -> Suggestion:
    changed = [name for name in VllmChoice.__struct_fields__ if getattr(choice, name) != getattr(wanted, name)]
    flags = " ".join(f"--{name.replace('_', '-')} {getattr(choice, name)}" for name in changed)
    total = sum(sum(terms.values()) for terms in terms_of(model, choice))
    many = "sequence" if choice.max_num_seqs == 1 else "sequences"
    return Suggestion(
        flags=flags, total_bytes=total, note=f"{choice.max_num_seqs} {many} of {choice.max_seq_len} tokens"
    )


def _verdict(model: VllmModel, choice: VllmChoice) -> str:
    """The hardware rule in one line: two sequences must stay below 80 % of the smallest card, or of the RAM."""
    two = msgspec.structs.replace(choice, max_num_seqs=2)
    if model.cards:
        need = max(sum(terms.values()) for terms in terms_of(model, two))
        whole, where, more = min(card.total_bytes for card in model.cards), "on a GPU", "more or larger cards"
    else:
        need = devices_of(model, two)[0].total_bytes
        whole, where, more = max(model.host.total_bytes, model.host.bytes), "in RAM", "more RAM"
    share = f"{100 * need / max(1, whole):.0f} % of {size_text(whole)}"
    text = f"2 sequences of {choice.max_seq_len} tokens need {size_text(need)} {where}, {share}"
    if need <= 0.8 * whole:
        return f"{text}: {'these cards are' if model.cards else 'it is'} enough (rule: below 80 %)"
    return f"{text}: more than 80 %; {more}, a smaller model or a shorter context"
