"""/upstream/MODEL/PATH: the engine's own answers, streams too, and what stands before them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from .front import KEY, front, request, until
from .keyed import grant, keep, secret
from .live import MODEL, Serving, plain
from .scripted_engine import STREAM_HEAD, Call, chunk, whole

pytestmark = pytest.mark.anyio


async def test_request_reaches_the_engine_as_it_is(tmp_path: Path) -> None:
    async def echo(call: Call) -> None:
        said = {"path": call.path, "key": call.headers.get(b"authorization", b"").decode(), "body": call.json}
        call.write(whole(said, 418))

    async with front(tmp_path, echo) as world:
        answer = await world.ask(request({"a": 1}, "/upstream/stub-alias/v1/any?b=2&b=3"))
        assert answer.status == 418
        assert answer.json == {"path": "/v1/any?b=2&b=3", "key": "Bearer engine-key", "body": {"a": 1}}
        assert world.books == (0, 0, {})


async def test_stream_comes_as_it_comes_and_ends_with_its_client(tmp_path: Path) -> None:
    calls: list[Call] = []

    async def talks_on(call: Call) -> None:
        calls.append(call)
        call.write(STREAM_HEAD + chunk(b"data: 1\n\n"))

    async with front(tmp_path, talks_on) as world:
        client = await world.client()
        client.send(request({}, "/upstream/stub/events"))
        head = await client.head()
        assert head.headers["content-type"] == "text/event-stream"
        assert await anext(client.pieces()) == b"data: 1\n\n"
        client.abort()
        await until(lambda: calls[0].gone.is_set())


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_answer_that_breaks_off_is_cut_there_and_no_fault_of_ours(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(call: Call) -> None:
        call.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await call.drain()
        getattr(call, end)()

    async with front(tmp_path, breaks) as world:
        assert (await world.ask_broken(request({}, "/upstream/stub/events"))).body in (b"data: 1\n\n", b"")
        await until(lambda: not world.connections)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_upstream_is_for_admins_and_names_what_is_wrong(tmp_path: Path) -> None:
    keep(tmp_path, grant("user"))
    async with front(tmp_path, loaded=False, server={"max_body_bytes": 1024}) as world:
        refused = await world.ask(request({}, "/upstream/stub/props", key=secret("user")))
        assert refused.status == 403
        unknown = await world.ask(request({}, "/upstream/nobody/props", key=KEY))
        assert (unknown.status, "stub" in unknown.error["message"]) == (404, True)
        large = await world.ask(request({"a": "x" * 2000}, "/upstream/stub/props", key=KEY))
        assert large.status == 413


@pytest.mark.engine
def test_engines_own_paths_answer(server: Serving) -> None:
    with plain(server) as client:
        props = client.get("/upstream/smollm2/props").json()
        assert props["total_slots"] == 2
        body = {"prompt": "One, two,", "n_predict": 3, "stream": True}
        lines = client.post(f"/upstream/{MODEL}/completion", json=body).text.split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["stop"] is True
