"""Several engines of one model: loaded together, planned apart, one name for users, none evicts another of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from laya.config import Config, ModelConfig
from laya.errors import InsufficientMemory
from laya.metrics import LayaCollector
from laya.routing import NO_ENDPOINT
from laya.types import GpuLayers

from .fleet_world import World, in_world, plans_of
from .front import chat, front, request, until
from .scripted_engine import hello_after

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_world")]
__all__ = ["in_world"]
MakeWorld = Callable[..., World]
NUMBERS = itertools.count()  # of sessions that were nowhere yet


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """`make_world({"a": 400}, replicas={"a": 2})`: the budget is 80 % of what is available."""

    def make(needs: dict[str, int], *, replicas: dict[str, int], total_bytes: int = 1000, **settings: Any) -> World:
        models = {name: ModelConfig(replicas=number, **settings) for name, number in replicas.items()}
        world = World(tmp_path, needs, total_bytes=total_bytes, config=Config(models=models))
        return plans_of(world, monkeypatch)

    return make


def chosen(world: World, model: str) -> set[str]:
    """The engines that requests of this model would go to now."""
    router, names = world.fleet.router, set()
    for _ in range(32):
        index = router.choose(model, session=f"session {next(NUMBERS)}")
        names.add("none" if index == NO_ENDPOINT else world.fleet.endpoints[index].name)
        router.settle(index, 0)
    return names


async def test_load_starts_every_replica_with_a_promise_of_its_own(make_world: MakeWorld) -> None:
    world = make_world({"m": 100}, replicas={"m": 3})
    await world.load("m")
    assert world.loaded() == {"m#1", "m#2", "m#3"}
    assert [world.fleet.ledger.held_by(f"m#{number}", "cpu") for number in (1, 2, 3)] == [100, 100, 100]
    (status,) = world.fleet.statuses()
    assert (status.id, status.state, status.measured_bytes) == ("m", "ready", 300)
    assert status.plan is not None and status.plan.need_bytes == 300
    assert [replica["name"] for replica in status.extra["replicas"]] == ["m#1", "m#2", "m#3"]
    assert chosen(world, "m") == {"m#1", "m#2", "m#3"}
    world.check_books()
    await world.fleet.unload_model(world.endpoint("m"))
    assert world.loaded() == set()
    assert world.fleet.ledger.held("cpu") == 0
    assert chosen(world, "m") == {"m#1"}
    await world.close()


async def test_each_replica_is_planned_in_its_share_of_what_is_free(make_world: MakeWorld) -> None:
    world = make_world({"m": 100}, replicas={"m": 2})
    await world.load("m")
    first, second = (world.fleet.plans[name].devices[0].budget_bytes for name in ("m#1", "m#2"))
    assert (first, second) == (400, 700)  # half of 800; then all that the first one left
    await world.close()


async def test_replicas_that_do_not_fit_stay_unloaded_with_the_reason(make_world: MakeWorld) -> None:
    world = make_world({"m": 500}, replicas={"m": 2})
    await world.load("m")
    assert world.loaded() == {"m#1"}
    (status,) = world.fleet.statuses()
    assert status.state == "ready"
    assert status.error is not None and status.error.startswith("m#2: ")
    assert "less what stays loaded: 'm#1'" in status.error
    assert chosen(world, "m") == {"m#1"}
    world.check_books()
    await world.close()


async def test_load_is_refused_where_not_even_one_fits(make_world: MakeWorld) -> None:
    world = make_world({"m": 900}, replicas={"m": 2})
    with pytest.raises(InsufficientMemory):
        await world.load("m")
    assert world.n_starts == 0
    await world.close()


async def test_replica_makes_other_models_leave_and_never_its_own(make_world: MakeWorld) -> None:
    world = make_world({"m": 300, "old": 400}, replicas={"m": 3})
    await world.load("old")
    await world.load("m")
    assert world.loaded() == {"m#1", "m#2"}
    await world.load("old")
    assert world.loaded() == {"m#2", "old"}, "the one that was unused longest left"
    assert chosen(world, "m") == {"m#2"}, "what runs serves"
    await world.close()


async def test_first_replica_serves_before_the_others_are_there(make_world: MakeWorld) -> None:
    world = make_world({"m": 100}, replicas={"m": 2})
    assert chosen(world, "m") == {"m#1"}, "the door"
    await world.fleet.ready(world.endpoint("m"))
    assert chosen(world, "m") == {"m#1"}
    await world.fleet.together.load_rest(world.endpoint("m"))
    assert chosen(world, "m") == {"m#1", "m#2"}
    await world.close()


async def test_unload_ends_the_loads_that_were_to_follow(make_world: MakeWorld) -> None:
    world = make_world({"m": 100}, replicas={"m": 3})
    await world.fleet.ready(world.endpoint("m"))
    following = asyncio.ensure_future(world.fleet.together.load_rest(world.endpoint("m")))
    await asyncio.sleep(0)
    await world.fleet.unload_model(world.endpoint("m"), "requested")
    await following
    assert world.loaded() == set()
    assert world.n_starts <= 2
    await world.close()


async def test_replica_that_died_comes_back_and_is_not_chosen_before(make_world: MakeWorld) -> None:
    world = make_world({"m": 100}, replicas={"m": 2})
    await world.load("m")
    world.engines["m#1"].exit("killed")
    while world.loaded() != {"m#2"}:
        await asyncio.sleep(0)
    (status,) = world.fleet.statuses()
    assert status.state == "degraded"
    assert status.error is not None and "m#1" in status.error
    assert chosen(world, "m") == {"m#2"}
    world.fleet.sweep(world.fleet.now_s())
    while world.loaded() != {"m#1", "m#2"}:
        await asyncio.sleep(0)
    assert chosen(world, "m") == {"m#1", "m#2"}
    assert world.fleet.statuses()[0].state == "ready"
    await world.close()


@pytest.mark.parametrize("number", [1, 2])
async def test_model_with_a_stuck_engine_is_degraded(make_world: MakeWorld, number: int) -> None:
    world = make_world({"m": 100}, replicas={"m": number})
    await world.load("m")
    world.endpoint("m").stuck = "The engine of 'm' is stuck: it has not answered for 5 s."
    (status,) = world.fleet.statuses()
    assert status.state == "degraded"
    assert status.error is not None and "has not answered for 5 s" in status.error
    await world.close()


async def test_ttl_is_the_models(make_world: MakeWorld) -> None:
    world = make_world({"m": 100}, replicas={"m": 2}, ttl=10.0)
    await world.load("m")
    for endpoint, last_used_s in zip(world.fleet.replicas(world.endpoint("m")), (0.0, 95.0), strict=True):
        endpoint.last_used_s = last_used_s
    world.fleet.sweep(100.0)
    await asyncio.sleep(0)
    assert world.loaded() == {"m#1", "m#2"}, "one of them was used lately"
    world.fleet.sweep(106.0)
    while world.loaded():
        await asyncio.sleep(0)
    assert world.fleet.stats.unloads == {("m", "idle"): 2}
    await world.close()


async def test_requests_are_spread_over_replicas_of_one_name(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with front(tmp_path, hello_after(release), max_num_seqs=1, model={"replicas": 2}) as gate:
        asked = [asyncio.ensure_future(gate.ask(chat())) for _ in range(4)]
        await until(lambda: all(len(engine.calls) == 1 for engine in gate.engines))
        await until(lambda: sum(len(endpoint.queue) for endpoint in gate.endpoints) == 2)
        release.set()
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
        assert {answer.json["model"] for answer in answers} == {"stub"}
        assert [body["model"] for engine in gate.engines for body in engine.bodies] == ["stub"] * 4
        assert await gate.settled() == {"served": 4}
        models = (await gate.ask(request(method="GET", path="/v1/models"))).json["data"]
        assert [(model["id"], model["loaded"]) for model in models] == [("stub", True)]


async def test_requests_for_an_unloaded_model_wait_at_one_door_and_are_served_by_all(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with front(tmp_path, hello_after(release), max_num_seqs=1, model={"replicas": 2}, loaded=False) as gate:
        asked = [asyncio.ensure_future(gate.ask(chat())) for _ in range(4)]
        await until(lambda: all(len(engine.calls) == 1 for engine in gate.engines))
        release.set()
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        assert await gate.settled() == {"served": 4}


@pytest.mark.parametrize("number", [1, 2])
async def test_model_whose_layers_fell_to_the_cpu_is_degraded(make_world: MakeWorld, number: int) -> None:
    world = make_world({"m": 100}, replicas={"m": number})
    world.gpu_layers = GpuLayers(planned=33, loaded=33, total=33)
    await world.load("m")
    assert world.fleet.statuses()[0].state == "ready"
    await world.fleet.unload_model(world.endpoint("m"), "requested")
    world.gpu_layers = GpuLayers(planned=33, loaded=0)
    await world.load("m")
    (status,) = world.fleet.statuses()
    assert (status.state, status.gpu_layers) == ("degraded", world.gpu_layers)
    assert status.error is not None and "None of the 33 layers planned for a GPU is on one" in status.error
    kinds = [event.kind for event in world.fleet.events.after() if event.level == "warning"]
    assert kinds == ["degraded"] * number
    registry = CollectorRegistry()
    registry.register(LayaCollector(world.fleet.stats, world.fleet.statuses, lambda: 0, dict))
    assert registry.get_sample_value("laya_model_state", {"model": "m", "state": "degraded"}) == 1
    assert registry.get_sample_value("laya_gpu_layers", {"model": "m", "where": "planned"}) == 33
    assert registry.get_sample_value("laya_gpu_layers", {"model": "m", "where": "gpu"}) == 0
    await world.close()
