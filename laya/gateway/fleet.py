"""Owns: what it takes to have a model's engine ready, and what the gateway does when engines come and go.

Where the models, memory and engines rooms meet. Planning reads a file's header in a thread; nothing else here blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from laya.config import Config
from laya.engines.hooks import Ending
from laya.engines.settings import EngineSettings
from laya.engines.supervisor import Supervisor
from laya.errors import EngineFailed, EngineOutOfMemory, LayaError
from laya.gateway.corrections import Corrections
from laya.gateway.endpoint import Endpoint
from laya.gateway.events import Events
from laya.gateway.launch import check_servable, engine_settings, pooling_of
from laya.gateway.loading import Loading
from laya.gateway.relief import Relief
from laya.gateway.room import Room
from laya.gateway.shelf import Shelf
from laya.gateway.threads import Threads
from laya.memory import Budget, Machine
from laya.metrics import GatewayStats
from laya.routing import RequestRouter
from laya.types import EngineAddress, ModelState, ModelStatus, Plan

DATABASE = "laya.db"
DRAIN_DEADLINE_S = 30.0
WINDOW_KEPT_S = 30.0
MEASURE_EVERY_S = 2.0
BACK_OFF_HELD_S = 5.0  # requests wait this long for an engine that is left alone after it died
HITS_ENOUGH = 2  # the second engine had what was learned of the first
CLOCK_STEP_S = 0.01  # a timer may be this early


class Fleet(Shelf):
    """All endpoints and their engines."""

    def __init__(
        self,
        config: Config,
        *,
        home: Path,
        router: RequestRouter,
        stats: GatewayStats,
        supervisor: Supervisor,
        machine: Machine,
        events: Events | None = None,
    ) -> None:
        super().__init__(config, home=home, router=router, stats=stats, supervisor=supervisor)
        self.machine = machine
        self.events = events or Events()
        self.plans: dict[str, Plan] = {}
        self.pump: Callable[[Endpoint], None] = lambda endpoint: None  # the dispatcher's
        self.loading = Loading(config, machine, supervisor, Corrections(home / DATABASE), self, self._evict)
        self.ledger = self.loading.ledger
        self.threads = Threads(self.ledger, machine.cores)
        self.relief = Relief(self)
        self.room = Room(self.ready, self.loading.reach_bytes)
        self._anyway: set[str] = set()  # models that somebody insists on
        self._n_hits: dict[str, int] = {}  # how often in a row a model's engine was stopped at its ceiling
        self._outgrown: dict[str, LayaError] = {}  # models that are not tried again unasked
        self._windows: dict[str, tuple[float, int | None]] = {}
        self._measured_s = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        supervisor.on_state(self._engine_changed)

    # which models there are
    def attend(self, endpoint: Endpoint) -> None:
        endpoint.held_back = self.relief.reason
        endpoint.on_busy = self._busy_changed
        self.supervisor.register(
            endpoint.model_id,
            lambda: self._prepare(endpoint),
            lambda: self._released(endpoint),
            task=endpoint.settings.task,
            drained=endpoint.drained,
            ended=lambda ending: self._ended(endpoint, ending),
        )

    def forget(self, endpoint: Endpoint) -> None:
        self._windows.pop(endpoint.model_id, None)
        self._anyway.discard(endpoint.model_id)
        self._forgive(endpoint.model_id)

    def _forgive(self, model_id: str) -> None:
        self._n_hits.pop(model_id, None)
        self._outgrown.pop(model_id, None)

    # loading
    def wake(self, endpoint: Endpoint) -> None:
        """Have the engine ready for what waits at this endpoint; its queue is failed when that can't be."""
        self._spawn(self._wake(endpoint))

    async def _wake(self, endpoint: Endpoint) -> None:
        try:
            await self._load_or_retry(endpoint)
        except LayaError as error:
            endpoint.fail_waiting(error)

    async def _load_or_retry(self, endpoint: Endpoint) -> None:
        """Load; busy models and, once, a short back-off are waited for, instead of refusing who waits."""
        try:
            await self.room.take_turn(endpoint, endpoint.is_waited_for)
            return
        except EngineFailed as error:
            if error.retry_after_s is None or error.retry_after_s > BACK_OFF_HELD_S:
                raise
            wait_s = error.retry_after_s
        await asyncio.sleep(wait_s + CLOCK_STEP_S)
        if endpoint.queue and endpoint.pool is None:
            await self.room.take_turn(endpoint, endpoint.is_waited_for)

    async def load(self, endpoint: Endpoint, *, anyway: bool = False) -> EngineAddress:
        """As `ready`, asked for by a person: what outgrew its ceiling before is tried again.

        Busy models are waited for as long as a request would. anyway: also what does not fit the whole budget; it runs
        under the ceiling of what is free.
        """
        self._forgive(endpoint.model_id)
        if anyway:
            self._anyway.add(endpoint.model_id)
        end_s = time.monotonic() + endpoint.settings.queue_timeout_s
        return await self.room.take_turn(endpoint, lambda: time.monotonic() < end_s)

    async def ready(self, endpoint: Endpoint) -> EngineAddress:
        """Plan, make room, start, and wait until it has generated a token. Raises what refused it."""
        start_s, was_loaded = time.monotonic(), endpoint.pool is not None
        address = await self.supervisor.ensure_ready(endpoint.model_id)
        if endpoint.pool is None:
            self.open(endpoint, address)
        if not was_loaded:
            endpoint.mean_load_s = time.monotonic() - start_s
        return address

    async def unload(self, endpoint: Endpoint, deadline_s: float = DRAIN_DEADLINE_S) -> None:
        """Let what runs finish within the deadline, then stop the engine. New requests wait for the next load."""
        endpoint.close()
        await self.supervisor.unload(endpoint.model_id, deadline_s)
        if endpoint.queue:
            self.wake(endpoint)

    async def _evict(self, endpoint: Endpoint, wanted_id: str) -> None:
        self.stats.count_unload(endpoint.model_id, "evicted")
        held_bytes = self.ledger.held_by(endpoint.model_id, "cpu")
        text = f"'{endpoint.model_id}' was idle and is unloaded to make room for '{wanted_id}'"
        self.events.add("evicted", text, level="info", model=endpoint.model_id, held_bytes=held_bytes)
        await self.unload(endpoint, deadline_s=0.0)

    async def _prepare(self, endpoint: Endpoint) -> EngineSettings:
        """Called by the supervisor just before a child is started: the plan that it is started with."""
        model_id = endpoint.model_id
        self.relief.check_admitting(model_id)
        if model_id in self._outgrown:
            raise self._outgrown[model_id]
        file = self.files[model_id]
        check_servable(file)
        pooling = pooling_of(endpoint.settings, file)
        anyway = self.config.memory.anyway or model_id in self._anyway
        plan = await self.loading.reserve(endpoint, file, anyway=anyway)
        self.plans[model_id], endpoint.no_room = plan, None
        grant = self.threads.admit(endpoint, plan.settings.n_threads)
        return engine_settings(endpoint.settings, file, plan, pooling, grant)

    def leaving_order(self, wanted: Endpoint | None) -> list[Endpoint]:
        """Idle models that may leave for the sake of another, the longest unused first."""
        idle = [other for other in self.endpoints.values() if other is not wanted and other.may_leave]
        return sorted(idle, key=lambda endpoint: endpoint.last_used_s)

    def threads_for(self, endpoint: Endpoint) -> int | None:
        """Threads of an engine whose model says none; None: all cores, shared out while it runs."""
        return self.threads.fixed_for(endpoint)

    def budget(self) -> Budget:
        """What engines may use in all, as of now."""
        return self.loading.budget()

    # when memory is short
    def set_admitting(self, admitting: bool, reason: str = "") -> None:
        """False: nothing is loaded, and new requests wait in their queues; what runs goes on."""
        self.relief.set_admitting(admitting, reason)

    async def drop_caches(self) -> int:
        """Give back what costs nothing to give; the bytes this process gave."""
        return await self.relief.drop_caches()

    async def unload_idle(self) -> list[str]:
        """Unload the longest unused of the idle models; gives its id, or nothing."""
        return await self.relief.unload_idle()

    async def stop_youngest(self, reason: str) -> str | None:
        """Stop the engine that was started last, whatever it does; gives its id."""
        return await self.relief.stop_youngest(reason)

    # what engines do
    def _engine_changed(self, model_id: str, state: ModelState, address: EngineAddress | None) -> None:
        endpoint = self._by_id[model_id]
        if state == "ready" and address is not None:
            self.open(endpoint, address)
            return
        endpoint.close()
        if state == "failed" and endpoint.queue:
            self.wake(endpoint)

    def _released(self, endpoint: Endpoint) -> None:
        """The engine is gone, or never came."""
        self.threads.leave(endpoint)
        self.ledger.release(endpoint.model_id)
        self.room.changed()

    def _busy_changed(self, endpoint: Endpoint) -> None:
        """The engine got its first request, or its last one has ended."""
        self.threads.share_out(endpoint)
        if not endpoint.live:
            self.room.changed()

    def _ended(self, endpoint: Endpoint, ending: Ending) -> None:
        """What the engine held is known now: learn from it, and do not insist on what could not be."""
        model_id, hit = endpoint.model_id, ending.limit_hit
        plan = self.plans[model_id]
        if hit is not None:
            n_hits = self._n_hits[model_id] = self._n_hits.get(model_id, 0) + 1
            if n_hits >= HITS_ENOUGH or not plan.fits:
                self._anyway.discard(model_id)
                self._outgrown[model_id] = EngineOutOfMemory(model_id, hit.limit_bytes, hit.peak_bytes)
        if plan.fits:  # what was loaded anyway was given less than its plan
            peak_bytes = ending.peak_bytes if hit is None else hit.peak_bytes
            learn, file = self.loading.learn, self.files[model_id]
            self._spawn(asyncio.to_thread(learn, endpoint, file, plan, peak_bytes, was_killed=hit is not None))

    def open(self, endpoint: Endpoint, address: EngineAddress) -> None:
        plan = self.plans[endpoint.model_id]
        template = endpoint.settings.chat_template or self.files[endpoint.model_id].chat_template or ""
        endpoint.open(address, plan, template_bytes=max(len(template.encode()), 1024))
        self.router.set_capacity(endpoint.index, plan.settings.max_num_seqs, plan.settings.kv_pool_tokens)
        self.loading.post_measured()
        self.pump(endpoint)
        self.room.changed()

    def sweep(self, now_s: float) -> None:
        """A few times a second: waiting requests past their deadline, models idle past their ttl, files that came."""
        if self.roster.has_folder_changed():
            self._spawn(self.refresh())
        if now_s - self._measured_s >= MEASURE_EVERY_S:
            self._measured_s = now_s
            self.loading.post_measured()
        for endpoint in self.endpoints.values():
            if endpoint.queue:
                endpoint.expire(now_s)
            ttl_s = endpoint.settings.ttl_s
            if ttl_s is not None and endpoint.pool and not endpoint.is_busy and now_s - endpoint.last_used_s > ttl_s:
                self.stats.count_unload(endpoint.model_id, "idle")
                self._spawn(self.unload(endpoint))

    # what users see
    def statuses(self) -> list[ModelStatus]:
        """Every model: its engine's state with its plan."""
        out = []
        for status in self.supervisor.status():
            if status.id in self._by_id:
                plan = self.plans.get(status.id) if status.state not in ("unloaded", "failed") else None
                out.append(msgspec.structs.replace(status, plan=plan))
        return out

    async def window(self, endpoint: Endpoint) -> int | None:
        """Tokens one request may hold: as loaded, or as it would be loaded alone now; None where it would not fit."""
        if endpoint.planned is not None:
            return endpoint.planned.max_seq_len
        known = self._windows.get(endpoint.model_id)
        if known is not None and known[0] > time.monotonic() - WINDOW_KEPT_S:
            return known[1]
        try:
            plan = await self.loading.plan(endpoint, self.files[endpoint.model_id], self.budget())
            tokens = plan.settings.max_seq_len if plan.fits else None
        except LayaError:
            tokens = None
        self._windows[endpoint.model_id] = (time.monotonic(), tokens)
        return tokens

    def kv_tokens(self) -> dict[str, tuple[int, int]]:
        """Model -> (tokens promised to live requests, tokens that can be held)."""
        return {
            endpoint.model_id: (endpoint.tokens_promised, endpoint.planned.kv_pool_tokens)
            for endpoint in self.endpoints.values()
            if endpoint.planned is not None
        }

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
