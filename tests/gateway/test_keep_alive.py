"""`keep_alive` of a request: obeyed in every API, never told to an engine, and bounded for keys of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laya.config import ServerConfig
from laya.errors import InvalidRequest
from laya.gateway.keep_alive import FOREVER_S, seconds_of

from .front import CHAT, Front, front, request, until
from .keyed import grant, keep, secret
from .scripted_engine import Call, hello, whole

pytestmark = pytest.mark.anyio
MESSAGES = CHAT["messages"]
ASKED = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"messages": MESSAGES},
}
SETTINGS = {"ttl_s": 300.0}


async def ask(gate: Front, said: Any, name: str = "admin", path: str = "/v1/chat/completions") -> int:
    body = {"model": "stub", "keep_alive": said} | ASKED[path]
    return (await gate.ask(request(body, path, key=secret(name)))).status


@pytest.mark.parametrize("cancels_whole", [True, False])
async def test_every_api_obeys_it_and_no_engine_hears_of_it(tmp_path: Path, cancels_whole: bool) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path, model=SETTINGS | {"replicas": 2}, cancels_whole=cancels_whole) as gate:
        for number, path in enumerate(ASKED, start=1):
            await ask(gate, f"{number}h", path=path)
            assert {each.ttl_s for each in gate.gateway.fleet.replicas(gate.endpoint)} == {3600.0 * number}, path
        assert (await gate.ask(request(CHAT | {"keep_alive": None}))).status == 200  # says nothing, changes nothing
        assert gate.endpoint.ttl_s == 3600.0 * len(ASKED)
        sent = [body for engine in gate.engines for body in engine.bodies]
        assert len(sent) > len(ASKED) and not any("keep_alive" in body for body in sent)


async def test_embeddings_obey_it_too(tmp_path: Path) -> None:
    async def vector(call: Call) -> None:
        assert "keep_alive" not in call.json
        call.write(whole({"object": "list", "data": [], "usage": {"prompt_tokens": 1, "total_tokens": 1}}))

    async with front(tmp_path, vector, model=SETTINGS | {"task": "embed"}) as gate:
        asked = {"model": "stub", "input": "hi", "keep_alive": -1}
        assert (await gate.ask(request(asked, "/v1/embeddings"))).status == 200
        assert gate.endpoint.ttl_s is None


async def test_nothing_unloads_it_when_idle_and_the_next_load_has_its_ttl_again(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path, hello, model=SETTINGS) as gate:
        assert await ask(gate, 0) == 200
        gate.sweep(1)
        await until(lambda: gate.supervisor.unloaded == ["stub"])
        gate.gateway.fleet.engine_changed("stub", "unloaded", None)
        assert gate.endpoint.ttl_s == 300.0


async def test_key_of_a_user_only_lengthens_and_not_beyond_the_bound(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"))
    async with front(tmp_path, hello, model=SETTINGS, server={"max_keep_alive": 1200.0}) as gate:
        for said, ttl_s in ((0, 300.0), ("10m", 600.0), ("6m", 600.0), (-1, 1200.0)):
            assert await ask(gate, said, "ann") == 200
            assert gate.endpoint.ttl_s == ttl_s, said
        for said, then, ttl_s in ((-1, 5, None), (7200, "1h", 7200.0)):  # an admin's word stands
            await ask(gate, said)
            await ask(gate, then, "ann")
            assert gate.endpoint.ttl_s == ttl_s
        unload = request({"model": "stub", "keep_alive": 0}, "/api/generate", key=secret("ann"))
        assert (await gate.ask(unload)).status == 403


async def test_bound_can_be_taken_away_and_pinned_models_stay(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"))
    async with front(tmp_path, hello, model=SETTINGS, server={"max_keep_alive": -1.0}) as gate:
        await ask(gate, -1, "ann")
        assert gate.endpoint.ttl_s is None
    async with front(tmp_path, hello, model={"pinned": True}) as gate:
        await ask(gate, 0)
        assert gate.endpoint.ttl_s is None


@pytest.mark.parametrize("said", [1e300, "99999999999h"])
async def test_time_beyond_every_calendar_is_told_as_for_ever(tmp_path: Path, said: Any) -> None:
    async with front(tmp_path, hello) as gate:
        assert (await gate.ask(request(CHAT | {"keep_alive": said}))).status == 200
        answer = await gate.ask(request(None, "/api/ps", method="GET"))
        assert answer.status == 200 and answer.json["models"][0]["expires_at"].startswith("9999-")


def test_bound_is_an_hour_unless_said() -> None:
    assert ServerConfig().max_keep_alive == 3600


@pytest.mark.parametrize(("said", "seconds"), [
    (5, 5.0), (1.5, 1.5), ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3), ("0", 0.0), ("10", 10.0), (-1, FOREVER_S),
    ("-1m", FOREVER_S), ("-1", FOREVER_S), ("0s", 0.0),
])  # fmt: skip
def test_it_is_seconds_or_a_duration(said: Any, seconds: float) -> None:
    assert seconds_of(said) == pytest.approx(seconds)


@pytest.mark.parametrize("said", ["", "five", "5x", "m", "1h x", "--5m", "\u0665m", "\u0665"])
def test_what_is_no_duration_is_refused(said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        seconds_of(said)
    assert caught.value.param == "keep_alive"
