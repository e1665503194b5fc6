"""Owns: an endpoint for each model of the roster, and what it takes to have one ready: plan it, make room, load it.

Where the models, memory and engines rooms meet. Planning reads a file's header in a thread; nothing else here blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from laya.config import Config, ResolvedModel
from laya.engines.settings import EngineSettings
from laya.engines.supervisor import Supervisor
from laya.errors import EngineFailed, LayaError
from laya.gateway.endpoint import Endpoint
from laya.gateway.launch import check_servable, engine_settings, pooling_of
from laya.gateway.roster import Roster
from laya.memory import LLAMA_SERVER, Budget, Ledger, Machine, plan_file, refusal
from laya.metrics import GatewayStats
from laya.routing import RequestRouter
from laya.types import EngineAddress, ModelFile, ModelState, ModelStatus, Plan

DRAIN_DEADLINE_S = 30.0
WINDOW_KEPT_S = 30.0
BACK_OFF_HELD_S = 5.0  # requests wait this long for an engine that is left alone after it died
CLOCK_STEP_S = 0.01  # a timer may be this early


class Fleet:
    """All endpoints, by index and by model id."""

    def __init__(
        self,
        config: Config,
        *,
        home: Path,
        router: RequestRouter,
        stats: GatewayStats,
        supervisor: Supervisor,
        machine: Machine,
    ) -> None:
        self.config = config
        self.router = router
        self.stats = stats
        self.supervisor = supervisor
        self.machine = machine
        self.ledger = Ledger()
        self.endpoints: dict[int, Endpoint] = {}
        self.roster = Roster(config, home)
        self.files = self.roster.files
        self.plans: dict[str, Plan] = {}
        self.pump: Callable[[Endpoint], None] = lambda endpoint: None  # the dispatcher's
        self._by_id: dict[str, Endpoint] = {}
        self._windows: dict[str, tuple[float, int | None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        supervisor.on_state(self._engine_changed)

    # which models there are
    def scan(self) -> None:
        """Register every model of the config, the store and models_dir."""
        self.roster.is_scan_due()
        for file in self.roster.configured():
            self.register(file, self.config.for_model(file.id))
        self._update(self.roster.on_disk())

    async def refresh(self) -> None:
        """Register what came to the disk, drop what is gone from it; at most once in `RESCAN_EVERY_S`."""
        if self.roster.is_scan_due():
            self._update(await asyncio.to_thread(self.roster.on_disk))

    def _update(self, found: list[ModelFile]) -> None:
        gone, new = self.roster.compare(found)
        for model_id in gone:
            self._drop(self._by_id[model_id])
        for file in new:
            self.register(file, self.config.for_model(file.id))

    def _drop(self, endpoint: Endpoint) -> None:
        """Forget a model whose file is gone, unless something still works with it: then a later scan does."""
        status = next((status for status in self.supervisor.status() if status.id == endpoint.model_id), None)
        has_engine = status is not None and status.state not in ("unloaded", "failed")
        if has_engine or endpoint.pool or endpoint.is_busy or self.router.load(endpoint.index) != (0, 0):
            return
        self.router.remove_model(endpoint.model_id)
        self.router.remove_endpoint(endpoint.index)
        self.roster.forget(endpoint.model_id)
        self._windows.pop(endpoint.model_id, None)
        del self.endpoints[endpoint.index], self._by_id[endpoint.model_id]

    def register(self, file: ModelFile, settings: ResolvedModel) -> Endpoint:
        file, losers = self.roster.claim(file)
        index = self.router.add_endpoint()
        task = file.task if file.task and "task" not in settings.fixed else settings.task
        settings = msgspec.structs.replace(settings, id=file.id, task=task)
        endpoint = Endpoint(index, settings, self.stats.model(file.id))
        self.endpoints[index] = self._by_id[file.id] = endpoint
        self._publish({file.id, *losers})
        self.supervisor.register(
            file.id,
            lambda: self._prepare(endpoint),
            lambda: self.ledger.release(endpoint.model_id),
            task=settings.task,
            drained=endpoint.drained,
        )
        return endpoint

    def _publish(self, model_ids: set[str]) -> None:
        """Tell the router the names of these models."""
        self.router.set_models(
            (model_id, [self._by_id[model_id].index], self.roster.aliases(model_id)) for model_id in model_ids
        )

    def find(self, name: str) -> Endpoint:
        """The endpoint of a model, also of a file that was dropped into models_dir a moment ago.

        Raises: ModelNotFound, and what the models room says of a file that is there but broken.
        """
        model_id = self.roster.id_of(name)
        if model_id is None:
            file = self.roster.look_up(name)
            model_id = self.roster.id_of_file(file)
            if model_id is None:
                model_id = self.register(file, self.config.for_model(file.id)).model_id
            if self.roster.learn(model_id, name):
                self._publish({model_id})
        return self._by_id[model_id]

    def names_text(self) -> str:
        return ", ".join(endpoint.model_id for endpoint in self.endpoints.values()) or "none; `laya pull` gets one"

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
        """Load; a short back-off is waited for, once, instead of refusing who waits."""
        try:
            await self.load(endpoint)
            return
        except EngineFailed as error:
            if error.retry_after_s is None or error.retry_after_s > BACK_OFF_HELD_S:
                raise
            wait_s = error.retry_after_s
        await asyncio.sleep(wait_s + CLOCK_STEP_S)
        if endpoint.queue and endpoint.pool is None:
            await self.load(endpoint)

    async def load(self, endpoint: Endpoint) -> EngineAddress:
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

    async def _prepare(self, endpoint: Endpoint) -> EngineSettings:
        """Called by the supervisor just before a child is started: the plan that it is started with."""
        model_id = endpoint.model_id
        file = self.files[model_id]
        check_servable(file)
        pooling = pooling_of(endpoint.settings, file)
        plan = await self._plan_with_room(endpoint, file)
        self.ledger.reserve(model_id, "cpu", plan.need_bytes)
        self.plans[model_id] = plan
        return engine_settings(endpoint.settings, file, plan, pooling)

    async def _plan_with_room(self, endpoint: Endpoint, file: ModelFile) -> Plan:
        """The plan in what is free now; idle models are unloaded, the longest unused first, as far as that helps."""
        while True:
            budget = self.free_budget()
            plan = await self._plan(endpoint, file, budget)
            if plan.fits:
                return plan
            idle = self._idle_longest(endpoint)
            whole = self.budget()
            if idle is None or plan.need_bytes > whole.bytes:
                raise refusal(plan, budget)
            await self.unload(idle, deadline_s=0.0)

    async def _plan(self, endpoint: Endpoint, file: ModelFile, budget: Budget) -> Plan:
        asked = endpoint.settings.asked()
        if asked.n_threads is None:
            asked = msgspec.structs.replace(asked, n_threads=self._threads_left(endpoint))
        engine = LLAMA_SERVER if endpoint.settings.engine_path else None  # another build may repack more
        return await asyncio.to_thread(plan_file, file.path, asked, budget, model_id=endpoint.model_id, engine=engine)

    def _threads_left(self, endpoint: Endpoint) -> int:
        """Cores that no other loaded engine computes on; llama.cpp collapses when threads outnumber cores."""
        taken = sum(
            other.planned.n_threads for other in self.endpoints.values() if other is not endpoint and other.planned
        )
        return max(1, self.machine.cores() - taken)

    def _idle_longest(self, wanted: Endpoint) -> Endpoint | None:
        idle = [other for other in self.endpoints.values() if other is not wanted and other.may_leave]
        return min(idle, key=lambda endpoint: endpoint.last_used_s, default=None)

    def budget(self) -> Budget:
        """What engines may use in all, as of now."""
        return self.machine.budget(self.config.memory.budget, own_bytes=self._held_bytes())

    def free_budget(self) -> Budget:
        """What is left of it beside the engines that are loaded."""
        budget = self.budget()
        self.ledger.set_total("cpu", budget.bytes)
        return msgspec.structs.replace(budget, bytes=max(0, budget.bytes - self.ledger.reserved("cpu")))

    def _held_bytes(self) -> int:
        """Anonymous memory of our own children: used now, but promised by their plans, so it is in the budget."""
        return sum(status.anonymous_bytes for status in self.supervisor.status())

    # what engines do
    def _engine_changed(self, model_id: str, state: ModelState, address: EngineAddress | None) -> None:
        endpoint = self._by_id[model_id]
        if state == "ready" and address is not None:
            self.open(endpoint, address)
            return
        endpoint.close()
        if state == "failed" and endpoint.queue:
            self.wake(endpoint)

    def open(self, endpoint: Endpoint, address: EngineAddress) -> None:
        plan = self.plans[endpoint.model_id]
        template = endpoint.settings.chat_template or self.files[endpoint.model_id].chat_template or ""
        endpoint.open(address, plan, template_bytes=max(len(template.encode()), 1024))
        self.router.set_capacity(endpoint.index, plan.settings.max_num_seqs, plan.settings.kv_pool_tokens)
        self.pump(endpoint)

    def sweep(self, now_s: float) -> None:
        """A few times a second: waiting requests past their deadline, models idle past their ttl, files that came."""
        if self.roster.has_folder_changed():
            self._spawn(self.refresh())
        for endpoint in self.endpoints.values():
            if endpoint.queue:
                endpoint.expire(now_s)
            ttl_s = endpoint.settings.ttl_s
            if ttl_s is not None and endpoint.pool and not endpoint.is_busy and now_s - endpoint.last_used_s > ttl_s:
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
            plan = await self._plan(endpoint, self.files[endpoint.model_id], self.budget())
            tokens = plan.settings.max_seq_len if plan.fits else None
        except LayaError:
            tokens = None
        self._windows[endpoint.model_id] = (time.monotonic(), tokens)
        return tokens

    def aliases(self, endpoint: Endpoint) -> list[str]:
        return self.roster.aliases(endpoint.model_id)

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
