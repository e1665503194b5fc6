"""Owns: where the bytes of a model in vLLM's terms lie: on each card it runs on and in the host's RAM, or all in RAM.

Knows one choice of settings at a time; which one is made is vllm.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laya.errors import ConfigError
from laya.memory.correction import NOTHING_LEARNED, TERM, Correction
from laya.memory.gpu import GpuMemory
from laya.memory.hf import HfFacts
from laya.memory.machine import Budget
from laya.memory.placement import CPU
from laya.memory.vllm_cache import KvCache, VllmSettings, kv_cache
from laya.memory.vllm_terms import cpu_terms, gpu_terms, host_bytes
from laya.types import DevicePlan

HALF_BYTES = 2  # single precision is loaded as half, and what is quantized computes in half: so is the "auto" cache
_TERMS = ("weights", "kv_cache", "compute", "graphs", "overhead")


class VllmChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the search varies."""

    max_num_seqs: int
    max_seq_len: int
    kv_cache_dtype: str


class VllmModel(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same while settings are tried."""

    id: str
    found: HfFacts
    cards: tuple[GpuMemory, ...]  # those it runs on: tensor x pipeline of them, stage by stage; none: it runs in RAM
    settings: VllmSettings
    host: Budget
    n_cores: int
    correction: Correction = NOTHING_LEARNED  # of the RAM
    gpu_correction: Correction = NOTHING_LEARNED  # of each card


def usable_bytes(card: GpuMemory) -> int:
    """What may be planned with on a card: what is free, less a reserve for drivers and other programs."""
    return max(0, card.free_bytes - card.kept_free_bytes)


def chosen_cards(cards: Sequence[GpuMemory], gpus: Sequence[int]) -> list[GpuMemory]:
    """Those that `gpus` names, all where it names none. Raises ConfigError for one that is not there."""
    there = [card.index for card in cards]
    for number in gpus:
        if there and number not in there:
            are = f"there {'is' if len(there) == 1 else 'are'} {', '.join(map(str, there))}"
            raise ConfigError(f"gpus names GPU {number}, which can't be used: {are}.", param="gpus")
    return [card for card in cards if not gpus or card.index in gpus]


def cache_of(model: VllmModel, choice: VllmChoice) -> KvCache:
    shape, states = model.found.shape, model.found.state_bytes
    element = 2 * HALF_BYTES if model.settings.computes_in_single else HALF_BYTES
    return kv_cache(shape, model.settings, choice.kv_cache_dtype, dtype_bytes=element, state_bytes=states)


def terms_of(model: VllmModel, choice: VllmChoice) -> list[dict[str, int]]:
    """Term -> bytes of each worker: of each card, in the order of `cards`; in RAM they come one after another too."""
    terms_for = gpu_terms if model.cards else cpu_terms
    stages = terms_for(model.found, model.settings, choice.max_num_seqs, choice.max_seq_len)
    caches = cache_of(model, choice).bytes_for(choice.max_num_seqs, choice.max_seq_len)
    per_stage = [terms | {"kv_cache": cache} for terms, cache in zip(stages, caches, strict=True)]
    return [
        {name: terms[name] for name in _TERMS if terms.get(name)}
        for terms in per_stage
        for _ in range(model.settings.tensor_parallel_size)
    ]


def devices_of(model: VllmModel, choice: VllmChoice) -> list[DevicePlan]:
    """The account of each card and of the RAM."""
    workers = terms_of(model, choice)
    ram = {"overhead": host_bytes(model.settings, on_cpu=not model.cards)}
    if not model.cards:
        names = [name for name in _TERMS if any(name in terms for terms in (*workers, ram))]
        ram = {name: sum(terms.get(name, 0) for terms in (*workers, ram)) for name in names}
    cards = [
        _device(f"gpu{card.index}", usable_bytes(card), terms, model.gpu_correction)
        for card, terms in zip(model.cards, workers, strict=False)
    ]
    return [*cards, _device(CPU, model.host.bytes, ram, model.correction)]


def _device(name: str, budget_bytes: int, terms: dict[str, int], correction: Correction) -> DevicePlan:
    learned_bytes = correction.bytes_of(sum(terms.values()))
    terms = terms | ({TERM: learned_bytes} if learned_bytes else {})
    return DevicePlan(device=name, budget_bytes=budget_bytes, terms=terms, total_bytes=sum(terms.values()))
