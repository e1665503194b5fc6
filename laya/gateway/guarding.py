"""Owns: the guard at work: reads the machine, climbs the ladder, and has the fleet give memory back, step by step.

Joins what may not know each other: readings and ladder (memory), ceilings (engines), models (fleet), and events.
It never touches the gateway itself: what it stops are engines, the youngest first, and only when nothing else helped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from laya.engines.ceiling import Ceilings
from laya.engines.ceiling_place import CeilingSupport, OwnGroup, claim, look
from laya.engines.held_memory import read_family
from laya.engines.supervisor import Supervisor
from laya.errors import EngineCrashed, LayaError
from laya.gateway.events import Events
from laya.gateway.gpu_guard import GpuGuard
from laya.gateway.relay import broke_off
from laya.memory import (
    Ladder,
    PressureMeter,
    PressureTrigger,
    Reading,
    Step,
    mounts,
    pressure_files,
    size_text,
)
from laya.metrics import GatewayStats
from laya.types import EngineAddress, ModelState

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
WATCH_EVERY_S = 0.05  # children without a group can outgrow their limit only for so long


class GivesBack(Protocol):
    """What the guard asks of the fleet; its relief does it."""

    def set_admitting(self, admitting: bool, reason: str = "") -> None: ...
    async def drop_caches(self) -> int: ...
    async def unload_idle(self, device: str | None = None, seen: Collection[str] = ()) -> list[str]: ...
    async def stop_youngest(self, reason: str) -> str | None: ...


def own_groups(root: Path = Path("/")) -> list[OwnGroup]:
    """Our group in each hierarchy that may control memory."""
    return [(mount.kind, mount.group) for mount in mounts(root, "memory")]


def ceiling_support(root: Path = Path("/")) -> CeilingSupport:
    """What can hold engines to their bytes on this machine; `words` is for `laya doctor`. Leaves nothing behind."""
    return look(own_groups(root), root)


def claim_ceilings() -> tuple[Ceilings, CeilingSupport]:
    """Take what there is for the life of this process, and remove what dead gateways left."""
    ceilings, support = claim(own_groups)
    removed = ceilings.remove_leftovers()
    if removed:
        logger.info("removed %d memory groups of gateways that are gone", removed)
    return ceilings, support


def shared_groups(ceilings: Ceilings, root: Path = Path("/")) -> list[Path]:
    """The version 2 group that holds this process and its engines, whose pressure is ours; none where there is none."""
    if ceilings.kind == "v2" and ceilings.folder is not None:
        return [ceilings.folder]  # we stepped aside within it
    return [mount.group for mount in mounts(root, "memory") if mount.kind == "v2"]


class Guarding:
    """See the module. `run` until cancelled."""

    def __init__(
        self,
        fleet: GivesBack,
        supervisor: Supervisor,
        ceilings: Ceilings,
        *,
        events: Events,
        stats: GatewayStats,
        available_bytes: Callable[[], int],
        model_of: Callable[[str], str] = str,
    ) -> None:
        """available_bytes: what can be had now without swapping (Machine.available_bytes). model_of: the model of the
        engine that is called so; metrics count by models."""
        self._fleet = fleet
        self._supervisor = supervisor
        self._ceilings = ceilings
        self._events = events
        self._stats = stats
        self._available_bytes = available_bytes
        self._model_of = model_of
        self._ladder = Ladder()
        self._groups = shared_groups(ceilings)
        self._pressure = PressureMeter(groups=self._groups)
        self._gpus = GpuGuard(fleet, supervisor, events=events, stats=stats, model_of=model_of)
        self._starting: set[str] = set()
        self._fired = asyncio.Event()
        supervisor.on_state(self._engine_changed)

    def crash_error(self, model_id: str, reason: str) -> LayaError:
        """What a client is told whose engine went away under its answer; `reason` is how its connection ended."""
        hit = self._ceilings.hit(model_id)
        if hit is None:
            return broke_off(model_id, reason)
        return EngineCrashed(
            f"The engine of '{model_id}' was {hit.words()}.",
            cause="memory_limit",
            limit_bytes=hit.limit_bytes,
            peak_bytes=hit.peak_bytes,
        )

    async def run(self) -> None:
        """Look at the machine for ever: a few times a second, and at once when the kernel reports pressure."""
        with contextlib.ExitStack() as stack:
            self._listen(stack)
            looked_s = float("-inf")
            while True:
                now_s = time.monotonic()
                self._ceilings.check_watched()
                if self._fired.is_set() or now_s - looked_s >= LOOK_EVERY_S:
                    self._fired.clear()
                    looked_s = now_s
                    try:
                        await self.look(now_s)
                    except Exception:  # a guard that ends after one fault guards nothing
                        logger.exception("the guard's look at the machine failed")
                await self._pause()

    async def look(self, now_s: float) -> Step | None:
        """One reading and the step it asks for, if any."""
        await self._gpus.look(now_s)
        reading = self.reading(now_s)
        step = self._ladder.climb(reading)
        if step is not None:
            await self._take(step, reading)
        return step

    def reading(self, now_s: float) -> Reading:
        """The machine as the ladder sees it. Weights that running engines map are theirs, though the kernel would
        drop them: an engine whose weights are dropped reads them back with every token."""
        anonymous_bytes = mapped_bytes = 0
        for pid in self._pids():
            memory = read_family(pid)
            if memory is not None:
                anonymous_bytes += memory.anonymous_bytes
                mapped_bytes += memory.resident_bytes - memory.anonymous_bytes
        available_bytes = self._available_bytes()
        strain = self._pressure.read(now_s)
        return Reading(
            at_s=now_s,
            available_bytes=max(0, available_bytes - mapped_bytes),
            usable_bytes=available_bytes + anonymous_bytes,
            stall_share=strain.stall_share,
            full_stall_share=strain.full_stall_share,
            swap_out_bytes_per_s=strain.swap_out_bytes_per_s,
        )

    def _pids(self) -> list[int]:
        return [status.pid for status in self._supervisor.status() if status.pid is not None]

    def _listen(self, stack: contextlib.ExitStack) -> None:
        """Be woken by each pressure file that lets us; without any, the polls are all there is."""
        loop, refused = asyncio.get_running_loop(), []
        for file in pressure_files(self._groups):
            try:
                trigger = PressureTrigger(file)
            except OSError as error:
                refused.append(f"{file}: {error.strerror or error}")
                continue
            loop.add_reader(trigger.fileno(), self._woken, trigger)
            stack.callback(trigger.close)
            stack.callback(loop.remove_reader, trigger.fileno())
        if refused or not pressure_files(self._groups):
            why = "; ".join(refused) or "this kernel tells no pressure"
            logger.info("no pressure trigger (%s): memory is looked at every %g s", why, LOOK_EVERY_S)

    def _woken(self, trigger: PressureTrigger) -> None:
        if trigger.take():
            self._fired.set()

    async def _pause(self) -> None:
        pause_s = WATCH_EVERY_S if self._ceilings.is_watching else LOOK_EVERY_S
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._fired.wait(), pause_s)

    async def _take(self, step: Step, reading: Reading) -> None:
        """Have the fleet do it; what came to nothing is no event."""
        why = f"{size_text(reading.available_bytes)} of {size_text(reading.usable_bytes)} left"
        if reading.is_strained:
            why += f", programs waited for memory {reading.stall_share:.0%} of the time"
        if step == "stop_admitting":
            self._fleet.set_admitting(False, why)
            self._note(step, f"nothing new is loaded or let in: {why}", reading)
        elif step == "admit_again":
            self._fleet.set_admitting(True)
            self._note(step, f"memory is easy again: {why}", reading)
        elif step == "drop_caches":
            freed_bytes = await self._fleet.drop_caches()
            self._note(step, f"caches dropped ({size_text(freed_bytes)}): {why}", reading)
        elif step == "unload_idle":
            for model_id in await self._fleet.unload_idle():
                self._stats.count_unload(self._model_of(model_id), "pressure")
                self._note(step, f"'{model_id}' was idle and is unloaded: {why}", reading, model_id)
        else:
            stopped = await self._fleet.stop_youngest(why)
            if stopped is not None:
                self._stats.count_unload(self._model_of(stopped), "pressure")
                self._note(step, f"'{stopped}', the youngest engine, is stopped: {why}", reading, stopped)

    def _note(self, step: Step, text: str, reading: Reading, model_id: str | None = None) -> None:
        self._stats.count_guard_step(step)
        self._events.add(
            step,
            text,
            level="info" if step == "admit_again" else "warning",
            model=model_id,
            available_bytes=reading.available_bytes,
            usable_bytes=reading.usable_bytes,
            stall_share=round(reading.stall_share, 3),
        )

    def _engine_changed(self, model_id: str, state: ModelState, address: EngineAddress | None) -> None:
        if state != "failed":
            (self._starting.add if state == "loading" else self._starting.discard)(model_id)
            return
        hit, was_starting = self._ceilings.hit(model_id), model_id in self._starting
        self._starting.discard(model_id)
        reason = "oom" if hit is not None else "start_failed" if was_starting else "crashed"
        self._stats.count_unload(self._model_of(model_id), reason)
        if hit is None and was_starting:  # why is told to who asked for it
            self._events.add("engine_failed", f"the engine of '{model_id}' did not start", model=model_id)
        elif hit is None:
            self._events.add("engine_failed", f"the engine of '{model_id}' ended by itself", model=model_id)
        else:
            text = f"the engine of '{model_id}' was {hit.words()}"
            self._events.add(
                "memory_limit", text, model=model_id, limit_bytes=hit.limit_bytes, peak_bytes=hit.peak_bytes
            )
