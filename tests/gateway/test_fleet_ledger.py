"""The fleet and its ledger: whatever is loaded, used, killed and evicted, the books balance and the budget holds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.config import Config
from laya.errors import EngineFailed, EngineOutOfMemory, InsufficientMemory, LayaError, MemoryBusy, MemoryPressure
from laya.gateway.endpoint import Endpoint

from .fleet_world import World, in_world, plans_of

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_world")]
__all__ = ["in_world"]
MakeWorld = Callable[..., World]
N_SCHEDULES = 500


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """`make_world({"a": 400}, total_bytes=1000)`: the budget is 80 % of what is available."""

    def make(needs: dict[str, int], *, total_bytes: int = 1000, **more: Any) -> World:
        return plans_of(World(tmp_path, needs, total_bytes=total_bytes, **more), monkeypatch)

    return make


class Request:
    """Enough of an exchange for an endpoint to be busy, or to have somebody in its queue."""

    def __init__(self) -> None:
        self.outcome: str | None = None
        self.arrived_s = self.read_s = time.monotonic()
        self.key_name = None
        self.deadline_s = self.arrived_s + 360
        self.error: LayaError | None = None

    def fail(self, error: LayaError) -> None:
        self.outcome, self.error = "failed", error


def never_waits(world: World) -> World:
    """Whoever asks for a load is told at once."""
    for name in world.needs:
        endpoint = world.endpoint(name)
        endpoint.settings = msgspec.structs.replace(endpoint.settings, queue_timeout_s=0)
    return world


def begin(world: World, name: str) -> Request:
    request, endpoint = Request(), world.endpoint(name)
    endpoint.live.add(request)  # type: ignore[arg-type]
    endpoint.on_busy(endpoint)
    return request


def end(world: World, name: str) -> None:
    endpoint = world.endpoint(name)
    endpoint.live.clear()
    endpoint.on_busy(endpoint)


def ask(world: World, name: str) -> Request:
    """A request that waits for this model."""
    request, endpoint = Request(), world.endpoint(name)
    endpoint.queue.add(request, "default")  # type: ignore[arg-type]
    world.fleet.wake(endpoint)
    return request


async def until_waits(world: World, name: str) -> None:
    """The load was tried, and waits for others now."""
    while world.endpoint(name).no_room is None or not world.fleet.room._waiting:
        await asyncio.sleep(0)


async def test_load_storm_of_one_model_is_one_load(make_world: MakeWorld) -> None:
    world = make_world({"a": 400})
    addresses = await asyncio.gather(*(world.load("a") for _ in range(50)))
    assert world.n_starts == 1
    assert {address.port for address in addresses} == {1}
    assert world.fleet.ledger.held_by("a", "cpu") == 400
    await world.close()


async def test_twenty_parallel_loads_never_pass_the_budget(make_world: MakeWorld) -> None:
    world = make_world({f"m{number}": 100 + 10 * number for number in range(20)})
    results = await asyncio.gather(*(world.load(name) for name in world.needs), return_exceptions=True)
    assert [result for result in results if isinstance(result, BaseException)] == []  # each came to be, in turn
    assert world.n_starts == 20
    assert world.peak_bytes <= 800
    world.check_books()
    await world.close()


async def test_twenty_parallel_loads_of_busy_models_stop_at_the_budget(make_world: MakeWorld) -> None:
    world = never_waits(make_world({f"m{number}": 150 for number in range(20)}))
    world.fleet.pump = lambda endpoint: endpoint.live.add(Request())  # type: ignore[arg-type]
    results = await asyncio.gather(*(world.load(name) for name in world.needs), return_exceptions=True)
    refused = [result for result in results if isinstance(result, MemoryBusy)]
    assert (len(world.loaded()), len(refused), world.peak_bytes) == (5, 15, 750)
    assert refused[0].details["available_bytes"] == 50
    assert refused[0].details["held_bytes"] == dict.fromkeys(world.loaded(), 150)
    world.check_books()
    await world.close()


async def test_request_for_a_model_that_fits_once_another_is_done_waits_for_it(make_world: MakeWorld) -> None:
    world = make_world({"auto": 562, "a": 220, "c": 100}, total_bytes=963)
    await world.load("auto")
    begin(world, "auto")
    request = ask(world, "a")
    await until_waits(world, "a")
    await world.load("c")  # what fits meanwhile does not stand behind it
    await world.fleet.unload(world.endpoint("c"))
    assert (request.error, world.loaded()) == (None, {"auto"})
    end(world, "auto")
    await until_learned(world)
    assert (request.error, world.loaded()) == (None, {"a"})
    assert world.endpoint("a").no_room is None
    evicted = world.events()[-1]
    assert (evicted.kind, evicted.model, evicted.figures) == ("evicted", "auto", {"held_bytes": 562})
    assert evicted.text == "'auto' was idle and is unloaded to make room for 'a'"
    world.check_books()
    await world.close()


async def test_who_waits_too_long_for_memory_is_told_who_holds_it(make_world: MakeWorld) -> None:
    world = make_world({"auto": 562 << 20, "a": 220 << 20}, total_bytes=963 << 20)
    await world.load("auto")
    begin(world, "auto")
    request = ask(world, "a")
    await until_waits(world, "a")
    world.endpoint("a").expire(time.monotonic() + 59)
    assert request.outcome is None
    world.endpoint("a").expire(time.monotonic() + 61)  # queue_timeout_s; no load has begun that could take longer
    assert isinstance(request.error, MemoryBusy)
    assert request.error.http_status == 503
    assert "retry-after" in request.error.headers()
    assert "x-should-retry" not in request.error.headers()
    assert request.error.message.startswith("'a' needs 220 MiB; 208 MiB of 770 MiB (memory available) can be had now. ")
    assert "'auto' (562 MiB)" in request.error.message
    end(world, "auto")
    await until_learned(world)
    assert world.loaded() == {"auto"}  # nobody wants the other one any more
    await world.close()


async def test_requests_for_more_models_than_fit_are_answered_in_turn(make_world: MakeWorld) -> None:
    world = make_world({f"m{number}": 300 for number in range(5)})
    loop = asyncio.get_running_loop()
    served: list[Request] = []

    def pump(endpoint: Endpoint) -> None:
        while endpoint.queue and endpoint.pool is not None:
            request: Any = endpoint.queue.take()
            begin(world, endpoint.model_id)
            served.append(request)
            loop.call_later(0.01, end, world, endpoint.model_id)

    world.fleet.pump = pump
    asked = [ask(world, f"m{number % 5}") for number in range(20)]
    await until_learned(world)
    assert [request.error for request in asked if request.error] == []
    assert len(served) == 20
    assert world.peak_bytes <= 800
    world.check_books()
    await world.close()


async def test_what_a_pinned_model_holds_is_not_waited_for(make_world: MakeWorld) -> None:
    world = make_world({"p": 500, "a": 400})
    pinned = world.endpoint("p")
    pinned.settings = msgspec.structs.replace(pinned.settings, pinned=True)
    await world.load("p")
    with pytest.raises(InsufficientMemory, match=r"memory available, less what is pinned: 'p' \(") as caught:
        await world.load("a")
    assert caught.value.details["available_bytes"] == 300
    await world.close()


async def test_anyway_makes_nobody_leave_for_what_does_not_fit_even_then(make_world: MakeWorld) -> None:
    world = make_world({"big": 1600 << 20, "a": 300 << 20, "b": 300 << 20}, total_bytes=1000 << 20)
    await world.load("a")
    await world.load("b")
    with pytest.raises(EngineFailed):
        await world.load("big", anyway=True)
    assert world.engines["big"].ceiling_bytes == 200 << 20
    assert world.loaded() == {"a", "b"}
    assert world.events() == []
    world.check_books()
    await world.close()


async def test_anyway_does_not_start_what_fits_once_others_are_done(make_world: MakeWorld) -> None:
    world = never_waits(make_world({"a": 500, "b": 500}))
    await world.load("a")
    begin(world, "a")
    with pytest.raises(MemoryBusy):
        await world.load("b", anyway=True)
    end(world, "a")
    await world.load("b")
    assert world.loaded() == {"b"}
    await world.close()


async def test_the_fewest_longest_unused_models_leave_and_only_where_that_helps(make_world: MakeWorld) -> None:
    world = make_world({"a": 200, "b": 200, "c": 200, "d": 350, "e": 900})
    for number, name in enumerate("abc"):
        await world.load(name)
        world.endpoint(name).last_used_s = number
    with pytest.raises(InsufficientMemory, match="'e' needs"):
        await world.load("e")
    assert world.loaded() == {"a", "b", "c"}  # nobody left for what does not fit anyway
    await world.load("d")
    assert world.loaded() == {"b", "c", "d"}
    world.endpoint("c").live.add(Request())  # type: ignore[arg-type]
    with pytest.raises(InsufficientMemory) as caught:
        await world.load("e")
    assert caught.value.details["available_bytes"] == 800  # it would not fit alone
    assert world.fleet.stats.unloads == {("a", "evicted"): 1}
    world.endpoint("c").live.clear()
    await world.close()


async def test_next_plan_waits_until_the_memory_of_the_last_engine_is_measured_back(make_world: MakeWorld) -> None:
    """Under a limit of 1.3 times the model: load, use, unload, load again; and another in its place."""
    world = make_world({"a": 800, "b": 800}, total_bytes=1040)
    world.lag_s = 0.05
    for name in ("a", "b", "a"):
        await world.load(name)
        assert world.loaded() == {name}
    assert world.peak_bytes <= 832
    world.lag_s = 0.0
    await world.close()


async def test_engine_over_its_plan_makes_the_next_plan_of_its_kind_larger(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    world = make_world({"la": 400 << 20, "lb": 200 << 20, "x": 200 << 20}, total_bytes=4000 << 20)
    world.truth["la"] = 1.05
    await world.load("la")
    world.fleet.loading.post_measured()
    assert world.fleet.ledger.used("cpu") == 420 << 20
    await world.fleet.unload(world.endpoint("la"))
    await until_learned(world)
    for name, share in (("la", 0.05), ("lb", 0.05), ("x", 0.0)):  # l* are of one architecture
        await world.load(name)
        plan = world.fleet.plans[name]
        assert plan.need_bytes == int(world.needs[name] * (1 + share))
        assert ("correction" in plan.devices[0].terms) == (share > 0)
        assert any("up to 5%" in note for note in plan.notes) == (share > 0)
    await world.close()
    again = World(tmp_path, world.needs, total_bytes=4000 << 20)
    correction = again.fleet.loading.corrections.of(world.endpoint("la").settings, Path("la"))
    assert correction.share == pytest.approx(0.05)  # on disk


async def until_learned(world: World) -> None:
    while world.fleet._tasks:
        await asyncio.gather(*world.fleet._tasks, return_exceptions=True)


async def test_engine_stopped_at_its_ceiling_gets_more_once_and_is_then_refused(make_world: MakeWorld) -> None:
    world = make_world({"liar": 300 << 20}, total_bytes=1000 << 20)
    world.truth["liar"] = 10.0
    needs = []
    for _ in range(2):
        with pytest.raises(EngineFailed):
            await world.fleet.ready(world.endpoint("liar"))
        world.check_books()
        await until_learned(world)
        world.now_s += 1000
        needs.append(world.fleet.plans["liar"].need_bytes)
    ceiling = world.engines["liar"].ceiling_bytes
    assert needs[0] == 300 << 20 and ceiling is not None
    assert needs[1] == pytest.approx((362 + 75) << 20, abs=2)  # what it held, and a quarter of the plan more
    with pytest.raises(EngineOutOfMemory, match="was stopped at its memory limit"):
        await world.fleet.ready(world.endpoint("liar"))
    assert world.n_starts == 2
    world.truth["liar"] = 1.0
    await world.load("liar")  # a person asks
    await world.close()


async def test_anyway_loads_what_was_refused_under_the_ceiling_and_overdraws(make_world: MakeWorld) -> None:
    world = never_waits(make_world({"big": 1200 << 20, "small": 100 << 20}, total_bytes=1000 << 20))
    world.truth["big"] = 0.5
    with pytest.raises(InsufficientMemory):
        await world.load("big")
    await world.load("big", anyway=True)
    assert world.engines["big"].ceiling_bytes == 800 << 20
    assert world.fleet.ledger.snapshot()["cpu"]["overdrawn"]
    world.endpoint("big").live.add(Request())  # type: ignore[arg-type]
    with pytest.raises(MemoryBusy, match="'big'"):
        await world.load("small")
    world.endpoint("big").live.clear()
    await world.close()


async def test_what_died_anyway_is_not_tried_again_unasked(make_world: MakeWorld) -> None:
    config = Config()
    config = msgspec.structs.replace(config, memory=msgspec.structs.replace(config.memory, anyway=True))
    world = make_world({"big": 1200 << 20}, total_bytes=1000 << 20, config=config)
    with pytest.raises(EngineFailed):
        await world.load("big")
    world.now_s += 1000
    with pytest.raises(EngineOutOfMemory, match=f"{800 << 20} bytes"):
        await world.fleet.ready(world.endpoint("big"))
    assert world.n_starts == 1
    world.check_books()
    await world.close()


async def test_held_back_nothing_is_loaded_and_requests_wait(make_world: MakeWorld) -> None:
    world = make_world({"a": 400, "b": 100})
    await world.load("a")
    pumped: list[str] = []
    world.fleet.pump = lambda endpoint: pumped.append(endpoint.model_id)
    world.fleet.relief.set_admitting(False, "3.0 MiB of 1.0 GiB left")
    with pytest.raises(MemoryPressure, match=r"'b' is not loaded now: 3\.0 MiB of 1\.0 GiB left"):
        await world.load("b")
    assert world.endpoint("a").held_back == "3.0 MiB of 1.0 GiB left"
    assert not world.endpoint("a").try_reserve(Request())  # type: ignore[arg-type]
    world.fleet.relief.set_admitting(True)
    assert pumped == ["a", "b"]
    await world.load("b")
    await world.close()


async def test_idle_models_are_given_back_one_by_one_and_pinned_ones_stay(make_world: MakeWorld) -> None:
    world = make_world({"a": 100, "b": 100, "c": 100, "d": 100})
    for number, name in enumerate("abcd"):
        await world.load(name)
        world.endpoint(name).last_used_s = -number
    pinned = world.endpoint("d")
    pinned.settings = msgspec.structs.replace(pinned.settings, pinned=True)
    world.endpoint("c").live.add(Request())  # type: ignore[arg-type]
    given = [await world.fleet.relief.unload_idle() for _ in range(3)]
    assert given == [["b"], ["a"], []]
    assert world.loaded() == {"c", "d"}
    assert await world.fleet.relief.drop_caches() >= 0
    world.endpoint("c").live.clear()
    await world.close()


async def test_youngest_engine_is_stopped_whatever_it_does(make_world: MakeWorld) -> None:
    world = make_world({"a": 100, "b": 100})
    failed: list[LayaError] = []

    class Live:
        outcome = None

        def fail(self, error: LayaError) -> None:
            failed.append(error)
            world.endpoint("b").live.discard(self)

    await world.load("a")
    world.now_s += 10
    await world.load("b")
    world.endpoint("b").live.add(Live())  # type: ignore[arg-type]
    assert await world.fleet.relief.stop_youngest("1.0 MiB left") == "b"
    assert world.loaded() == {"a"}
    assert [error.message for error in failed] == [
        "The engine of 'b' was stopped to keep this machine alive: 1.0 MiB left."
    ]
    assert await world.fleet.relief.stop_youngest("1.0 MiB left") == "a"
    assert await world.fleet.relief.stop_youngest("1.0 MiB left") is None
    await world.close()


async def test_threads_of_busy_engines_never_outnumber_the_cores(make_world: MakeWorld) -> None:
    world = make_world({"a": 100, "b": 100, "c": 100})
    ledger, request = world.fleet.ledger, Request()

    def threads() -> dict[str, int]:
        owners = ledger.snapshot()["threads"]["owners"]
        return {owner: holding["promised"] for owner, holding in owners.items()}

    def begin(name: str) -> None:
        world.endpoint(name).live.add(request)  # type: ignore[arg-type]
        world.endpoint(name).on_busy(world.endpoint(name))

    def end(name: str) -> None:
        world.endpoint(name).live.clear()
        world.endpoint(name).on_busy(world.endpoint(name))

    await world.load("a")
    assert threads() == {"a": 2}
    await world.load("b")
    begin("a")
    assert threads() == {"a": 2}
    begin("b")
    assert threads() == {"a": 1, "b": 1}
    end("a")
    assert threads() == {"b": 2}
    end("b")
    assert threads() == {}
    await world.load("c")
    for name in "abc":
        begin(name)
    assert ledger.free("threads") == -1  # one thread each, which waits for no other at a barrier
    for name in "abc":
        end(name)
    await world.close()


async def play(world: World, rng: random.Random) -> None:
    """One schedule: loads, unloads, kills, requests and neighbours, some of them at once."""
    going: list[asyncio.Task[Any]] = []
    for _ in range(rng.randint(4, 14)):
        name = rng.choice(list(world.needs))
        endpoint = world.endpoint(name)
        action = rng.choice(("load", "load", "load", "unload", "kill", "begin", "end", "others", "measure"))
        if action == "load":
            going.append(asyncio.create_task(world.load(name, anyway=rng.random() < 0.05)))
        elif action == "unload":
            going.append(asyncio.create_task(world.fleet.unload(endpoint, deadline_s=0.0)))
        elif action == "kill" and name in world.engines:
            world.engines[name].kill()
        elif action == "begin" and endpoint.pool is not None:
            endpoint.live.add(Request())  # type: ignore[arg-type]
            endpoint.on_busy(endpoint)
        elif action == "end":
            endpoint.live.clear()
            endpoint.on_busy(endpoint)
        elif action == "others":
            world.others_bytes = rng.randrange(0, 400)
        else:
            world.fleet.loading.post_measured()
        world.truth[name] = rng.choice((0.5, 0.95, 1.0, 1.0, 1.04))
        world.now_s += rng.choice((0.0, 100.0))
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        world.check_books()
    for endpoint in world.fleet.endpoints.values():
        endpoint.live.clear()
        endpoint.on_busy(endpoint)
    results = await asyncio.gather(*going, return_exceptions=True)
    assert all(isinstance(result, LayaError) for result in results if isinstance(result, BaseException)), results
    world.check_books()


async def test_ledger_balances_after_each_of_many_schedules(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laya.gateway.loading.MEASURED_BACK_S", 0.0)
    for seed in range(N_SCHEDULES):
        world = make_world({"a": 150, "b": 250, "c": 350, "d": 450})
        await play(world, random.Random(seed))
        for name in world.needs:
            await world.fleet.unload(world.endpoint(name), deadline_s=0.0)
        await until_learned(world)
        ledger = world.fleet.ledger
        assert (ledger.held("cpu"), ledger.held("threads")) == (0, 0), f"seed {seed}"
        assert ledger.free("cpu") == ledger.total("cpu")
        await world.close()
