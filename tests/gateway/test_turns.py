"""Two models that do not fit together: who is used stays for a turn, then gives way, and comes back after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.gateway.endpoint import LINGER_S, TURN_S, Endpoint
from laya.gateway.turns import turn_s

from .fleet_world import World, in_world, plans_of

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_world")]
__all__ = ["in_world"]
LONG_S = 0.005  # a request


class Request:
    """Enough of an exchange to wait, to be let in and to end."""

    outcome: str | None = None
    key_name = None
    sent_s = 0.0
    admission = slot = None
    error: Exception | None = None

    def __init__(self, ended: Callable[[Request], None] = lambda request: None) -> None:
        self.arrived_s = self.read_s = time.monotonic()
        self.deadline_s = self.arrived_s + 360
        self.done = asyncio.Event()
        self._ended = ended

    def let_in(self, endpoint: Any) -> None:
        self.sent_s = time.monotonic()
        endpoint.live.add(self)
        endpoint.on_busy(endpoint)
        asyncio.get_running_loop().call_later(LONG_S, self._serve, endpoint)

    def _serve(self, endpoint: Any) -> None:
        self.outcome = "served"
        endpoint.release(self)
        self.done.set()
        self._ended(self)

    def fail(self, error: Exception) -> None:
        self.outcome, self.error = "failed", error
        self.done.set()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Models of which any two do not fit together; whoever waits is let in as soon as an engine is there."""
    monkeypatch.setattr("laya.gateway.turns.TURN_S", 0.0)
    monkeypatch.setattr("laya.gateway.room.LOOK_AGAIN_S", 0.02)
    made = plans_of(World(tmp_path, {"a": 500, "b": 500, "c": 500}, total_bytes=1000), monkeypatch)

    def pump(endpoint: Any) -> None:
        while endpoint.queue and endpoint.pool is not None and endpoint.held_back is None:
            endpoint.queue.take().let_in(endpoint)

    made.fleet.pump = pump
    for name in made.needs:
        made.endpoint(name).mean_load_s = 0.0  # loads take no time here
    return made


def ask(world: World, name: str, ended: Callable[[Request], None] = lambda request: None) -> Request:
    request, endpoint = Request(ended), world.endpoint(name)
    endpoint.queue.add(request, "default")  # type: ignore[arg-type]
    if endpoint.pool is None:
        world.fleet.wake(endpoint)
    else:
        world.fleet.pump(endpoint)
    return request


