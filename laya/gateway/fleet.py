"""Owns: what it takes to have a model's engine ready, and what the gateway does when engines come and go.

Where the models, memory and engines rooms meet. Planning reads a file's header in a thread; nothing else here blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laya.config import Config, ResolvedModel
from laya.config.places import DATABASE
from laya.engines.cluster import Cluster
from laya.engines.hooks import Ending
from laya.engines.launcher import StartSettings
from laya.engines.supervisor import Supervisor
from laya.errors import LayaError
from laya.gateway.corrections import Corrections
from laya.gateway.counting import counted_bytes_most
from laya.gateway.draining import Draining
from laya.gateway.endpoint import Endpoint
from laya.gateway.events import Events
from laya.gateway.health import Health
from laya.gateway.idling import unload_idle
from laya.gateway.kinds import kind_of
from laya.gateway.load_events import LoadEvents
from laya.gateway.loading import Loading
from laya.gateway.node_accounts import account
from laya.gateway.node_loss import NodeLoss
from laya.gateway.outgrown import Outgrown
from laya.gateway.pausing import Pausing
from laya.gateway.peers import Peers
from laya.gateway.placing import Placing
from laya.gateway.pools import Pools
from laya.gateway.relief import Relief
from laya.gateway.replicas import Replicas
from laya.gateway.room import Room
from laya.gateway.shown import Shown
from laya.gateway.slots import slots_of
from laya.gateway.threads import Threads
from laya.gateway.turns import Turns
from laya.gateway.variants import file_of, is_choosing
from laya.gateway.waiting import sweep_waiting
from laya.gateway.watch import Watch
from laya.memory import Budget, Machine
from laya.metrics import GatewayStats
from laya.routing import RequestRouter
from laya.types import ANY_LENGTH, EngineAddress, ModelFile, ModelState, ModelStatus, PlannedSettings

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

DRAIN_DEADLINE_S = 30.0
WINDOW_KEPT_S = 30.0
MEASURE_EVERY_S = 2.0


class Fleet(Shown):
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
        cluster: Cluster | None = None,
    ) -> None:
        """cluster: whose nodes run the engines that can be placed; None: all run on this machine."""
        super().__init__(config, home=home, router=router, stats=stats, supervisor=supervisor)
        self.machine = machine
        self.events = events or Events()
        self.pump: Callable[[Endpoint], None] = lambda endpoint: None  # the dispatcher's
        self.pass_on: Callable[[Exchange], bool] = lambda exchange: False  # the dispatcher's
        self.now_s = time.monotonic
        self.loading = Loading(config, machine, supervisor, Corrections(home / DATABASE), self, self._evict)
        self.ledger = self.loading.ledger
        self.threads = Threads(self.ledger, machine.cores)
        self.relief = Relief(self)
        self.pausing = Pausing(self)
        self.cluster = cluster
        self.placing = Placing(self, self._evict)
        self.losses = NodeLoss(self)
        self.room = Room(self.ready, self._reach_bytes, Turns(self))
        self.together = Replicas(self)
        self.draining = Draining(self)
        self.health = Health(self)
        self.pools = Pools(self)
        self.peers = Peers(self)
        self.watch = Watch(self)
        self._load_events = LoadEvents(self)
        self._outgrown = Outgrown()
        self.started_with: dict[str, tuple[ResolvedModel, ModelFile]] = {}  # by the names of engines
        self._windows: dict[str, tuple[float, int | None]] = {}
        self._measured_s = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        supervisor.on_state(self.engine_changed)

    # which models there are
    def attend(self, endpoint: Endpoint) -> None:
        endpoint.hold("memory", self.relief.reason)
        endpoint.hold("pause", self.pausing.reason)
        endpoint.on_busy = self._busy_changed
        self.supervisor.register(
            endpoint.name,
            lambda: self._prepare(endpoint),
            lambda: self._released(endpoint),
            task=endpoint.settings.task,
            drained=endpoint.drained,
            ended=lambda ending: self._ended(endpoint, ending),
            takes_turns=not endpoint.is_remote and not self.placing.is_for(endpoint.settings),
        )

    def forget(self, endpoint: Endpoint) -> None:
        self._windows.pop(endpoint.model_id, None)
        self._outgrown.forget(endpoint.name)
        self.started_with.pop(endpoint.name, None)
        self.plans.pop(endpoint.name, None)
        self.together.forget(endpoint)

    # loading
    def wake(self, endpoint: Endpoint) -> None:
        """Have the engine ready for what waits at this endpoint; its queue is failed when that can't be."""
        self.pools.update()
        self.spawn(self._wake(endpoint))

    async def _wake(self, endpoint: Endpoint) -> None:
        try:
            if not await self.room.take_turn_for_queue(endpoint):
                return
        except LayaError as error:
            if not await self.together.load_another(endpoint):
                self.together.unloadable.failed(endpoint, error)
        else:
            if endpoint.queue and endpoint.pool is None:  # its engine is gone again
                self.wake(endpoint)
            await self.together.load_rest(endpoint)

    async def load(self, endpoint: Endpoint, *, anyway: bool = False) -> EngineAddress:
        """As `ready`, asked for by a person, for all engines of its model: what outgrew its ceiling is tried again.

        Busy models are waited for as long as a request would, for the first one. What refuses the others is told by
        their state. anyway: also what does not fit the whole budget; it runs under the ceiling of what is free.
        """
        group = self.replicas(endpoint)
        self.draining.undo(endpoint)
        for each in group:
            self._outgrown.forgive(each.name)
            if anyway:
                self._outgrown.insist(each.name)
        end_s = time.monotonic() + endpoint.settings.queue_timeout_s
        first = next((each for each in group if each.pool is not None), group[0])
        address = await self.room.take_turn(first, lambda: time.monotonic() < end_s)
        await self.together.load_rest(first)
        return address

    async def ready(self, endpoint: Endpoint) -> EngineAddress:
        """Plan, make room, start, and wait until it has generated a token. Raises what refused it."""
        start_s, was_loaded = time.monotonic(), endpoint.pool is not None
        address = await self.supervisor.ensure_ready(endpoint.name)
        if endpoint.pool is None:
            self.open(endpoint, address)
        if not was_loaded:
            endpoint.mean_load_s = time.monotonic() - start_s
        return address

    async def unload(self, endpoint: Endpoint, deadline_s: float = DRAIN_DEADLINE_S) -> None:
        """Let what runs finish within the deadline, then stop the engine. New requests go to the other engines of its
        model, or wait for the next load."""
        self._close(endpoint)
        await self.supervisor.unload(endpoint.name, deadline_s)
        if endpoint.queue:
            self.wake(endpoint)

    async def unload_model(self, endpoint: Endpoint, reason: str = "", deadline_s: float = DRAIN_DEADLINE_S) -> None:
        """`unload` for all engines of its model. reason: what the metrics call it; nothing: not counted."""
        group = self.replicas(endpoint)
        for each in group:
            if reason and each.pool is not None:
                self.stats.count_unload(each.model_id, reason)
            each.close()
        await asyncio.gather(*(self.unload(each, deadline_s) for each in group))

    def _close(self, endpoint: Endpoint) -> None:
        """No request goes to its engine any more."""
        endpoint.close()
        self.router.set_capacity(endpoint.index, 0, 0)  # what the last one held says nothing of the next
        self.health.renew(endpoint)
        self.watch.forget(endpoint)
        self.together.choose_eligible(endpoint)
        self.pools.update()
        self.together.leave_to_others(endpoint)

    async def _evict(self, endpoint: Endpoint, wanted_id: str) -> None:
        self.stats.count_unload(endpoint.model_id, "evicted")
        held_bytes = self.held_bytes(endpoint)
        text = f"'{endpoint.name}' was idle and is unloaded to make room for '{wanted_id}'"
        self.events.add("evicted", text, level="info", model=endpoint.model_id, held_bytes=held_bytes)
        await self.unload(endpoint, deadline_s=0.0)

    async def _prepare(self, endpoint: Endpoint) -> StartSettings:
        """Called by the supervisor just before a child is started: the plan that it is started with."""
        name = endpoint.name
        is_placed = self.placing.is_for(endpoint.settings)
        if not is_placed:
            self.relief.check_admitting(name)
        self._outgrown.check(name)
        self.peers.check(endpoint.model_id)
        file = self.files[endpoint.model_id]
        kind = kind_of(endpoint.settings)
        if not is_choosing(endpoint.settings):  # else each variant is, when one is chosen
            kind.check(endpoint.settings, file)
        anyway = self.config.memory.anyway or self._outgrown.is_insisted(name)
        self.started_with[name] = endpoint.settings, file
        if is_placed:
            placed, self.plans[name] = await self.placing.settings(endpoint, file, anyway=anyway)
            endpoint.no_room = None
            return placed
        plan = await self.loading.reserve(endpoint, file, anyway=anyway)
        self.plans[name], endpoint.no_room = plan, None
        grant = self.threads.admit(endpoint, plan.settings.n_threads)
        return kind.start(endpoint.settings, file_of(plan, file), plan, grant, name=name)

    def leaving_order(self, wanted: Endpoint | None, *, at_once: bool = False) -> list[Endpoint]:
        """`may_leave_for`, of this machine."""
        return [other for other in self.may_leave_for(wanted, at_once=at_once) if other.is_here]

    def may_leave_for(self, wanted: Endpoint | None, *, at_once: bool = False) -> list[Endpoint]:
        """Idle engines that may leave for another model, the longest unused first. at_once: also who lingers."""
        own, now_s = self.replicas(wanted) if wanted is not None else (), time.monotonic()
        idle = [other for other in self.endpoints.values() if other not in own and other.may_leave]
        idle = [other for other in idle if not other.is_remote]  # which would give nothing back anywhere
        idle = [other for other in idle if at_once or not other.lingers(now_s)]
        return sorted(idle, key=lambda endpoint: endpoint.last_used_s)

    def kept_for(self, endpoint: Endpoint) -> list[Endpoint]:
        """The others that do not leave for it, however idle: what is pinned, and the engines of its own model."""
        others = (other for other in self.endpoints.values() if other is not endpoint)
        return [other for other in others if other.settings.pinned or other.model_id == endpoint.model_id]

    def held_bytes(self, endpoint: Endpoint) -> int:
        """What its engine holds of the memory of its machine."""
        return self.ledger.held_by(endpoint.name, account(endpoint.node) if endpoint.node is not None else "cpu")

    def _reach_bytes(self, endpoint: Endpoint) -> int:
        is_placed = self.placing.is_for(endpoint.settings)
        short_of = endpoint.no_room.details.get("device", "cpu") if endpoint.no_room is not None else "cpu"
        return self.placing.reach_bytes(endpoint) if is_placed else self.loading.reach_bytes(short_of)

    def budget(self) -> Budget:
        """What engines of this machine may use in all, as of now."""
        return self.loading.budget()

    # what engines do
    def engine_changed(self, name: str, state: ModelState, address: EngineAddress | None) -> None:
        endpoint = self._by_name[name]
        self._load_events.changed(endpoint, address if state == "ready" else None)
        if state == "ready" and address is not None:
            self.open(endpoint, address)
            return
        endpoint.has_failed = state == "failed"
        lost_with = endpoint.node if state == "loading" else None  # else it has none while a load begins
        if state in ("unloaded", "failed"):
            endpoint.keep_alive_s = endpoint.node = None
        self._close(endpoint)
        if lost_with is not None:
            self.losses.lost(endpoint, lost_with)
        if state == "failed" and endpoint.queue:
            self.wake(endpoint)

    def nodes_changed(self) -> None:
        """A node of the cluster has come or gone, or has other room than before."""
        self.placing.close_accounts()
        self.room.changed()

    def cluster_fault_changed(self) -> None:
        """The head of the cluster does not answer any more, or does again."""
        assert self.cluster is not None
        address, fault = self.cluster.address, self.cluster.fault
        if fault is None:
            self.events.add("ray_joined", f"the Ray cluster at {address} is joined again", level="info")
        else:
            self.events.add("ray_lost", f"the Ray cluster at {address} takes no engines: {fault}")
        self.room.changed()

    def _released(self, endpoint: Endpoint) -> None:
        """The engine is gone, or never came."""
        self.threads.leave(endpoint)
        self.ledger.release(endpoint.name)
        self.placing.close_accounts()
        self.room.changed()

    def _busy_changed(self, endpoint: Endpoint) -> None:
        """The engine got its first request, or its last one has ended."""
        self.threads.share_out(endpoint)
        if not endpoint.is_running:
            self.room.changed()

    def _ended(self, endpoint: Endpoint, ending: Ending) -> None:
        """What the engine held is known now: learn from it, and do not insist on what could not be."""
        plan, hit = self.plans[endpoint.name], ending.limit_hit
        if hit is not None and endpoint.pool is not None and endpoint.pool.counting.may_have_killed:
            return  # no plan is to blame for what was read beside all requests
        self._outgrown.ended(endpoint.name, plan, ending)
        if plan.fits:  # what was loaded anyway was given less than its plan
            peak_bytes = ending.peak_bytes if hit is None else hit.peak_bytes
            learn, file = self.loading.learn, self.files[endpoint.model_id]
            self.spawn(asyncio.to_thread(learn, endpoint, file, plan, peak_bytes, was_killed=hit is not None))

    def open(self, endpoint: Endpoint, address: EngineAddress) -> None:
        plan = self.plans[endpoint.name]
        template = endpoint.settings.chat_template or self.files[endpoint.model_id].chat_template or ""
        endpoint.open(address, plan, template_tokens=max(len(template.encode()), 1024))
        if endpoint.pool is not None and endpoint.is_llamacpp:
            most_bytes = counted_bytes_most(plan, endpoint.settings.memory_limit_bytes)
            endpoint.pool.counting.most_bytes = most_bytes
        endpoint.slots = None if self.config.server.share_prompt_cache else slots_of(address, plan.settings)
        self.router.set_capacity(endpoint.index, plan.settings.max_num_seqs, plan.settings.kv_pool_tokens)
        self.loading.post_measured()
        self.together.choose_eligible(endpoint)
        self.pools.update()
        self.pump(endpoint)
        self.together.spread(endpoint)
        self.room.changed()

    def sweep(self, now_s: float) -> None:
        """A few times a second: waiting requests past their deadline, models idle past their ttl, files that came."""
        if self.roster.has_folder_changed():
            self.spawn(self.refresh())
        if now_s - self._measured_s >= MEASURE_EVERY_S:
            self._measured_s = now_s
            self.loading.post_measured()
        self._load_events.sweep()
        sweep_waiting(self, now_s)
        unload_idle(self, now_s)
        self.together.sweep(now_s)
        self.pools.update()
        self.health.sweep(now_s)
        self.watch.sweep(now_s)

    # what users see
    async def window(self, endpoint: Endpoint) -> int | None:
        """Tokens one request may hold: as loaded, or as it would be loaded alone now; None where it would not fit."""
        if endpoint.settings.peer is not None:
            return self.peers.window(endpoint.model_id)
        planned = endpoint.planned or self.together.twin(endpoint, may_be_outdated=True)
        if planned is not None:
            return told_window(planned)
        known = self._windows.get(endpoint.model_id)
        if known is not None and known[0] > time.monotonic() - WINDOW_KEPT_S:
            return known[1]
        file = self.files.get(endpoint.model_id)
        if file is None:
            return None  # a reload took the model away meanwhile
        try:
            is_placed = self.placing.is_for(endpoint.settings)
            plan = await self.loading.plan(endpoint, file, self.placing.budget() if is_placed else self.budget())
            tokens = told_window(plan.settings) if plan.fits else None
        except LayaError:
            tokens = None
        self._windows[endpoint.model_id] = (time.monotonic(), tokens)
        return tokens

    def standing_of(self, status: ModelStatus) -> ModelStatus:
        return self.peers.standing(status)

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def told_window(planned: PlannedSettings) -> int | None:
    """Tokens that one request may hold; None where only the engine itself knows."""
    return planned.max_seq_len if planned.max_seq_len != ANY_LENGTH else None
