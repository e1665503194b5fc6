"""`/admin/route/explain`: what this server would do now with a request, and `weight` in a pool."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest

from laya.config import Config, ModelConfig
from laya.config.document import Document
from laya.config.load import config_from
from laya.config.routing import RoutingConfig
from laya.errors import ConfigError
from laya.routing.endpoint_twin import TRIP_AFTER

from .fleet_world import World, in_world, plans_of
from .front import Answer, Front, front, request
from .keyed import get_as, grant, keep

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_world")]
__all__ = ["in_world"]
ROUTING = msgspec.convert(
    {"rules": [{"name": "research", "model": "auto", "headers": {"x-team": "re*"}, "to": "stub"}]}, RoutingConfig
)


async def explain(gate: Front, *pairs: tuple[str, str]) -> Answer:
    return await gate.ask(request(method="GET", path=f"/admin/route/explain?{urlencode(pairs)}"))


async def test_candidates_are_those_of_the_live_table(tmp_path: Path) -> None:
    async with front(tmp_path, model={"replicas": 3}) as gate:
        router, health = gate.gateway.router, gate.gateway.fleet.health
        router.route("stub", "s", 1, 0, 0, 500, 1, b"")
        for _ in range(TRIP_AFTER):
            health.failed(gate.endpoints[1])
        gate.endpoints[2].close()
        gate.gateway.fleet.together.choose_eligible(gate.endpoints[2])
        told = (await explain(gate, ("model", "stub"), ("session", "s"))).json
        (tried,) = told["tried"]
        assert told["is_live"] and told["rule"] is None
        assert {each["name"]: each["why_not"] for each in tried["candidates"]} == {
            "stub#1": "",
            "stub#2": "its circuit breaker is open",
            "stub#3": "not ready",
        }
        assert sum(each["tokens"] for each in tried["candidates"]) == 500
        assert [each["name"] for each in tried["candidates"] if each["is_chosen"]] == ["stub#1"]
        before = [router.load(endpoint.index) for endpoint in gate.endpoints]
        await explain(gate, ("model", "stub"))
        assert [router.load(endpoint.index) for endpoint in gate.endpoints] == before, "nothing is reserved"


async def test_model_that_is_not_loaded_has_room_whatever_its_last_engine_held(tmp_path: Path) -> None:
    asked = ("model", "stub"), ("prompt_tokens", "1000000")
    async with front(tmp_path) as gate:
        (tried,) = (await explain(gate, *asked)).json["tried"]
        assert not tried["candidates"][0]["has_room"]
        await gate.gateway.fleet.unload(gate.endpoint)
        (tried,) = (await explain(gate, *asked)).json["tried"]
        assert tried["candidates"][0]["has_room"]


async def test_rule_that_takes_a_request_is_named(tmp_path: Path) -> None:
    async with front(tmp_path, routing=ROUTING) as gate:
        told = (await explain(gate, ("model", "auto"), ("header", "X-Team: research"))).json
        assert (told["rule"], told["models"]) == ("research", ["stub"])
        assert told["verdicts"] == [{"rule": "research", "misses": ""}]
        assert told["tried"][0]["why"] == "it is the only one"


@pytest.mark.parametrize(("more", "rule"), [({}, "bulk"), ({"priority": "default"}, "bulk"), ({"key": "x"}, None)])
async def test_key_gives_its_own_priority_and_bounds_it(
    tmp_path: Path, more: dict[str, str], rule: str | None
) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("batch", max_priority="bulk"))
    rules = {"rules": [{"name": "bulk", "model": "stub", "priority": "bulk", "to": "stub"}]}
    async with front(tmp_path, routing=msgspec.convert(rules, RoutingConfig)) as gate:
        query = urlencode({"model": "stub", "key": "batch"} | more)
        answer = await gate.ask(get_as("admin", f"/admin/route/explain?{query}"))
        assert answer.json["rule"] == rule


@pytest.mark.parametrize(
    ("pairs", "status", "words"),
    [
        ([], 400, "'model' is missing"),
        ([("model", "stbu")], 404, "Did you mean 'stub'?"),
        ([("model", "auto")], 400, "none of them takes this request"),
        ([("model", "stub"), ("kind", "talk")], 400, "'kind' is 'talk': expected chat or completion"),
        ([("model", "stub"), ("prompt_tokens", "-1")], 400, "'prompt_tokens' is '-1'"),
        ([("model", "stub"), ("header", "nothing")], 400, "'header' is 'nothing'"),
        ([("model", "stub"), ("sesion", "x")], 400, "'sesion' is no parameter here. Did you mean 'session'?"),
    ],
)
async def test_wrong_question_is_answered_in_a_sentence(
    tmp_path: Path, pairs: list[tuple[str, str]], status: int, words: str
) -> None:
    async with front(tmp_path, routing=ROUTING) as gate:
        answer = await explain(gate, *pairs)
        assert answer.status == status and words in answer.error["message"]


async def test_weights_share_out_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"a": ModelConfig(weight=3), "b": ModelConfig(), "c": ModelConfig(weight=0)}
    routing = RoutingConfig(pools={"pool": ["a", "b", "c"]})
    config = Config(models=models, policy="weighted", routing=routing)
    world = plans_of(World(tmp_path, dict.fromkeys("abc", 1), total_bytes=100, config=config), monkeypatch)
    router = world.fleet.router
    counts = dict.fromkeys("abc", 0)
    for _ in range(4000):
        index = router.choose("pool")
        counts[world.fleet.endpoints[index].name] += 1
        router.settle(index, 0)
    assert counts["c"] == 0
    assert 0.7 < counts["a"] / 4000 < 0.8
    await world.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"weight": 3}, "weight: the same for every model decides nothing"),
        ({"models": {"a": {"weight": 70000}}}, "weight"),
        ({"models": {"a": {"weight": 3}}}, "models.a.weight: counts in a pool only, and a is in none"),
        (
            {"models": {"a": {"weight": 3}}, "routing": {"pools": {"p": ["a", "b"]}}},
            "models.a.weight: counts only with `policy: weighted`",
        ),
        (
            {"policy": "weighted", "models": {"a": {"weight": 0}}, "routing": {"pools": {"p": ["a"]}}},
            "routing.pools.p: each of its models has weight 0",
        ),
        ({"models": {"a": {"weight": -1}}}, "weight"),
    ],
)
async def test_weight_that_decides_nothing_is_refused(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from(Document(data))
    assert words in caught.value.message
