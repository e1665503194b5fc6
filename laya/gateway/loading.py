"""Owns: what a load is planned with, what has to leave for it, and what the ledger is told. Starts and stops no engine.

The plan is made in what is free now, made larger by what was learned of such engines. Idle models leave, the longest
unused first, only where what they return makes the plan fit, and the next plan waits until it was measured back. What
fits as soon as busy models are done is told so (MemoryBusy); only what never fits is refused for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from laya.config import Config, ResolvedModel
from laya.engines.supervisor import Supervisor
from laya.errors import LayaError, MemoryBusy
from laya.gateway.cards import Cards, share_on_gpus
from laya.gateway.corrections import Corrections
from laya.gateway.endpoint import Endpoint
from laya.gateway.instead import models_that_fit
from laya.gateway.kinds import kind_of
from laya.gateway.variants import is_choosing, plan_best, tell_variants
from laya.memory import Budget, Ledger, Machine, refusal, size_text
from laya.types import AskedSettings, ModelFile, Plan

if TYPE_CHECKING:
    from laya.gateway.replicas import Replicas
    from laya.gateway.roster import Roster
    from laya.gateway.threads import Threads

logger = logging.getLogger(__name__)
RAM = "cpu"
MEASURED_BACK_S = 2.0  # the kernel has an engine's memory back at its end; a group's figures may trail
MEASURED_BACK_SHARE = 0.9  # of it: other programs take and give meanwhile
LOOK_EVERY_S = 0.02


class Others(Protocol):
    """The fleet, as far as making room needs it."""

    endpoints: dict[int, Endpoint]
    files: dict[str, ModelFile]
    threads: Threads
    together: Replicas
    roster: Roster

    def leaving_order(self, wanted: Endpoint | None) -> list[Endpoint]: ...
    def kept_for(self, endpoint: Endpoint) -> list[Endpoint]: ...


class Loading:
    """Plans of one fleet. One load is prepared at a time (the supervisor's lock), so nothing is promised twice."""

    def __init__(
        self,
        config: Config,
        machine: Machine,
        supervisor: Supervisor,
        corrections: Corrections,
        others: Others,
        evict: Callable[[Endpoint, str], Awaitable[None]],
    ) -> None:
        self.ledger = Ledger()
        self.cards = Cards(self.ledger, supervisor, config.memory.gpu)
        self._config = config
        self._machine = machine
        self._supervisor = supervisor
        self.corrections = corrections
        self._others = others
        self._evict = evict

    def budget(self) -> Budget:
        """What engines may use in all, as of now."""
        held_bytes = sum(status.anonymous_bytes for status in self._supervisor.status() if status.node is None)
        # used now, but promised by our plans, so it is in the budget
        budget = self._machine.budget(self._config.memory.budget, own_bytes=held_bytes)
        self.cards.read()
        gpu_bytes = self.cards.total_bytes()
        return msgspec.structs.replace(budget, gpu_bytes=gpu_bytes, why_no_gpu=self.cards.why_none)

    def free_budget(self) -> Budget:
        """What is left of it beside the engines that are loaded."""
        budget = self.budget()
        self.ledger.set_total(RAM, budget.bytes)
        return self.with_room_of(budget, ())

    def with_room_of(self, budget: Budget, givers: Iterable[Endpoint]) -> Budget:
        """What is free now, and what these hold. What is overdrawn has to be returned first."""
        names = [each.name for each in givers]
        free_bytes = self.ledger.free(RAM) + sum(self.ledger.held_by(name, RAM) for name in names)
        on_gpus = [self.cards.free_bytes(), *map(self.cards.held_bytes, names)]
        gpu_bytes = tuple(max(0, sum(parts)) for parts in zip(*on_gpus, strict=True))
        return msgspec.structs.replace(budget, bytes=max(0, free_bytes), gpu_bytes=gpu_bytes)

    async def plan(
        self,
        endpoint: Endpoint,
        file: ModelFile,
        budget: Budget,
        settings: ResolvedModel | None = None,
        *,
        n_threads: int | None = None,
        is_chosen: bool = False,
    ) -> Plan:
        """What the model needs, and what it would be started with inside this budget: of its variants the best that
        fits, where `quantization` is said.

        settings: others than it has now; what engines of it run with does not bind those. n_threads: where the user
        says none, on another machine than this. is_chosen: this very file.
        """
        asked = self._asked(endpoint, n_threads) if settings is None else settings.asked()
        twin_path = self._others.together.variant_path(endpoint) if settings is None else None
        wanted = settings or endpoint.settings
        kind = kind_of(wanted)

        def plan_of(each: ModelFile) -> Plan:
            return kind.plan(wanted, each, asked, budget, self.corrections)

        if is_chosen or not is_choosing(wanted):
            return await asyncio.to_thread(plan_of, file)
        places = Path(self._config.models_dir), self._others.roster.home
        return await asyncio.to_thread(
            plan_best, wanted, file, plan_of, partial(kind.check, wanted), *places, twin_path
        )

    async def plan_in_place(self, endpoint: Endpoint, settings: ResolvedModel, file: ModelFile) -> Plan:
        """What would be started instead of its engine, in what that holds, what is free and what idle models hold."""
        budget = self.free_budget()
        givers = [endpoint, *self._others.leaving_order(endpoint)]
        return await self.plan(endpoint, file, self.with_room_of(budget, givers), settings)

    def _asked(self, endpoint: Endpoint, n_threads: int | None) -> AskedSettings:
        """What the user decided, and what was decided already: replicas of a model promise the same to requests."""
        asked = endpoint.settings.asked()
        twin = self._others.together.twin(endpoint)
        if twin is not None:
            asked = msgspec.structs.replace(asked, max_seq_len=twin.max_seq_len, kv_cache_dtype=twin.kv_cache_dtype)
        if asked.n_threads is None:
            n_threads = n_threads or self._others.threads.fixed_for(endpoint)
            asked = msgspec.structs.replace(asked, n_threads=n_threads)
        return asked

    async def reserve(self, endpoint: Endpoint, file: ModelFile, *, anyway: bool) -> Plan:
        """The plan the engine is started with, its bytes promised. Raises what refuses it.

        anyway: what the whole budget does not hold is promised all the same; nobody leaves for it, and its ceiling is
        what was free.
        """
        plan = await self._plan_with_room(endpoint, file, anyway=anyway)
        for device in plan.devices:
            self.ledger.reserve(endpoint.name, device.device, device.total_bytes, overdraw=not plan.fits)
        if not plan.fits:
            logger.warning(
                "'%s' is loaded although it needs %s; the ledger is overdrawn by %s",
                endpoint.name, size_text(plan.need_bytes), size_text(-self.ledger.free(RAM)),
            )  # fmt: skip
        return plan

    async def _plan_with_room(self, endpoint: Endpoint, file: ModelFile, *, anyway: bool) -> Plan:
        while True:
            budget = self.free_budget()
            shared = await self._plan_of_share(endpoint, file, budget)
            plan = shared or await self.plan(endpoint, file, budget)
            if plan.fits:
                leaving = await self._leaving_for_gpus(endpoint, file, budget, plan)
                if not leaving:
                    return plan
                for idle in leaving:
                    await self._leave(idle, endpoint.name)
                continue
            leaving, reached, credited = await self._credited(endpoint, file, budget, plan)
            if not reached.fits:
                await self._check_hopeless(endpoint, file, reached, credited, anyway=anyway)
                return plan
            for idle in leaving:
                await self._leave(idle, endpoint.name)

    async def _leaving_for_gpus(
        self, endpoint: Endpoint, file: ModelFile, budget: Budget, plan: Plan
    ) -> list[Endpoint]:
        """The fewest idle models that leave so that more of a model lies on GPUs than now: in RAM it is far slower."""
        if not plan.settings.spills:
            return []
        order = self._others.leaving_order(endpoint)
        holders = [each for each in order if any(self.cards.held_bytes(each.name))]
        reached = [plan]
        for n_leaving in range(1, len(holders) + 1):
            reached.append(await self.plan(endpoint, file, self.with_room_of(budget, holders[:n_leaving])))
        shares = [share_on_gpus(each) for each in reached]
        return holders[: shares.index(max(shares))]

    async def _plan_of_share(self, endpoint: Endpoint, file: ModelFile, budget: Budget) -> Plan | None:
        """A plan that leaves as much for each replica that is still to be loaded; None where there is none, or where
        one alone needs more than its share."""
        n_to_load, outdated = self._others.together.to_load(endpoint)
        if n_to_load < 2:
            return None
        whole = self.with_room_of(budget, outdated)
        share_bytes = min(budget.bytes, whole.bytes // n_to_load)
        n_each = -(-n_to_load // max(1, sum(map(bool, whole.gpu_bytes))))  # engines for each GPU
        on_gpus = zip(budget.gpu_bytes, whole.gpu_bytes, strict=True)
        gpu_bytes = tuple(min(free, of_all // n_each) for free, of_all in on_gpus)
        limit = f"{budget.limit}, for {n_to_load} replicas"
        share = msgspec.structs.replace(budget, bytes=share_bytes, gpu_bytes=gpu_bytes, limit=limit)
        plan = await self.plan(endpoint, file, share)
        return plan if plan.fits else None

    async def _check_hopeless(
        self, endpoint: Endpoint, file: ModelFile, reached: Plan, credited: Budget, *, anyway: bool
    ) -> None:
        """Raise MemoryBusy where it fits once busy models are done; InsufficientMemory where it does not, except for
        anyway."""
        kept = self._others.kept_for(endpoint)
        bytes_kept = {other.name: self.ledger.held_by(other.name, RAM) for other in kept}
        kept_bytes = sum(bytes_kept.values())
        whole = self.without(credited, kept)
        plan = reached
        if (whole.bytes, *whole.gpu_bytes) != (credited.bytes, *credited.gpu_bytes):
            plan = await self.plan(endpoint, file, whole)
            if plan.fits:
                raise self._busy(endpoint, reached, credited.limit)
        if anyway:
            return
        if kept_bytes:
            words = ", ".join(f"'{name}' ({size_text(n_bytes)})" for name, n_bytes in bytes_kept.items() if n_bytes)
            stays = (
                "is pinned"
                if all(other.settings.pinned for other in kept if bytes_kept[other.name])
                else "stays loaded"
            )
            whole = msgspec.structs.replace(whole, limit=f"{whole.limit}, less what {stays}: {words}")
        at_hand = [(other, self._others.files[other.model_id]) for other in self._others.endpoints.values()]
        models = await models_that_fit(endpoint, file, at_hand, lambda other, own: self.plan(other, own, whole))
        raise tell_variants(refusal(plan, whole, models), plan)

    def without(self, budget: Budget, kept: Iterable[Endpoint]) -> Budget:
        """The whole budget, but for what these hold."""
        names = [each.name for each in kept]
        held_bytes = sum(self.ledger.held_by(name, RAM) for name in names)
        return msgspec.structs.replace(
            budget,
            bytes=max(0, self.ledger.total(RAM) - held_bytes),
            gpu_bytes=self.cards.less(self.cards.total_bytes(), names),
        )

    def _busy(self, endpoint: Endpoint, plan: Plan, limit: str) -> MemoryBusy:
        """Who holds the rest. plan: the one that does not fit in what can be had now."""
        idle, short = self._others.leaving_order(endpoint), plan.shortest
        where, limit = ("", limit) if short.device == RAM else (f" on {short.device}", f"of {short.device}")
        held_bytes, wait_s = {}, []
        for other in self._others.endpoints.values():
            n_bytes = self.ledger.held_by(other.name, short.device)
            if n_bytes and other is not endpoint and other not in idle:
                held_bytes[other.name] = n_bytes
                wait_s.append(other.mean_service_s)
        holders = ", ".join(f"'{name}' ({size_text(n_bytes)})" for name, n_bytes in held_bytes.items())
        return MemoryBusy(
            f"'{endpoint.name}' needs {size_text(short.total_bytes)}{where}; {size_text(short.budget_bytes)} of "
            f"{size_text(self.ledger.total(short.device))} ({limit}) can be had now. The rest is held by models that "
            f"are at work or pinned: {holders}. It is loaded as soon as they are done; requests wait for that "
            "as long as queue_timeout_s says.",
            min(wait_s, default=1.0),
            need_bytes=short.total_bytes,
            available_bytes=short.budget_bytes,
            held_bytes=held_bytes,
            device=short.device,
        )

    def reach_bytes(self, device: str = RAM) -> int:
        """What is free there now, and what idle models would return."""
        idle = self._others.leaving_order(None)
        self.free_budget()
        return max(0, self.ledger.free(device) + sum(self.ledger.held_by(other.name, device) for other in idle))

    async def _credited(
        self, endpoint: Endpoint, file: ModelFile, budget: Budget, plan: Plan
    ) -> tuple[list[Endpoint], Plan, Budget]:
        """The fewest idle models whose leaving makes it fit, else all of them; the plan and budget with their bytes."""
        leaving: list[Endpoint] = []
        for idle in self._others.leaving_order(endpoint):
            leaving.append(idle)
            budget = self.with_room_of(budget, leaving)
            plan = await self.plan(endpoint, file, budget)
            if plan.fits:
                break
        return leaving, plan, budget

    async def _leave(self, idle: Endpoint, wanted_id: str) -> None:
        """Unload for the sake of another, and wait until the machine shows what the engine held."""
        if not idle.may_leave:
            return  # a request came meanwhile; what is planned next sees it
        held_bytes = next((status.anonymous_bytes for status in self._supervisor.status() if status.id == idle.name), 0)
        before_bytes, cards = self._machine.available_bytes(), self.cards.meter.read()
        held_on_gpus = self.cards.held_bytes(idle.name)
        await self._evict(idle, wanted_id)
        end_s = time.monotonic() + MEASURED_BACK_S
        wanted_bytes = before_bytes + int(MEASURED_BACK_SHARE * held_bytes)
        while self._machine.available_bytes() < wanted_bytes and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_EVERY_S)
        await self.cards.until_back(held_on_gpus, cards)

    def post_measured(self) -> None:
        """Tell the ledger what running engines were measured to hold at most."""
        for status in self._supervisor.status():
            if status.pid is not None and status.measured_bytes:
                self.ledger.post_measured(status.id, RAM, status.measured_bytes)

    def learn(self, endpoint: Endpoint, file: ModelFile, plan: Plan, peak_bytes: int, *, was_killed: bool) -> None:
        """An engine has ended; a plan that was too small makes the next one larger."""
        try:
            settings = endpoint.settings
            kind_of(settings).learn(settings, file, plan, peak_bytes, self.corrections, was_killed=was_killed)
        except LayaError as error:  # a broken file or database: the engine's end goes on
            logger.error("what was learned of '%s' is not kept: %s", endpoint.name, error.message)
