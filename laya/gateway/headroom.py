"""Owns: what each device still has room for, in one sentence: the largest model that would fit, or so many more tokens.

Planned as a load would be, of the catalogue and of what is here; nobody leaves for it. Kept for as long as the memory
that is free stays about the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from laya.config.quantization import split_kind
from laya.errors import LayaError
from laya.gateway.catalogued import plan_entry
from laya.gateway.gauge import DeviceGauge
from laya.gateway.kind_llamacpp import budget_for
from laya.gateway.kinds import kind_of
from laya.gateway.rates import kept_rates
from laya.memory import Budget, size_text
from laya.memory.rates import MachineRates
from laya.models.catalogue import suggested
from laya.types import MIB, Plan

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

RAM = "cpu"
MOVED_BYTES = 64 * MIB  # free memory moves by less all the time
_UNBOUND = 1 << 50
_Room = tuple[str | None, int | None, str | None]  # as Headroom: model, tokens, tokens_of


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """Of one device."""

    device: str
    sentence: str
    model: str | None = None  # the largest that would fit beside what is loaded
    tokens: int | None = None  # or so many more of the cache of `tokens_of`
    tokens_of: str | None = None


class Headrooms:
    """See the module; of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: tuple[object, ...] = ()
        self._kept: dict[str, _Room] = {}
        self._one_at_a_time = asyncio.Lock()

    async def of(self, devices: list[DeviceGauge]) -> list[Headroom]:
        """devices: as they are now."""
        async with self._one_at_a_time:
            free = self._fleet.loading.free_budget()
            endpoints = list(self._fleet.endpoints.values())
            newest = max(
                (each for each in endpoints if each.planned is not None and each.is_here),
                key=lambda each: each.last_used_s,
                default=None,
            )
            loaded = frozenset(each.model_id for each in endpoints if each.pool is not None)
            free_bytes = (free.bytes, *free.gpu_bytes)
            names = tuple(each.device for each in devices)
            seen = (*(n_bytes // MOVED_BYTES for n_bytes in free_bytes), newest and newest.name, loaded, names)
            if seen != self._seen:
                self._kept = await asyncio.to_thread(self._all, names, free, newest, loaded)
                self._seen = seen
            return [_said(device, *self._kept[device.device]) for device in devices]

    def _all(
        self, devices: Iterable[str], free: Budget, newest: Endpoint | None, loaded: frozenset[str]
    ) -> dict[str, _Room]:
        """In a thread of its own: what changes meanwhile is given to it."""
        rates = kept_rates(self._fleet.loading.corrections.path)
        found: dict[str, _Room] = {}
        for device in devices:
            tokens = self._tokens(device, free, newest) if newest is not None else None
            model = self._largest(device, _alone(free, device), loaded, rates)
            found[device] = model, tokens, newest.model_id if newest is not None and tokens else None
        return found

    def _largest(self, device: str, budget: Budget, loaded: frozenset[str], rates: MachineRates | None) -> str | None:
        """The id of the largest model for chats, of those that are not loaded."""
        free_bytes = budget.bytes if device == RAM else max(budget.gpu_bytes, default=0)
        able = [each for each in suggested("chat") if each.id not in loaded and each.file_bytes <= free_bytes]
        for entry in sorted(able, key=lambda each: -each.file_bytes):
            settings = self._fleet.config.for_model(entry.id)
            try:
                plan = plan_entry(entry, settings.asked(), budget_for(settings, budget), rates)
            except LayaError:  # its own settings ask for what this device has not
                continue
            if plan.fits and (device == RAM or not plan.settings.spills):
                return split_kind(entry.id)[0]
        return None

    def _tokens(self, device: str, free: Budget, endpoint: Endpoint) -> int | None:
        """How many more tokens of the cache of this model would fit there, by the plans of two lengths of it."""
        planned = endpoint.planned
        if planned is None or not planned.is_computed or planned.max_seq_len < 2:
            return None
        free_bytes = free.bytes if device == RAM else free.gpu_bytes[int(device.removeprefix("gpu"))]
        settings = endpoint.settings
        unbound = msgspec.structs.replace(
            free,
            bytes=_UNBOUND,
            total_bytes=_UNBOUND,
            gpu_bytes=tuple(_UNBOUND if each else 0 for each in free.gpu_bytes),
        )
        held = []
        for length in (planned.max_seq_len, planned.max_seq_len // 2):
            asked = msgspec.structs.replace(
                settings.asked(),
                max_seq_len=length,
                max_num_seqs=planned.max_num_seqs,
                kv_cache_dtype=planned.kv_cache_dtype,
                kv_pool_tokens=None,
            )
            file = self._fleet.files.get(endpoint.model_id)
            if file is None:
                return None
            try:
                plan = kind_of(settings).plan(settings, file, asked, unbound, self._fleet.loading.corrections)
            except LayaError:  # a file that has gone meanwhile has no tokens
                return None
            held.append((_on(plan, device), length * planned.max_num_seqs))
        (more_bytes, more_tokens), (less_bytes, less_tokens) = held
        if more_bytes <= less_bytes or more_tokens == less_tokens:
            return None
        tokens = int(free_bytes * (more_tokens - less_tokens) / (more_bytes - less_bytes))
        return _rounded(tokens) or None


def _alone(free: Budget, device: str) -> Budget:
    """The budget with this device for the weights, and no other one."""
    if device == RAM:
        return msgspec.structs.replace(free, gpu_bytes=())
    number = int(device.removeprefix("gpu"))
    kept = tuple(n_bytes if each == number else 0 for each, n_bytes in enumerate(free.gpu_bytes))
    return msgspec.structs.replace(free, gpu_bytes=kept)


def _on(plan: Plan, device: str) -> int:
    return sum(each.total_bytes for each in plan.devices if each.device == device)


def _rounded(tokens: int) -> int:
    """Two figures of it, never more than there are."""
    step: int = 10 ** max(0, len(str(tokens)) - 2)
    return tokens // step * step


def _said(device: DeviceGauge, model: str | None, tokens: int | None, tokens_of: str | None) -> Headroom:
    counted = None if tokens is None else f"{_short(tokens)} tokens"
    room = " or ".join(filter(None, (model, counted and f"{counted} more")))
    held, most = size_text(device.reserved_bytes), size_text(device.budget_bytes)
    if held.split()[-1] == most.split()[-1]:  # "14.2 of 22.4 GiB"
        held = held.split()[0]
    sentence = f"{held} of {most}. " + (f"Room for {room}." if room else "No room for another model.")
    return Headroom(device=device.device, sentence=sentence, model=model, tokens=tokens, tokens_of=tokens_of)


def _short(tokens: int) -> str:
    """`900`, `46k`, `2.5M`."""
    if tokens >= 1_000_000:
        return f"{tokens / 1_000_000:.1f}M"
    return f"{tokens // 1000}k" if tokens >= 1000 else str(tokens)
