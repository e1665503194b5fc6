"""A drained model takes nothing new, finishes what it has, and lets the others of its pool serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from laya.config.routing import RoutingConfig

from .fleet_world import World, WorldEngine, in_world, plans_of
from .front import CHAT, Front, chat, front, request, until
from .scripted_engine import hello_after

pytestmark = pytest.mark.anyio
__all__ = ["in_world"]


async def drain(gate: Front) -> Any:
    return (await gate.ask(request(path="/admin/models/stub/drain", body=b""))).json


async def test_drained_model_finishes_what_runs_and_waits_and_refuses_the_rest(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with front(tmp_path, hello_after(release), max_num_seqs=1) as gate:
        asked = [asyncio.create_task(gate.ask(chat())) for _ in range(2)]  # one runs, one waits
        await until(lambda: len(gate.endpoint.live) == 1 and gate.endpoint.queue)
        await drain(gate)
        refused = await gate.ask(chat())
        assert (refused.status, refused.error["code"]) == (503, "model_draining")
        assert int(refused.headers["retry-after"]) > 0
        assert gate.supervisor.unloaded == []
        release.set()
        assert [(await each).status for each in asked] == [200, 200]
        await until(lambda: gate.supervisor.unloaded == ["stub"])
        assert (await gate.ask(chat())).status == 503
        await gate.ask(request(path="/admin/models/stub/load", body=b""))
        assert (await gate.ask(chat())).status == 200
        assert await gate.settled() == {"served": 3, "refused": 2}


async def test_drain_is_undone_while_requests_still_run(tmp_path: Path) -> None:
    release = asyncio.Event()
    async with front(tmp_path, hello_after(release)) as gate:
        asked = asyncio.create_task(gate.ask(chat()))
        await until(lambda: gate.endpoint.live)
        await drain(gate)
        await drain(gate)  # the same again is nothing more
        gate.gateway.fleet.draining.undo(gate.endpoint)
        release.set()
        assert (await asked).status == 200
        assert (await gate.ask(chat())).status == 200
        assert gate.supervisor.unloaded == []


@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_every_replica_is_drained(tmp_path: Path, cancels_whole: bool) -> None:
    async with front(tmp_path, model={"replicas": 2}, cancels_whole=cancels_whole) as gate:
        await drain(gate)
        await until(lambda: sorted(gate.supervisor.unloaded) == ["stub#1", "stub#2"])
        for _ in range(3):
            gate.gateway.fleet.sweep(1e9)
            assert (await gate.ask(chat())).error["code"] == "model_draining"


async def test_requests_for_a_pool_go_to_members_that_are_not_drained(tmp_path: Path) -> None:
    pools = RoutingConfig(pools={"any": ["stub", "other"]})
    async with front(tmp_path, model={"replicas": 1}, routing=pools) as gate:
        answer = await gate.ask(request(CHAT | {"model": "any"}))
        assert answer.status == 200
        await drain(gate)
        refused = await gate.ask(request(CHAT | {"model": "any"}))
        assert (refused.status, refused.error["code"]) == (503, "model_draining")


async def test_load_that_waited_for_an_unload_is_drained_too(
    in_world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = asyncio.Event()

    async def stop(engine: WorldEngine) -> bool:
        await goes.wait()
        engine.exit("stopped")
        return True

    monkeypatch.setattr(WorldEngine, "stop", stop)
    world = plans_of(World(tmp_path, {"a": 100}, total_bytes=1000), monkeypatch)
    fleet, endpoint = world.fleet, world.endpoint("a")
    await world.load("a")
    unloading = asyncio.ensure_future(fleet.unload(endpoint))
    await until(lambda: world.supervisor.status()[0].state == "draining")
    loading = asyncio.ensure_future(world.supervisor.ensure_ready("a"))
    await until(lambda: world.supervisor.status()[0].extra["waiting"] == 1)
    fleet.draining.begin(endpoint)
    await asyncio.sleep(0)
    goes.set()
    await asyncio.gather(unloading, loading, return_exceptions=True)
    await until(lambda: not fleet.draining._working)
    assert endpoint.is_drained and world.loaded() == set()
    await world.load("a")  # opens it again
    assert not endpoint.is_drained and world.loaded() == {"a"}
    await world.supervisor.shutdown()
