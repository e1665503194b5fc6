"""Owns: whose turn it is where two models do not fit together: a busy one gives its memory to one that has waited.

A model that is used keeps its memory while another waits for it, so that requests are served model by model instead of
with a load for each; but only for a turn (`turn_s`). Then it lets nothing more in, what runs finishes, and it leaves.
So who waits for a model waits at most one turn of those it takes the memory from, their longest running answer and its
own load. A model's own turn begins when its engine is ready: what it was loaded for is let in before anything else.
Loads nothing and knows no plans; one model at a time is given way to.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from laya.gateway.endpoint import TURN_S, Endpoint

if TYPE_CHECKING:
    from laya.errors import MemoryBusy
    from laya.gateway.fleet import Fleet

_HOLDER = "turns"


def turn_s(holder: Endpoint, wanted: Endpoint) -> float:
    """How long one that is used stays although another waits: longer where loads take long, and never so long that
    half of what requests may wait is over."""
    return min(max(TURN_S, holder.mean_load_s), wanted.settings.queue_timeout_s / 2)


class Turns:
    """The turns of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._wanted: Endpoint | None = None  # whom the others give way to
        self._yielding: list[Endpoint] = []

    def ask(self, wanted: Endpoint, since_s: float, error: MemoryBusy) -> None:
        """A load has waited for room since then, last refused so: have those whose turn is over give way to it."""
        if self._wanted not in (None, wanted):
            return
        now_s = time.monotonic()
        short_bytes = error.details["need_bytes"] - error.details["available_bytes"]
        held_bytes = error.details["held_bytes"]  # by those that are in its way; on other nodes nobody is
        short_bytes -= sum(held_bytes.get(each.name, 0) for each in self._yielding)
        if short_bytes <= 0:
            return
        found: list[Endpoint] = []
        for holder in (each for each in self._holders(wanted) if each.name in held_bytes):
            if now_s - max(since_s, holder.opened_s) >= turn_s(holder, wanted):
                found.append(holder)
                short_bytes -= held_bytes[holder.name]
                if short_bytes <= 0:
                    self._give_way(found, wanted, now_s - since_s)
                    return

    def may_try(self, wanted: Endpoint) -> bool:
        """Whether a load that waits may look for room: not while what was made is another's."""
        is_made = all(each.pool is None or each.may_leave for each in self._yielding)
        return self._wanted in (None, wanted) or not is_made

    def settle(self, wanted: Endpoint) -> None:
        """It is loaded, or nobody waits for it any more: those that gave way and are still here go on."""
        if self._wanted is not wanted:
            return
        self._wanted, yielding, self._yielding = None, self._yielding, []
        for each in yielding:
            each.yields_to = None
            each.hold(_HOLDER, None)
            self._fleet.together.choose_eligible(each)
            self._fleet.pump(each)

    def _give_way(self, holders: list[Endpoint], wanted: Endpoint, waited_s: float) -> None:
        self._wanted = wanted
        self._yielding += holders
        for holder in holders:
            holder.yields_to = wanted.name
            holder.hold(_HOLDER, f"its memory is for '{wanted.name}' now, which has waited {waited_s:.0f} s for it")
            self._fleet.together.choose_eligible(holder)
            self._fleet.together.leave_to_others(holder)
            text = f"'{holder.name}' finishes what runs and gives its memory to '{wanted.name}'"
            held_bytes = self._held_bytes(holder)
            self._fleet.events.add("gives_way", text, level="info", model=holder.model_id, held_bytes=held_bytes)

    def _holders(self, wanted: Endpoint) -> list[Endpoint]:
        """Who is at work and might leave, the longest loaded first."""
        kept = self._fleet.kept_for(wanted)
        others = (each for each in self._fleet.endpoints.values() if each is not wanted and each not in kept)
        busy = [each for each in others if each.pool is not None and each.yields_to is None and not each.may_leave]
        return sorted(busy, key=lambda each: each.opened_s)

    def _held_bytes(self, endpoint: Endpoint) -> int:
        return self._fleet.held_bytes(endpoint)