class Hammer:
    """Clients that never leave a model alone: as one request ends, the next one is there already."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self.n_served = 0
        self.is_over = False
        self.last: list[Request] = []
        for _ in range(3):
            self._ask()

    def _ask(self) -> None:
        self.last = [*(each for each in self.last if each.outcome is None), ask(self._world, self._name, self._again)]

    def _again(self, request: Request) -> None:
        self.n_served += 1
        if not self.is_over:
            self._ask()

    def has_served(self, n_requests: int) -> bool:
        return self.n_served >= n_requests

    async def end(self) -> None:
        self.is_over = True
        for each in self.last:
            await asyncio.wait_for(each.done.wait(), 10)
            assert each.error is None


async def test_model_that_is_never_idle_gives_way_and_comes_back(world: World) -> None:
    hammer = Hammer(world, "a")
    await until(lambda: hammer.n_served > 10)
    request = ask(world, "b")
    await asyncio.wait_for(request.done.wait(), 10)
    assert request.error is None
    gone = world.events()
    assert [(event.kind, event.model) for event in gone][:2] == [("gives_way", "a"), ("evicted", "a")]
    assert gone[0].text == "'a' finishes what runs and gives its memory to 'b'"
    n_before = hammer.n_served
    await until(lambda: hammer.n_served > n_before + 10)  # nobody holds it back any more
    await hammer.end()
    assert world.peak_bytes == 500
    world.check_books()
    await world.close()


async def test_three_models_that_are_never_idle_all_have_their_turns(world: World) -> None:
    hammers = [Hammer(world, name) for name in "abc"]
    for _ in range(3):
        wanted = [hammer.n_served + 1 for hammer in hammers]
        await until(lambda wanted=wanted: all(map(Hammer.has_served, hammers, wanted)))  # type: ignore[misc]
    for hammer in hammers:
        await hammer.end()
    assert world.peak_bytes == 500
    await world.close()


async def test_nobody_is_held_back_any_more_for_who_has_left(world: World) -> None:
    endpoint: Any = world.endpoint("a")
    await world.load("a")
    running = Request()
    endpoint.live.add(running)
    request = ask(world, "b")
    await until(lambda: endpoint.yields_to == "b")
    assert endpoint.held_back.startswith("its memory is for 'b' now, which has waited 0 s for it")
    world.endpoint("b").queue.discard(request)  # type: ignore[arg-type]
    await until(lambda: endpoint.yields_to is None)
    assert endpoint.held_back is None
    assert world.loaded() == {"a"}
    await world.close()


async def test_pinned_model_gives_way_to_nobody(world: World) -> None:
    endpoint: Any = world.endpoint("a")
    endpoint.settings = msgspec.structs.replace(endpoint.settings, pinned=True)
    await world.load("a")
    endpoint.live.add(Request())
    request = ask(world, "b")
    await asyncio.wait_for(request.done.wait(), 10)
    assert request.error is not None and "less what is pinned: 'a'" in str(request.error)
    assert endpoint.yields_to is None
    await world.close()


async def test_model_whose_request_is_being_counted_does_not_leave(world: World) -> None:
    endpoint = world.endpoint("a")
    await world.load("a")
    endpoint.n_counting = 1  # neither waiting nor let in
    assert not endpoint.may_leave and endpoint.is_busy
    assert world.fleet.leaving_order(None) == []
    endpoint.n_counting = 0
    assert world.fleet.leaving_order(None) == [endpoint]
    await world.close()


async def test_wakes_of_one_model_are_one_load(world: World) -> None:
    requests = [ask(world, "a") for _ in range(10)]
    for request in requests:
        await asyncio.wait_for(request.done.wait(), 10)
    assert world.n_starts == 1
    await world.close()


async def test_load_goes_on_when_who_caused_it_leaves_and_others_wait(world: World) -> None:
    first, second = ask(world, "a"), ask(world, "a")
    await asyncio.sleep(0)
    world.endpoint("a").queue.discard(first)  # type: ignore[arg-type]
    await asyncio.wait_for(second.done.wait(), 10)
    assert (second.error, world.n_starts) == (None, 1)
    await world.close()


def an_endpoint(world: World, *, opened_s: float, used_s: float) -> Endpoint:
    endpoint = world.endpoint("a")
    endpoint.opened_s, endpoint.last_used_s = opened_s, used_s
    return endpoint


async def test_who_was_just_used_lingers_but_only_within_its_turn(world: World) -> None:
    assert an_endpoint(world, opened_s=100, used_s=105).lingers(105 + LINGER_S / 2)
    assert not an_endpoint(world, opened_s=100, used_s=105).lingers(105 + 2 * LINGER_S)
    assert not an_endpoint(world, opened_s=100, used_s=100 + TURN_S).lingers(100 + TURN_S + LINGER_S / 2)
    assert not an_endpoint(world, opened_s=100, used_s=100).lingers(100.1)  # never used since it came


async def test_under_pressure_nobody_lingers(world: World) -> None:
    await world.load("a")
    endpoint = world.endpoint("a")
    endpoint.last_used_s = time.monotonic() + 0.01
    assert world.fleet.leaving_order(None) == []
    assert world.fleet.leaving_order(None, at_once=True) == [endpoint]
    assert await world.fleet.relief.unload_idle() == ["a"]
    await world.close()


async def test_turn_is_longer_where_loads_are_and_at_most_half_of_what_requests_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laya.gateway.turns.TURN_S", TURN_S)
    holder, wanted = world.endpoint("a"), world.endpoint("b")
    assert turn_s(holder, wanted) == TURN_S
    holder.mean_load_s = 20.0
    assert turn_s(holder, wanted) == 20.0
    holder.mean_load_s = 90.0
    assert turn_s(holder, wanted) == wanted.settings.queue_timeout_s / 2


async def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        await asyncio.sleep(0.001)
