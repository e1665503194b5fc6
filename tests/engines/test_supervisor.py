"""Every transition of a model, against engines whose every step a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from laya.engines.held_memory import MemoryReading
from laya.engines.log import EngineLog
from laya.engines.settings import EngineSettings
from laya.engines.supervisor import Supervisor
from laya.errors import BadModelFile, EngineFailed, InsufficientMemory, LayaError, ModelNotFound, ServerStopping
from laya.types import EngineAddress, ModelState

MakeSettings = Callable[..., EngineSettings]


class FakeEngine:
    """An engine that does nothing until a test says so."""

    def __init__(self, number: int, spawning: bool) -> None:
        self.number = number
        self.pid: int | None = None
        self.load_percent: int | None = None
        self.spawning = spawning
        self.gone = True  # what stop answers
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[EngineAddress] = loop.create_future()
        self.exited: asyncio.Future[str] = loop.create_future()
        self.stops = 0
        self.killed = False

    def become_ready(self) -> None:
        self.started.set_result(EngineAddress(host="h", port=self.number, api_key=None, cancels_whole=False))

    def exit(self, reason: str = "killed by signal 9") -> None:
        if not self.exited.done():
            self.exited.set_result(reason)

    async def start(self) -> EngineAddress:
        if self.spawning:
            self.pid = 1000 + self.number
        try:
            return await self.started
        except BaseException:
            self.exit("start ended")
            raise

    async def stop(self) -> bool:
        self.stops += 1
        if self.gone:
            self.exit("stopped")
        return self.gone

    async def wait_exit(self) -> str:
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        self.killed = True
        self.exit("killed")

    def measure(self) -> MemoryReading | None:
        return MemoryReading(peak_bytes=30, resident_bytes=20, anonymous_bytes=10)


class World:
    """A supervisor with fake engines, a clock, and a record of everything it told the gateway."""

    def __init__(self, settings: EngineSettings) -> None:
        self.now_s = 1000.0
        self.engines: list[FakeEngine] = []
        self.events: list[str] = []
        self.states: asyncio.Queue[tuple[str, ModelState, int | None]] = asyncio.Queue()
        self.refusal: LayaError | None = None
        self.spawning = True  # False: the start of an engine fails before a process is spent
        self.supervisor = Supervisor(None, make_engine=self._make, clock=lambda: self.now_s)
        self.supervisor.on_state(self._on_state)
        self._settings = settings

    def _make(self, _settings: EngineSettings, _log: EngineLog) -> FakeEngine:
        self.engines.append(FakeEngine(len(self.engines) + 1, self.spawning))
        return self.engines[-1]

    def _on_state(self, model_id: str, state: ModelState, address: EngineAddress | None) -> None:
        self.states.put_nowait((model_id, state, address.port if address else None))

    def add(self, model_id: str, drained: Callable[[], Awaitable[None]] | None = None) -> None:
        async def settings() -> EngineSettings:
            if self.refusal is not None:
                raise self.refusal
            self.events.append(f"reserve {model_id}")
            return self._settings

        def release() -> None:
            self.events.append(f"release {model_id}")

        self.supervisor.register(model_id, settings, release, drained=drained)

    async def until(self, model_id: str, state: ModelState) -> None:
        while (await self.states.get())[:2] != (model_id, state):
            pass

    async def engine(self, number: int) -> FakeEngine:
        """The n-th engine, once its start has begun."""
        while len(self.engines) < number:
            await asyncio.sleep(0)
        return self.engines[number - 1]

    async def ready(self, model_id: str = "a") -> FakeEngine:
        """Load it and return its engine."""
        loading = asyncio.create_task(self.supervisor.ensure_ready(model_id))
        engine = await self.engine(len(self.engines) + 1)
        engine.become_ready()
        await loading
        await self.until(model_id, "ready")
        return engine

    async def crash(self, model_id: str = "a") -> None:
        engine = await self.ready(model_id)
        engine.exit()
        await self.until(model_id, "failed")

    def state(self, model_id: str = "a") -> ModelState:
        return {status.id: status.state for status in self.supervisor.status()}[model_id]


Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture
def play(make_settings: MakeSettings) -> Callable[[Scenario], None]:
    """Run a scenario with models a and b, then shut down; no task may be left."""

    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            world = World(make_settings(Path("/model.gguf")))
            world.add("a")
            world.add("b")
            await scenario(world)
            for engine in world.engines:
                engine.gone = True
            await world.supervisor.shutdown()
            # Whatever was reserved has been released, and nothing twice.
            for model_id in "ab":
                assert world.events.count(f"reserve {model_id}") == world.events.count(f"release {model_id}")

        uvloop.run(asyncio.wait_for(whole(), 20))

    return run


def test_ensure_ready_is_single_flight(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        calls = [asyncio.create_task(world.supervisor.ensure_ready("a")) for _ in range(10)]
        (await world.engine(1)).become_ready()
        assert {address.port for address in await asyncio.gather(*calls)} == {1}
        assert len(world.engines) == 1
        assert world.events == ["reserve a"]
        address = world.supervisor.address("a")
        assert address is not None
        assert (await world.supervisor.ensure_ready("a")) is address

    play(scenario)


def test_waiter_that_leaves_does_not_end_the_load(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.supervisor.ensure_ready("a"))
        engine = await world.engine(1)
        second = asyncio.create_task(world.supervisor.ensure_ready("a"))
        first.cancel()
        await asyncio.wait({first})
        engine.become_ready()
        assert (await second).port == 1

    play(scenario)


def test_load_goes_on_when_every_waiter_left(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        only = asyncio.create_task(world.supervisor.ensure_ready("a"))
        engine = await world.engine(1)
        only.cancel()
        await asyncio.wait({only})
        engine.become_ready()
        await world.until("a", "ready")

    play(scenario)


def test_listeners_see_each_state_with_its_address(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        await world.ready()
        await world.supervisor.unload("a")
        assert world.supervisor.address("a") is None

    async def recorded(world: World) -> None:
        seen: list[tuple[ModelState, int | None]] = []
        world.supervisor.on_state(lambda _, state, address: seen.append((state, address.port if address else None)))
        await scenario(world)
        assert seen == [("loading", None), ("ready", 1), ("draining", None), ("unloaded", None)]

    play(recorded)


def test_listener_that_fails_harms_nobody(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        def bad(*_: Any) -> None:
            raise ValueError("listener")

        world.supervisor.on_state(bad)
        await world.ready()
        assert world.state() == "ready"

    play(scenario)


def test_one_load_at_a_time(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.supervisor.ensure_ready("a"))
        engine = await world.engine(1)
        second = asyncio.create_task(world.supervisor.ensure_ready("b"))
        await world.until("b", "loading")
        assert world.events == ["reserve a"]  # b is not even planned before a is measured
        engine.become_ready()
        await first
        (await world.engine(2)).become_ready()
        await second
        assert world.events == ["reserve a", "reserve b"]

    play(scenario)


def test_refusal_reaches_every_waiter_and_may_be_asked_again(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        world.refusal = InsufficientMemory("no room", need_bytes=2, available_bytes=1, limit="ram", suggestions=[])
        calls = [asyncio.create_task(world.supervisor.ensure_ready("a")) for _ in range(3)]
        assert await asyncio.gather(*calls, return_exceptions=True) == [world.refusal] * 3
        assert (world.state(), world.supervisor.status()[0].error) == ("unloaded", "no room")
        world.refusal = None
        await world.ready()
        assert world.supervisor.status()[0].error is None

    play(scenario)


def test_fault_in_the_settings_factory_is_an_error_not_an_exit(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        async def broken() -> EngineSettings:
            raise KeyError("bug")

        world.supervisor.register("a", broken, lambda: None)
        with pytest.raises(EngineFailed, match="KeyError"):
            await world.supervisor.ensure_ready("a")
        await world.ready("b")

    play(scenario)


def test_failed_start_backs_off(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        waits = []
        for number in range(1, 9):
            call = asyncio.create_task(world.supervisor.ensure_ready("a"))
            (await world.engine(number)).started.set_exception(EngineFailed("cannot"))
            with pytest.raises(EngineFailed, match="cannot"):
                await call
            assert world.state() == "failed"
            waits.append(world.supervisor.status()[0].extra["retry_in_s"])
            world.now_s += waits[-1]
        assert waits == [0, 1, 2, 4, 8, 16, 30, 30]
        assert world.supervisor.status()[0].restarts == 7

    play(scenario)


def test_start_that_costs_no_process_does_not_back_off(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        world.spawning = False
        for number in range(1, 4):
            call = asyncio.create_task(world.supervisor.ensure_ready("a"))
            (await world.engine(number)).started.set_exception(BadModelFile("missing"))
            with pytest.raises(BadModelFile):
                await call
        assert world.state() == "failed"

    play(scenario)


def test_crash_restarts_at_once_then_with_delay(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        await world.crash()
        assert world.events == ["reserve a", "release a"]
        assert world.supervisor.address("a") is None
        await world.crash()  # the first restart needs no wait
        with pytest.raises(EngineFailed, match=r"stopped by itself: killed by signal 9 \(next try in 1 s\)") as raised:
            await world.supervisor.ensure_ready("a")
        assert raised.value.retry_after_s == 1.0
        assert len(world.engines) == 2
        world.now_s += 1.0
        await world.ready()
        assert world.supervisor.status()[0].restarts == 2

    play(scenario)


def test_person_who_asks_does_not_wait_for_the_back_off(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        await world.crash()
        await world.crash()
        load = asyncio.create_task(world.supervisor.load("a"))
        (await world.engine(3)).become_ready()
        assert (await load).port == 3

    play(scenario)


def test_crash_after_a_stable_hour_restarts_at_once(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        await world.crash()
        for _ in range(3):
            engine = await world.ready()
            world.now_s += 3600
            engine.exit()
            await world.until("a", "failed")

    play(scenario)


def test_unload_waits_for_the_drain(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        idle = asyncio.Event()

        async def drained() -> None:
            await idle.wait()

        world.add("a", drained)
        engine = await world.ready()
        unload = asyncio.create_task(world.supervisor.unload("a", deadline_s=60))
        await world.until("a", "draining")
        assert engine.stops == 0
        idle.set()
        await unload
        assert engine.stops == 1

    play(scenario)


@pytest.mark.parametrize("deadline_s", [0.01, 0])
def test_unload_has_a_hard_deadline(play: Callable[[Scenario], None], deadline_s: float) -> None:
    async def scenario(world: World) -> None:
        world.add("a", asyncio.Event().wait)  # type: ignore[arg-type]
        engine = await world.ready()
        await world.supervisor.unload("a", deadline_s=deadline_s)
        assert engine.stops == 1

    play(scenario)


def test_second_unload_without_patience_ends_the_drain(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        world.add("a", asyncio.Event().wait)  # type: ignore[arg-type]
        await world.ready()
        patient = asyncio.create_task(world.supervisor.unload("a", deadline_s=3600))
        await world.until("a", "draining")
        await world.supervisor.unload("a", deadline_s=0)
        await patient

    play(scenario)


def test_request_during_the_drain_waits_and_loads_again(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        idle = asyncio.Event()

        async def drained() -> None:
            await idle.wait()

        world.add("a", drained)
        await world.ready()
        unload = asyncio.create_task(world.supervisor.unload("a"))
        await world.until("a", "draining")
        late = asyncio.create_task(world.supervisor.ensure_ready("a"))
        idle.set()
        await unload
        (await world.engine(2)).become_ready()
        assert (await late).port == 2

    play(scenario)


def test_unload_while_loading_ends_the_load(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        call = asyncio.create_task(world.supervisor.ensure_ready("a"))
        await world.engine(1)
        await world.supervisor.unload("a")
        with pytest.raises(EngineFailed, match="unloaded while it was loading"):
            await call
        assert world.events == ["reserve a", "release a"]
        assert world.state() == "unloaded"
        await world.ready()

    play(scenario)


def test_unload_of_a_queued_load_does_not_wait_for_the_other(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        first = asyncio.create_task(world.supervisor.ensure_ready("a"))
        engine = await world.engine(1)
        second = asyncio.create_task(world.supervisor.ensure_ready("b"))
        await world.until("b", "loading")
        await world.supervisor.unload("b")
        with pytest.raises(EngineFailed, match="unloaded"):
            await second
        assert world.events == ["reserve a"]
        engine.become_ready()
        await first

    play(scenario)


def test_unload_just_after_the_load_was_over_stops_the_engine(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        call = asyncio.create_task(world.supervisor.ensure_ready("a"))
        engine = await world.engine(1)
        engine.become_ready()
        unload = asyncio.create_task(world.supervisor.unload("a"))
        await unload
        await asyncio.wait({call})
        assert world.state() == "unloaded"
        assert engine.exited.done()

    play(scenario)


def test_unload_of_a_failed_model_forgets_the_failure(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        await world.crash()
        await world.crash()
        await world.supervisor.unload("a")
        assert (world.state(), world.supervisor.status()[0].error) == ("unloaded", None)
        await world.ready()

    play(scenario)


def test_engine_that_does_not_end_keeps_its_memory_reserved(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        engine = await world.ready()
        engine.gone = False
        with pytest.raises(EngineFailed, match="does not end"):
            await world.supervisor.unload("a", deadline_s=0)
        assert (world.state(), world.events) == ("draining", ["reserve a"])
        engine.exit("at last")
        await world.until("a", "unloaded")
        assert world.events == ["reserve a", "release a"]

    play(scenario)


def test_status_tells_what_ps_shows(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        engine = await world.ready()
        world.now_s += 5
        status = world.supervisor.status()[0]
        shown = (status.id, status.state, status.task, status.pid, status.since_s)
        assert shown == ("a", "ready", "chat", engine.pid, 5.0)
        assert (status.measured_bytes, status.anonymous_bytes) == (30, 10)
        assert [status.id for status in world.supervisor.status()] == ["a", "b"]

    play(scenario)


def test_unknown_model_names_the_nearest(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        world.add("smollm2")
        assert world.supervisor.address("smollm") is None
        with pytest.raises(ModelNotFound, match="Did you mean 'smollm2'"):
            await world.supervisor.ensure_ready("smollm")
        with pytest.raises(ModelNotFound):
            world.supervisor.logs("smollm")

    play(scenario)


def test_forgotten_model_is_gone(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        engine = await world.ready()
        await world.supervisor.forget("a")
        assert engine.stops == 1
        with pytest.raises(ModelNotFound):
            await world.supervisor.ensure_ready("a")

    play(scenario)


def test_shutdown_stops_all_and_refuses_what_comes_after(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        ready = await world.ready("a")
        loading = asyncio.create_task(world.supervisor.ensure_ready("b"))
        await world.engine(2)
        await world.supervisor.shutdown()
        assert ready.stops == 1
        with pytest.raises(ServerStopping, match="shutting down"):
            await loading
        assert world.state("b") == "unloaded"
        with pytest.raises(ServerStopping, match="shutting down"):
            await world.supervisor.ensure_ready("a")

    play(scenario)


def test_shutdown_kills_what_is_late(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        async def stop_that_waits() -> bool:
            await engine.wait_exit()
            return True

        engine = await world.ready()
        engine.stop = stop_that_waits  # type: ignore[method-assign]
        await world.supervisor.shutdown(deadline_s=0.01)
        assert engine.killed
        assert world.events == ["reserve a", "release a"]

    play(scenario)


def test_unload_that_comes_before_the_load_has_begun_ends_it(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        loading = asyncio.create_task(world.supervisor.ensure_ready("a"))
        unloading = asyncio.create_task(world.supervisor.unload("a"))
        await unloading
        with pytest.raises(EngineFailed, match="was unloaded while it was loading"):
            await loading
        assert world.state() == "unloaded" and not world.engines

    play(scenario)
