"""Owns: the guard of GPUs: reads what each card's memory holds, tells of what other programs take, and gives back what
idle models hold where those leave too little free.

No driver has control groups for video memory, so nothing can be held to a limit there, and what an engine has it
keeps: who runs short is the other program. A model that works is never stopped for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from laya.engines.held_memory import family
from laya.engines.supervisor import Supervisor
from laya.gateway.events import Events
from laya.memory import GpuMemory, GpuMeter, size_text
from laya.metrics import GatewayStats

LOOK_EVERY_S = 2.0
TAKEN_SHARE = 0.10  # of a card: what other programs must take more before it is an event


class GivesBackCards(Protocol):
    """What is asked of the fleet; its relief does it."""

    async def unload_idle(self, device: str | None = None, seen: Collection[str] = ()) -> list[str]: ...


class GpuGuard:
    """The cards of this machine, as long as a server runs."""

    def __init__(
        self,
        fleet: GivesBackCards,
        supervisor: Supervisor,
        *,
        events: Events,
        stats: GatewayStats,
        model_of: Callable[[str], str] = str,
        meter: GpuMeter | None = None,
    ) -> None:
        """model_of: the model of the engine that is called so."""
        self._fleet = fleet
        self._supervisor = supervisor
        self._events = events
        self._stats = stats
        self._model_of = model_of
        self._meter = meter or GpuMeter()
        self._read_s = float("-inf")
        self._told_others: dict[int, int] = {}  # bytes of other programs when they were last told of
        self._others_at_ease: dict[int, int] = {}  # the same when enough of the card was last free

    async def look(self, now_s: float) -> None:
        """Called a few times a second; reads the cards now and then."""
        if now_s - self._read_s < LOOK_EVERY_S:
            return
        self._read_s = now_s
        pids = {status.id: status.pid for status in self._supervisor.status() if status.pid is not None}
        families = {name: family(pid) for name, pid in pids.items()}
        cards = self._meter.read({pid for each in families.values() for pid in each})
        self._stats.gpus = [
            (str(card.index), {"free": card.free_bytes, "own": card.own_bytes, "others": card.others_bytes})
            for card in cards
        ]
        for card in cards:
            self._tell(card)
            if self._is_short(card):
                seen = {name for name, own in families.items() if not card.process_bytes.keys().isdisjoint(own)}
                await self._relieve(card, seen)

    def _tell(self, card: GpuMemory) -> None:
        """A leap of what others hold is an event, since no step of ours caused it."""
        before_bytes = self._told_others.setdefault(card.index, card.others_bytes)
        if abs(card.others_bytes - before_bytes) < TAKEN_SHARE * card.total_bytes:
            return
        self._told_others[card.index] = card.others_bytes
        if card.others_bytes > before_bytes:
            text = f"other programs hold {size_text(card.others_bytes)} of GPU {card.index} ({card.name})"
            self._events.add("gpu_taken", text, others_bytes=card.others_bytes, free_bytes=card.free_bytes)

    def _is_short(self, card: GpuMemory) -> bool:
        """Whether others took what plans leave free of it. A card that only our plans filled is as it should be."""
        if not card.is_tight:
            self._others_at_ease[card.index] = card.others_bytes
            return False
        return card.others_bytes > self._others_at_ease.setdefault(card.index, card.others_bytes)

    async def _relieve(self, card: GpuMemory, seen: Collection[str]) -> None:
        """One idle model a look: what it gives back shows in the next."""
        for name in await self._fleet.unload_idle(f"gpu{card.index}", seen):
            self._stats.count_guard_step("unload_idle")
            self._stats.count_unload(self._model_of(name), "pressure")
            left = f"{size_text(card.free_bytes)} of GPU {card.index} ({card.name}) are left"
            self._events.add(
                "unload_idle",
                f"'{name}' was idle and is unloaded: {left}, other programs hold {size_text(card.others_bytes)}",
                model=self._model_of(name),
                free_bytes=card.free_bytes,
                others_bytes=card.others_bytes,
            )
