"""Another program grows on a card: it is told, and idle models leave it the card, one by one; one that works stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laya.gateway.gpu_guard import LOOK_EVERY_S, GpuGuard
from laya.memory import GpuMeter
from laya.types import GIB, MIB

from .fleet_world import World, in_world, plans_of

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_world")]
__all__ = ["in_world"]

CARD = {"name": "NVIDIA GeForce RTX 4090", "total": 24564 * MIB}
DESKTOP = {"graphics": {"1644": 812 * MIB}}


class Table:
    """A card of which three models hold 6 GiB each, and the guard that looks at it."""

    def __init__(self, world: World, nvml: Any) -> None:
        self.world, self.nvml, self.now_s = world, nvml, 0.0
        self.names_ours = True  # NVML names no process of ours from within some containers
        fleet = world.fleet
        self.guard = GpuGuard(
            fleet.relief, world.supervisor, events=fleet.events, stats=fleet.stats, meter=GpuMeter(nvml.library)
        )

    async def look(self, *, other_bytes: int) -> None:
        """The next look, while the other program holds so much."""
        own = {str(engine.pid): 6 * GIB for engine in self.world.engines.values() if not engine.exited.done()}
        free = 24564 * MIB - 812 * MIB - sum(own.values()) - other_bytes
        named = own if self.names_ours else {}
        self.nvml.play(CARD | DESKTOP | {"free": max(free, 0), "compute": named | {"9001": other_bytes}})
        self.now_s += LOOK_EVERY_S
        await self.guard.look(self.now_s)
        await asyncio.sleep(0)


@pytest.fixture
async def make_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: Any) -> Callable[[], Any]:
    """`await make_table()`: every model is loaded and used in the order of its name; `busy` has a request."""
    monkeypatch.setattr("laya.gateway.gpu_guard.family", lambda pid: [pid])

    async def make() -> Table:
        world = plans_of(World(tmp_path, {"busy": 100, "first": 100, "last": 100}, total_bytes=1000), monkeypatch)
        for at_s, model_id in enumerate(("busy", "first", "last")):
            await world.load(model_id)
            world.endpoint(model_id).last_used_s = at_s
        assert world.endpoint("busy").reserve_express(1)
        return Table(world, nvml)

    return make


async def test_program_that_grows_gets_the_card_of_idle_models_and_not_of_a_busy_one(make_table: Any) -> None:
    table = await make_table()
    world = table.world
    await table.look(other_bytes=GIB)
    assert world.loaded() == {"busy", "first", "last"}
    assert world.events() == []
    await table.look(other_bytes=5 * GIB)
    assert world.loaded() == {"busy", "last"}, "the longest unused one"
    taken, unloaded = world.events()
    assert (taken.kind, taken.figures["others_bytes"]) == ("gpu_taken", 5 * GIB + 812 * MIB)
    assert (unloaded.kind, unloaded.model) == ("unload_idle", "first")
    assert "'first' was idle and is unloaded: 200 MiB of GPU 0 (NVIDIA GeForce RTX 4090) are left" in unloaded.text
    await table.look(other_bytes=5 * GIB)
    assert world.loaded() == {"busy", "last"}, "enough is free again"
    for _ in range(3):
        await table.look(other_bytes=17 * GIB)
    assert world.loaded() == {"busy"}
    assert world.fleet.stats.unloads == {("first", "pressure"): 1, ("last", "pressure"): 1}
    assert world.fleet.stats.guard_steps == {"unload_idle": 2}
    own_bytes = dict(world.fleet.stats.gpus)["0"]["own"]
    assert own_bytes == 6 * GIB
    await world.close()


async def test_card_that_only_our_own_models_filled_is_left_as_it_is(make_table: Any) -> None:
    table = await make_table()
    await table.look(other_bytes=0)
    table.nvml.play(CARD | {"free": 100 * MIB, "compute": {"1": 23 * GIB}, "graphics": {}})
    await table.guard.look(1000.0)
    assert table.world.loaded() == {"busy", "first", "last"}
    await table.world.close()


async def test_models_that_hold_nothing_of_the_card_stay(make_table: Any) -> None:
    table = await make_table()
    world = table.world
    table.names_ours = False
    await table.look(other_bytes=GIB)
    await table.look(other_bytes=17 * GIB)
    assert world.loaded() == {"busy", "first", "last"}
    world.fleet.ledger.reserve("last", "gpu0", 6 * GIB, overdraw=True)
    await table.look(other_bytes=17 * GIB)
    assert world.loaded() == {"busy", "first"}, "its plan has some"
    await world.close()
