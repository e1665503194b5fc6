"""A fleet over engines that hold memory of a machine that is only a number: what is loaded, what is left, at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from laya.bench.stub_gateway import stub_plan
from laya.config import Config
from laya.engines.ceiling import LimitHit
from laya.engines.held_memory import MemoryReading
from laya.engines.log import EngineLog
from laya.engines.settings import EngineSettings
from laya.engines.supervisor import Supervisor
from laya.errors import EngineFailed
from laya.gateway.endpoint import Endpoint
from laya.gateway.events import Event
from laya.gateway.fleet import Fleet
from laya.memory import Budget, Machine
from laya.memory.correction import NOTHING_LEARNED, TERM, Correction
from laya.memory.machine import MemoryFacts
from laya.metrics import GatewayStats
from laya.routing import RequestRouter
from laya.types import AskedSettings, EngineAddress, GpuLayers, ModelFile, Plan

SHARE = 0.8  # of what is available, the default budget


class WorldMachine(Machine):
    """Its available memory is what the world says."""

    def __init__(self, world: World) -> None:
        super().__init__(Path("/nowhere"))
        self._world = world

    def memory(self) -> MemoryFacts:
        available = self._world.available_bytes
        total = self._world.total_bytes
        return MemoryFacts(total_bytes=total, available_bytes=available, swap_total_bytes=0, swap_free_bytes=0)

    def cores(self) -> int:
        return self._world.n_cores


class WorldEngine:
    """Holds what its model needs, times `World.truth` of it, as soon as it starts."""

    def __init__(self, world: World, settings: EngineSettings) -> None:
        self.world = world
        self.model_id = settings.model_id
        self.name = settings.engine_name
        self.ceiling_bytes = settings.ceiling_bytes
        self.pid: int | None = None
        self.load_percent: int | None = None
        self.limit_hit: LimitHit | None = None
        self.held_bytes = 0
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> EngineAddress:
        world = self.world
        world.n_starts += 1
        self.pid = world.n_starts
        self.held_bytes = int(world.needs[self.model_id] * world.truth.get(self.model_id, 1.0))
        world.peak_bytes = max(world.peak_bytes, world.engine_bytes)
        await asyncio.sleep(0)
        if self.ceiling_bytes is not None and self.held_bytes > self.ceiling_bytes:
            self.limit_hit = LimitHit(limit_bytes=self.ceiling_bytes, peak_bytes=self.ceiling_bytes, by_kernel=True)
            self.exit("stopped at its memory limit")
        if self.exited.done():
            raise EngineFailed(f"The engine for '{self.model_id}' did not start: {self.exited.result()}")
        return EngineAddress(host="h", port=self.pid, api_key=None, cancels_whole=False, gpu_layers=world.gpu_layers)

    async def stop(self) -> bool:
        self.exit("stopped")
        return True

    async def wait_exit(self) -> str:
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        self.exit("killed")

    def exit(self, reason: str) -> None:
        """It ends, and the machine shows what it held a little later."""
        if self.exited.done():
            return
        self.exited.set_result(reason)
        held_bytes = self.held_bytes
        self.held_bytes = 0
        if self.world.lag_s:
            self.world.lagging_bytes += held_bytes
            asyncio.get_running_loop().call_later(self.world.lag_s, self._measured_back, held_bytes)

    def _measured_back(self, held_bytes: int) -> None:
        self.world.lagging_bytes -= held_bytes

    def measure(self) -> MemoryReading | None:
        if self.pid is None or self.exited.done():
            return None
        held = self.held_bytes
        return MemoryReading(peak_bytes=held, resident_bytes=held, anonymous_bytes=held)


class World:
    """The machine, its engines, and the fleet that shares it out. Bytes are small numbers."""

    def __init__(self, home: Path, needs: dict[str, int], *, total_bytes: int, config: Config | None = None) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = 0
        self.lagging_bytes = 0  # of engines that are gone, and not measured back yet
        self.lag_s = 0.0
        self.n_cores = 2
        self.n_starts = 0
        self.peak_bytes = 0  # the most that engines held together
        self.gpu_layers: GpuLayers | None = None  # what engines tell of themselves
        self.now_s = 1000.0
        self.needs = needs
        self.truth: dict[str, float] = {}  # model -> what it really takes, over its plan
        self.engines: dict[str, WorldEngine] = {}  # by name
        self.supervisor = Supervisor(None, make_engine=self._make, clock=lambda: self.now_s)
        self.fleet = Fleet(
            config or Config(),
            home=home,
            router=RequestRouter(),
            stats=GatewayStats(),
            supervisor=self.supervisor,
            machine=WorldMachine(self),
        )
        for model_id in needs:
            file = ModelFile(id=model_id, path=home / model_id, format="gguf", file_bytes=0, origin="config")
            self.fleet.register(file, self.fleet.config.for_model(model_id))

    @property
    def engine_bytes(self) -> int:
        return sum(engine.held_bytes for engine in self.engines.values())

    @property
    def available_bytes(self) -> int:
        return max(0, self.total_bytes - self.others_bytes - self.lagging_bytes - self.engine_bytes)

    def _make(self, settings: EngineSettings, log: EngineLog) -> WorldEngine:
        engine = self.engines[settings.engine_name] = WorldEngine(self, settings)
        return engine

    def events(self) -> list[Event]:
        """What happened, but that engines became ready."""
        return [event for event in self.fleet.events.after() if event.kind != "ready"]

    def endpoint(self, model_id: str) -> Endpoint:
        return self.fleet.find(model_id)

    async def load(self, model_id: str, *, anyway: bool = False) -> EngineAddress:
        return await self.fleet.load(self.endpoint(model_id), anyway=anyway)

    def loaded(self) -> set[str]:
        return {status.id for status in self.supervisor.status() if status.state == "ready"}

    def plan(
        self,
        path: Path,
        asked: AskedSettings,
        budget: Budget,
        *,
        model_id: str,
        correction: Correction = NOTHING_LEARNED,
        **more: object,
    ) -> Plan:
        """In place of the planner: so many bytes, whatever the settings, and what was learned."""
        plan, table = stub_plan(1), self.needs[model_id]
        terms = {"weights": table, TERM: correction.bytes_of(table)}
        terms = {name: n_bytes for name, n_bytes in terms.items() if n_bytes}
        need = sum(terms.values())
        ram = msgspec.structs.replace(plan.devices[0], budget_bytes=budget.bytes, terms=terms, total_bytes=need)
        return msgspec.structs.replace(
            plan,
            model=model_id,
            fits=need <= budget.bytes,
            devices=[ram],
            settings=msgspec.structs.replace(plan.settings, n_threads=asked.n_threads or self.n_cores),
            notes=[correction.words()] if correction else [],
        )

    def check_books(self) -> None:
        """The ledger balances, and holds for each model what its state says."""
        for account in self.fleet.ledger.snapshot().values():
            assert account["free"] + account["reserved"] + account["used"] == account["total"]
            assert account["overdrawn"] == (account["free"] < 0)
        for status in self.supervisor.status():
            held = self.fleet.ledger.held_by(status.id, "cpu")
            if status.state in ("unloaded", "failed"):
                assert held == 0, f"{status.id} is {status.state} and holds {held}"
            engine = self.engines.get(status.id)
            if status.state == "ready" or (engine is not None and engine.held_bytes):
                assert held >= self.needs[self.fleet.model_of(status.id)], (
                    f"{status.id} is {status.state} and holds {held}"
                )

    async def close(self) -> None:
        await self.supervisor.shutdown()
        assert self.fleet.ledger.held("cpu") == self.fleet.ledger.held("threads") == 0


@pytest.fixture
def in_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds plan for themselves, and read no file."""
    monkeypatch.setattr("laya.gateway.corrections.key_of", lambda settings, path: ("engine", "1", path.name[:1]))
    monkeypatch.setattr("laya.gateway.loading.MEASURED_BACK_S", 0.2)
    monkeypatch.setattr("laya.engines.builds.version", lambda package: "1")  # else looked for at each load


def plans_of(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The fleet of this world plans with its table."""
    monkeypatch.setattr("laya.gateway.kind_llamacpp.plan_file", world.plan)
    return world
