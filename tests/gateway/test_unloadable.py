"""A model whose load fails: who waits for it goes on, later ones pass it over, and who names it hears why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from laya.bench.stub_gateway import stub_plan
from laya.config.routing import RoutingConfig
from laya.errors import BadModelFile
from laya.gateway.unloadable import PASSED_OVER_S
from laya.routing.rules import Rules
from laya.types import EngineAddress, ModelFile

from .front import CHAT, Front, front, request
from .scripted_engine import hello
from .test_explain_live import explain

pytestmark = pytest.mark.anyio
ROUTING = msgspec.convert(
    {
        "pools": {"either": ["broken", "stub"]},
        "rules": [
            {"model": "auto", "headers": {"x-team": "broken"}, "to": "broken", "fallbacks": ["stub"]},
            {"model": "auto", "to": "broken"},
        ],
    },
    RoutingConfig,
)


@asynccontextmanager
async def broken_front(home: Path) -> AsyncIterator[tuple[Front, list[str]]]:
    """Beside 'stub' a model 'broken'; and the loads of it that were tried."""
    async with front(home, hello, routing=ROUTING) as gate:
        fleet, loads, ready = gate.gateway.fleet, [], gate.supervisor.ensure_ready
        file = ModelFile(id="broken", path=home, format="gguf", file_bytes=0, origin="config")
        broken = fleet.register(file, fleet.config.for_model("broken"))
        fleet.plans[broken.name] = stub_plan(4)

        async def ensure_ready(name: str) -> EngineAddress:
            if name != "broken":
                return await ready(name)
            loads.append(name)
            await asyncio.sleep(0)
            raise BadModelFile("The file is cut short.")

        gate.supervisor.ensure_ready = ensure_ready  # type: ignore[method-assign, assignment]
        yield gate, loads


def asks(model: str, *headers: str, **fields: object) -> bytes:
    return request(CHAT | {"model": model} | fields, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_waits_for_a_load_that_fails_goes_to_the_fallback(tmp_path: Path, stream: bool) -> None:
    async with broken_front(tmp_path) as (gate, loads):
        for _ in range(3):
            answer = await gate.ask(asks("auto", "x-team: broken", stream=stream))
            assert (answer.status, answer.headers["x-laya-model"]) == (200, "stub")
        assert loads == ["broken"], "it is passed over for a while"
        assert {body["model"] for body in gate.engine.bodies} == {"stub"}
        gate.gateway.fleet.sweep(time.monotonic() + PASSED_OVER_S + 1)
        assert (await gate.ask(asks("auto", "x-team: broken"))).status == 200
        assert loads == ["broken"] * 2
        assert await gate.settled() == {"served": 4}
        assert [gate.gateway.router.load(each.index) for each in gate.gateway.fleet.endpoints.values()] == [(0, 0)] * 2


async def test_pool_passes_over_a_member_whose_load_failed(tmp_path: Path) -> None:
    async with broken_front(tmp_path) as (gate, loads):
        assert [(await gate.ask(asks("either", user=str(n)))).status for n in range(8)] == [200] * 8
        assert len(loads) <= 1


async def test_request_that_new_rules_leave_undecided_hears_why_its_load_failed(tmp_path: Path) -> None:
    rules = msgspec.convert({"rules": [{"model": "auto", "headers": {"x-team": "stub"}, "to": "stub"}]}, RoutingConfig)
    async with broken_front(tmp_path) as (gate, _):
        ready = gate.supervisor.ensure_ready

        async def reload_meanwhile(name: str) -> EngineAddress:
            gate.gateway.dispatcher.rules = Rules(rules)
            return await ready(name)

        gate.supervisor.ensure_ready = reload_meanwhile  # type: ignore[method-assign]
        answer = await gate.ask(asks("auto", "x-team: broken"))
        assert (answer.status, answer.error["code"]) == (422, "bad_model_file")


async def test_request_with_nowhere_else_to_go_hears_why_each_time(tmp_path: Path) -> None:
    async with broken_front(tmp_path) as (gate, loads):
        for data in (asks("broken"), asks("auto"), asks("broken")):
            answer = await gate.ask(data)
            assert (answer.status, answer.error["code"]) == (422, "bad_model_file")
        assert loads == ["broken"] * 3


async def test_explain_says_that_the_load_failed_and_why(tmp_path: Path) -> None:
    async with broken_front(tmp_path) as (gate, _):
        await gate.ask(asks("auto", "x-team: broken"))
        told = (await explain(gate, ("model", "auto"), ("header", "x-team: broken"))).json
        first, second = (each["candidates"][0] for each in told["tried"])
        assert (first["is_eligible"], first["why_not"]) == (False, "its load failed: The file is cut short.")
        assert second["is_chosen"]
