"""Owns: the models this server knows and what it takes to have one ready: find its file, plan it, make room, load it.

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
from laya.engines.settings import EngineSettings, Pooling
from laya.engines.supervisor import Supervisor
from laya.errors import ConfigError, LayaError, ModelNotFound, ModelNotPulled, NotSupported
from laya.gateway.endpoint import Endpoint
from laya.memory import LLAMA_SERVER, Budget, Ledger, Machine, plan_file, read_facts, refusal
from laya.metrics import GatewayStats
from laya.models import available, resolve
from laya.routing import RequestRouter
from laya.types import EngineAddress, ModelFile, ModelState, ModelStatus, Plan

RESCAN_EVERY_S = 1.0
NAMES_LEARNED_LIMIT = 32
DRAIN_DEADLINE_S = 30.0
WINDOW_KEPT_S = 30.0


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
        self.home = home
        self.router = router
        self.stats = stats
        self.supervisor = supervisor
        self.machine = machine
        self.ledger = Ledger()
        self.endpoints: dict[int, Endpoint] = {}
        self.files: dict[str, ModelFile] = {}
        self.plans: dict[str, Plan] = {}
        self.pump: Callable[[Endpoint], None] = lambda endpoint: None  # the dispatcher's
        self._by_name: dict[str, Endpoint] = {}
        self._misses: dict[str, float] = {}
        self._windows: dict[str, tuple[float, int | None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        supervisor.on_state(self._engine_changed)

    # which models there are
    def scan(self) -> None:
        """Register every model of the config, the store and models_dir."""
        for model_id in self.config.models:
            self._register_configured(model_id)
        for file in available(models_dir=self._models_dir, home=self.home):
            if file.id not in self._by_name:
                self.register(file, self.config.for_model(file.id))

    @property
    def _models_dir(self) -> Path:
        return Path(self.config.models_dir)

    def _register_configured(self, model_id: str) -> Endpoint:
        settings = self.config.for_model(model_id)
        try:
            file = resolve(settings.source or model_id, models_dir=self._models_dir, home=self.home)
        except LayaError as error:
            raise ConfigError(f"models.{model_id}: {error.message}") from error
        file = msgspec.structs.replace(file, id=model_id, aliases=(*settings.aliases, *self._free_names(file)))
        return self.register(file, settings)

    def _free_names(self, file: ModelFile) -> tuple[str, ...]:
        return tuple(name for name in (file.id, *file.aliases) if name not in self._by_name)

    def register(self, file: ModelFile, settings: ResolvedModel) -> Endpoint:
        index = self.router.add_endpoint()
        task = file.task if file.task and "task" not in settings.fixed else settings.task
        settings = msgspec.structs.replace(settings, id=file.id, task=task)
        endpoint = Endpoint(index, settings, self.stats.model(file.id))
        names = [name for name in dict.fromkeys((file.id, *file.aliases)) if name not in self._by_name]
        self.endpoints[index] = endpoint
        self.files[file.id] = file
        for name in names:
            self._by_name[name] = endpoint
        self.router.set_model(file.id, [index], aliases=[name for name in names if name != file.id])
        self.router.set_eligible(index, True)
        self.supervisor.register(
            file.id,
            lambda: self._prepare(endpoint),
            lambda: self.ledger.release(endpoint.model_id),
            task=settings.task,
            drained=endpoint.drained,
        )
        return endpoint

    def find(self, name: str) -> Endpoint:
        """The endpoint of a model, also of a file that was dropped into models_dir a moment ago.

        Raises: ModelNotFound, and what the models room says of a file that is there but broken.
        """
        endpoint = self._by_name.get(name)
        if endpoint is not None:
            return endpoint
        now_s = time.monotonic()
        if self._misses.get(name, 0.0) > now_s - RESCAN_EVERY_S or len(self._misses) > 256:
            self._misses = {missed: at_s for missed, at_s in self._misses.items() if at_s > now_s - RESCAN_EVERY_S}
            if name in self._misses or len(self._misses) > 256:
                raise ModelNotFound(name, self._by_name)
        try:
            file = resolve(name, models_dir=self._models_dir, home=self.home, allow_path=False)
        except ModelNotPulled:
            raise
        except ModelNotFound:
            self._misses[name] = now_s
            raise ModelNotFound(name, self._by_name) from None
        known = self._by_name.get(file.id)
        if known is None:
            known = self.register(file, self.config.for_model(file.id))
        if name not in self._by_name:
            self._learn_name(known, name)
        return known

    def _learn_name(self, endpoint: Endpoint, name: str) -> None:
        names = [known for known, other in self._by_name.items() if other is endpoint]
        if len(names) >= NAMES_LEARNED_LIMIT:
            raise ModelNotFound(name, self._by_name)
        self._by_name[name] = endpoint
        aliases = [known for known in (*names, name) if known != endpoint.model_id]
        self.router.set_model(endpoint.model_id, [endpoint.index], aliases=aliases)

    def names_text(self) -> str:
        return ", ".join(endpoint.model_id for endpoint in self.endpoints.values()) or "none; `laya pull` gets one"

    # loading
    def wake(self, endpoint: Endpoint) -> None:
        """Have the engine ready for what waits at this endpoint; its queue is failed when that can't be."""
        self._spawn(self._wake(endpoint))

    async def _wake(self, endpoint: Endpoint) -> None:
        try:
            await self.load(endpoint)
        except LayaError as error:
            endpoint.fail_waiting(error)

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
        if file.format != "gguf":
            raise NotSupported(f"'{model_id}' is a Hugging Face folder; no engine that is installed here can run it.")
        pooling = self._pooling(endpoint, file)
        plan = await self._plan_with_room(endpoint, file)
        self.ledger.reserve(model_id, "cpu", plan.need_bytes)
        self.plans[model_id] = plan
        settings = endpoint.settings
        return EngineSettings(
            model_id=model_id,
            path=file.path,
            planned=plan.settings,
            args=settings.args,
            mmproj=settings.mmproj,
            draft=settings.draft,
            lora=settings.lora,
            pooling=pooling,
            chat_template=settings.chat_template or file.chat_template,
            engine_path=settings.engine_path,
            load_timeout_s=settings.load_timeout_s,
        )

    def _pooling(self, endpoint: Endpoint, file: ModelFile) -> Pooling | None:
        """How token vectors become one, where the file does not say. Raises NotSupported for what is no reranker."""
        task = endpoint.settings.task
        if task == "chat":
            return None
        own = read_facts(file.path).shape.pooling
        if task == "rerank" and own != "rank":
            raise NotSupported(f"'{file.id}' is not a reranker: its file states no rank pooling. Use `task: embed`.")
        return None if own else "mean"

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
        idle = [
            endpoint
            for endpoint in self.endpoints.values()
            if endpoint is not wanted and endpoint.pool and not endpoint.is_busy and not endpoint.settings.pinned
        ]
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
        endpoint = self._by_name[model_id]
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
        """A few times a second: waiting requests past their deadline, models idle past their ttl."""
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
        return [name for name, other in self._by_name.items() if other is endpoint and name != endpoint.model_id]

    def kv_tokens(self) -> dict[str, tuple[int, int]]:
        """Model -> (tokens promised to live requests, tokens that can be held)."""
        return {
            endpoint.model_id: (
                sum(exchange.reserved_tokens for exchange in endpoint.live),
                endpoint.planned.kv_pool_tokens,
            )
            for endpoint in self.endpoints.values()
            if endpoint.planned is not None
        }

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
