"""Owns: which node of the cluster an engine goes to, and what is promised on each node. Starts and stops no engine.

Each node has an account of its own in the ledger, in bytes of ceilings, which is what Ray is told to reserve, too. A
model is planned for a node with a free GPU, else for the one with the most room, in what is free there; where none has
enough, idle models leave a node where this helps. What fits as soon as busy models are done is told so (MemoryBusy);
what never fits is refused (node_refusal.py). A node without the model's files, or with another Laya, is never chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

import laya
from laya.config import ResolvedModel
from laya.engines.cluster import Cluster
from laya.engines.cluster_words import Node, NodeSurvey, WantedFile
from laya.engines.placed import PlacedSettings
from laya.engines.settings import EngineSettings
from laya.engines.supervisor import Supervisor
from laya.errors import ConfigError, MemoryBusy
from laya.gateway.endpoint import Endpoint
from laya.gateway.kinds import kind_of
from laya.gateway.loading import Loading
from laya.gateway.node_accounts import Spot, Spots, account, cores_account, free_cores, gpus_account, gpus_for_one
from laya.gateway.node_refusal import refusal_of
from laya.gateway.variants import file_of, is_choosing
from laya.memory import Budget, budget_within, ceiling_bytes, plan_bytes_within, size_text
from laya.types import ModelFile, Plan

PLACED_KINDS = ("llamacpp",)
OTHERS_S = 3.0  # for the other nodes, once one has answered: one that is gone without a word is still listed
SURVEY_S = 20.0  # for all of them, where none of those that answered will do
AVOID_S = 30.0  # a node whose engine was lost; Ray itself may take half of that to see that a node is gone


class Others(Protocol):
    """The fleet, as far as placing needs it."""

    endpoints: dict[int, Endpoint]
    supervisor: Supervisor
    loading: Loading
    cluster: Cluster | None

    def may_leave_for(self, wanted: Endpoint | None) -> list[Endpoint]: ...
    def kept_for(self, endpoint: Endpoint) -> list[Endpoint]: ...


class Placing:
    """See the module; of one fleet. One engine is placed at a time, so nothing is promised twice."""

    def __init__(self, others: Others, evict: Callable[[Endpoint, str], Awaitable[None]]) -> None:
        self._others = others
        self._evict = evict
        self._lock = asyncio.Lock()
        self._avoided_until_s: dict[str, float] = {}  # by names of nodes
        self._with_accounts: set[str] = set()  # names of nodes

    def is_for(self, settings: ResolvedModel) -> bool:
        """Whether engines of such a model go to nodes."""
        return self._others.cluster is not None and settings.engine in PLACED_KINDS and settings.engine_path is None

    async def settings(
        self, endpoint: Endpoint, file: ModelFile, *, anyway: bool = False
    ) -> tuple[PlacedSettings, Plan]:
        """What an engine is started with, its bytes promised on its node. Raises what refuses it."""
        async with self._lock:
            variant = None
            if is_choosing(endpoint.settings):  # once, as its file must be on the node
                chosen = await self._others.loading.plan(endpoint, file, self.budget())
                file, variant = file_of(chosen, file), chosen.variant
            spot, plan = await self._place(endpoint, file, anyway=anyway)
            settings = kind_of(endpoint.settings).start(endpoint.settings, file, plan, None, name=endpoint.name)
            assert isinstance(settings, EngineSettings)
            files = dict(zip(_files_of(endpoint, file), (Path(each) for each in spot.survey.files), strict=True))
            settings = msgspec.structs.replace(
                settings,
                path=files[settings.path],
                mmproj=files.get(settings.mmproj) if settings.mmproj else None,
                draft=files.get(settings.draft) if settings.draft else None,
                lora=tuple(files[each] for each in settings.lora),
            )
            assert settings.ceiling_bytes is not None
            ledger = self._others.loading.ledger
            ledger.reserve(endpoint.name, account(spot.node.name), settings.ceiling_bytes, overdraw=not plan.fits)
            ledger.reserve(endpoint.name, cores_account(spot.node.name), plan.settings.n_threads, overdraw=True)
            ledger.reserve(endpoint.name, gpus_account(spot.node.name), len(plan.settings.gpus), overdraw=True)
            endpoint.node = spot.node.name
            placed = PlacedSettings(node=spot.node, engine=settings, n_gpus=len(plan.settings.gpus))
            return placed, msgspec.structs.replace(plan, variant=variant)

    def avoid(self, node: str) -> None:
        """An engine was lost there: for a while it gets none as long as another will do."""
        self._avoided_until_s[node] = time.monotonic() + AVOID_S

    def close_accounts(self) -> None:
        """Those of nodes that are gone, once nothing is promised there any more."""
        cluster, ledger = self._others.cluster, self._others.loading.ledger
        there = {node.name for node in cluster.nodes} if cluster is not None else set()
        for name in self._with_accounts - there:
            if all(ledger.close(each(name)) for each in (account, cores_account, gpus_account)):
                self._with_accounts.discard(name)

    def budget(self) -> Budget:
        """What the plan of one engine may have on the node with most memory, were nothing else there."""
        cluster = self._others.cluster
        nodes = cluster.nodes if cluster is not None else ()
        most_bytes = max((node.memory_bytes - node.others_bytes for node in nodes), default=0)
        n_bytes = plan_bytes_within(most_bytes)
        return Budget(bytes=n_bytes, limit="the node with most memory", total_bytes=n_bytes, memory_bytes=most_bytes)

    def reach_bytes(self, endpoint: Endpoint) -> int:
        """What is free, and what idle models would return, on the node where it was last told to wait."""
        details = endpoint.no_room.details if endpoint.no_room is not None else {}
        name = details.get("node", "")
        return self._others.loading.ledger.free(account(name)) + sum(
            self._held_bytes(each) for each in self._idle_on(name, endpoint)
        )

    def shown(self) -> dict[str, Any] | None:
        """The cluster as it is now; None where there is none. error: why nothing can be placed."""
        cluster = self._others.cluster
        if cluster is None:
            return None
        nodes = [{"name": node.name, "memory_bytes": node.memory_bytes} for node in cluster.nodes]
        return {"address": cluster.address, "error": cluster.fault, "nodes": nodes}

    async def _place(self, endpoint: Endpoint, file: ModelFile, *, anyway: bool) -> tuple[Spot, Plan]:
        is_patient = False
        while True:
            found = await self._spots(endpoint, file, is_patient=is_patient)
            spots = found.spots
            for spot in spots:
                plan = await self._fitting(endpoint, file, spot, spot.free_bytes)
                if plan is not None:
                    return spot, plan
            for spot in spots:
                leaving = await self._leaving(endpoint, file, spot)
                if leaving:
                    for idle in leaving:
                        if idle.may_leave:  # a request came meanwhile; the next round sees it
                            await self._evict(idle, endpoint.name)
                    break
            else:
                if found.faults and not is_patient:  # one that was slow, or left aside, may have the room
                    is_patient = True
                    continue
                for spot in spots:
                    await self._check_busy(endpoint, file, spot)
                if anyway and spots:
                    return spots[0], await self._plan(endpoint, file, spots[0], spots[0].free_bytes)
                cluster = self._others.cluster
                assert cluster is not None
                raise await refusal_of(cluster, endpoint, found, partial(self._plan, endpoint, file))

    async def _spots(self, endpoint: Endpoint, file: ModelFile, *, is_patient: bool) -> Spots:
        cluster, ledger = self._others.cluster, self._others.loading.ledger
        assert cluster is not None
        surveys = await cluster.survey(
            _files_of(endpoint, file).values(),
            avoid=() if is_patient else self._avoided(cluster),
            others_wait_s=SURVEY_S if is_patient else OTHERS_S,
        )
        held = {account(node.name): ledger.held(account(node.name)) for node in cluster.nodes}
        self._with_accounts.update(node.name for node in cluster.nodes)
        found = Spots([], {}, {})
        for node in cluster.nodes:
            survey = surveys.get(node.id, "an engine was lost there a moment ago")
            if isinstance(survey, str):
                found.faults[node.name] = survey
            elif survey.version != laya.__version__:
                found.faults[node.name] = f"it has Laya {survey.version}, and this is {laya.__version__}"
            elif survey.missing:
                found.missing[node.name] = survey.missing
            else:
                budget = self._budget(node, survey)
                ledger.set_total(account(node.name), budget.bytes)
                ledger.set_total(gpus_account(node.name), max(0, node.n_gpus - node.others_gpus))
                free_bytes = max(0, budget.bytes - held[account(node.name)])
                found.spots.append(Spot(node, survey, budget.bytes, free_bytes, budget.limit))
        found.spots.sort(key=lambda spot: -spot.free_bytes)
        if endpoint.settings.gpu_layers != 0:  # before the most room, a GPU: without, it computes many times slower
            free = {spot.node.name: max(0, ledger.free(gpus_account(spot.node.name))) for spot in found.spots}
            found.spots.sort(key=lambda spot: not any(gpus_for_one(spot.survey.gpu_bytes, free[spot.node.name])))
        return found

    def _avoided(self, cluster: Cluster) -> set[str]:
        """The ids of nodes that are left aside now, as long as another will do."""
        now_s = time.monotonic()
        return {node.id for node in cluster.nodes if self._avoided_until_s.get(node.name, 0.0) > now_s}

    def _budget(self, node: Node, survey: NodeSurvey) -> Budget:
        """What engines of this gateway may have on it: its memory resource, and never more than is safe there."""
        statuses = self._others.supervisor.status()
        own_bytes = sum(status.anonymous_bytes for status in statuses if status.node == node.name)
        safe = budget_within(survey.available_bytes + own_bytes, f"memory of node {node.name}", node.memory_bytes)
        promised = max(0, node.memory_bytes - node.others_bytes)
        if promised > safe.bytes:
            return safe
        limit = f"memory resource of node {node.name}"
        return msgspec.structs.replace(safe, bytes=promised, total_bytes=promised, limit=limit)

    async def _fitting(
        self, endpoint: Endpoint, file: ModelFile, spot: Spot, free_bytes: int, leaving: Iterable[Endpoint] = ()
    ) -> Plan | None:
        """Its plan, where it fits there; None also where it must have a GPU, and none is free there."""
        try:
            plan = await self._plan(endpoint, file, spot, free_bytes, leaving)
        except ConfigError:
            return None
        return plan if plan.fits else None

    async def _plan(
        self, endpoint: Endpoint, file: ModelFile, spot: Spot, free_bytes: int, leaving: Iterable[Endpoint] = ()
    ) -> Plan:
        """Its plan inside so many bytes of ceiling, on GPUs that are free, or will be when these have left."""
        ledger, gpus = self._others.loading.ledger, gpus_account(spot.node.name)
        free_gpus = ledger.free(gpus) + sum(ledger.held_by(each.name, gpus) for each in (endpoint, *leaving))
        budget = Budget(
            bytes=plan_bytes_within(free_bytes),
            limit=spot.limit,
            total_bytes=spot.total_bytes,
            memory_bytes=spot.node.memory_bytes,
            gpu_bytes=gpus_for_one(spot.survey.gpu_bytes, max(0, free_gpus)),
            why_no_gpu=f"node {spot.node.name} has none that is free and that its build of llama.cpp can use",
            is_elsewhere=True,
        )
        n_threads = free_cores(ledger, endpoint.name, spot.node.name, spot.survey.n_cores)
        return await self._others.loading.plan(endpoint, file, budget, n_threads=n_threads, is_chosen=True)

    async def _leaving(self, endpoint: Endpoint, file: ModelFile, spot: Spot) -> list[Endpoint]:
        """The fewest idle models of that node whose leaving makes it fit; none where that does not help."""
        leaving, free_bytes = [], spot.free_bytes
        for idle in self._idle_on(spot.node.name, endpoint):
            leaving.append(idle)
            free_bytes += self._held_bytes(idle)
            if await self._fitting(endpoint, file, spot, free_bytes, leaving) is not None:
                return leaving
        return []

    async def _check_busy(self, endpoint: Endpoint, file: ModelFile, spot: Spot) -> None:
        """Raise MemoryBusy where it fits on that node once busy models are done."""
        name = spot.node.name
        here = [each for each in self._others.endpoints.values() if each.node == name and each is not endpoint]
        kept, idle = self._others.kept_for(endpoint), self._idle_on(name, endpoint)
        whole_bytes = spot.total_bytes - sum(self._held_bytes(each) for each in here if each in kept)
        others = [each for each in here if each not in kept]
        plan = await self._fitting(endpoint, file, spot, max(0, whole_bytes), others)
        if plan is None:
            return
        held_bytes = {each.name: self._held_bytes(each) for each in here if each not in idle}
        holders = ", ".join(f"'{each}' ({size_text(n_bytes)})" for each, n_bytes in held_bytes.items())
        reach_bytes = spot.free_bytes + sum(self._held_bytes(each) for each in idle)
        need_bytes = ceiling_bytes(plan, endpoint.settings.memory_limit_bytes)
        raise MemoryBusy(
            f"'{endpoint.name}' needs {size_text(need_bytes)}; {size_text(reach_bytes)} of "
            f"{size_text(spot.total_bytes)} ({spot.limit}) can be had now. The rest is held by models that are at work "
            f"or pinned: {holders}. It is loaded as soon as they are done; requests wait for that as long as "
            "queue_timeout_s says.",
            min((each.mean_service_s for each in here), default=1.0),
            need_bytes=need_bytes,
            available_bytes=reach_bytes,
            held_bytes=held_bytes,
            node=name,
        )

    def _idle_on(self, node: str, wanted: Endpoint) -> list[Endpoint]:
        return [each for each in self._others.may_leave_for(wanted) if each.node == node]

    def _held_bytes(self, endpoint: Endpoint) -> int:
        return self._others.loading.ledger.held_by(endpoint.name, account(endpoint.node or ""))


def _files_of(endpoint: Endpoint, file: ModelFile) -> dict[Path, WantedFile]:
    """What its engine reads, by where it lies here."""
    settings = endpoint.settings
    wanted = {file.path: WantedFile(path=str(file.path), n_bytes=file.path.stat().st_size, name=file.id)}
    for path in (settings.mmproj, settings.draft, *settings.lora):
        if path is not None:
            wanted[path] = WantedFile(path=str(path.absolute()), n_bytes=path.stat().st_size)
    return wanted
