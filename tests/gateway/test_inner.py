"""A request that a handler asks for goes the six steps as any other, and ends with the client it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.errors import InvalidRequest, LayaError
from laya.gateway.desk import reply
from laya.gateway.inner import InnerExchange, Piece, sse
from laya.gateway.server import Gateway
from laya.types import EndpointKind

from .front import CHAT, KEY, Client, Front, front, request, until
from .scripted_engine import STREAM_HEAD, Call, Script, chunk, delta, hello, hello_events, progress, streams, whole

pytestmark = pytest.mark.anyio
PATH = "/v1/parrot"


class Parrot:
    """A small API of its own: the request says what to ask, the answer is wrapped."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.ended: list[str] = []
        self.may_fail = asyncio.Event()

    async def create(self, request: Request) -> Any:
        return self.gateway.inner.answer(EndpointKind.CHAT, self.answer)

    async def answer(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = msgspec.json.decode(body)
        if "bad" in asked:
            raise InvalidRequest("'bad' is not for parrots.", param="bad")
        if "broken" in asked:
            raise KeyError("broken")
        if "silent" in asked:
            return reply({"parrot": None})
        if asked.get("stream"):
            return sse(self.events(exchange, await exchange.ask_stream(asked)))
        answer = await exchange.ask_whole(asked)
        if asked.get("user") == "fails":
            await self.may_fail.wait()
            raise KeyError("afterwards")
        return reply({"parrot": answer})

    async def events(self, exchange: InnerExchange, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece if isinstance(piece, bytes) else b"data: %b\n\n" % json.dumps({"parrot": piece}).encode()
            self.ended.append("whole")
        except LayaError as error:
            self.ended.append(error.code)
            yield b"data: %b\n\n" % json.dumps(exchange.broken(error).body()).encode()
        finally:
            self.ended.append("end")


def routes(kept: list[Parrot]) -> Callable[[Gateway], list[Route]]:
    def make(gateway: Gateway) -> list[Route]:
        kept.append(Parrot(gateway))
        return [Route(PATH, kept[0].create, methods=["POST"])]

    return make


def parrot(*headers: str, key: str = KEY, **fields: Any) -> bytes:
    return request(CHAT | fields, PATH, headers=headers, key=key)


async def test_handler_that_fails_after_its_engine_has_answered_fails_the_request(tmp_path: Path) -> None:
    kept: list[Parrot] = []
    async with front(tmp_path, max_num_seqs=1, apis=routes(kept)) as gate:
        client = await gate.client()
        client.send(parrot(user="fails"))
        await until(lambda: gate.engine.calls)
        assert (await gate.ask(parrot())).status == 200, "its place at the engine is free already"
        assert gate.books == (2, 1, {"served": 1})
        kept[0].may_fail.set()
        assert (await client.answer()).status == 500
        assert await gate.settled() == {"failed": 1, "served": 1}


def data_of(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ")]


@contextlib.asynccontextmanager
async def begun_stream(tmp_path: Path) -> AsyncIterator[tuple[Front, Client, Parrot]]:
    """A client whose answer has begun and does not end by itself."""
    made: list[Parrot] = []
    async with front(tmp_path, streams(delta(content="Hel"), ends=False), apis=routes(made)) as world:
        client = await world.client()
        client.send(parrot(stream=True))
        await client.head()
        yield world, client, made[0]


@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_whole_answer_comes_back_and_counts_once(tmp_path: Path, cancels_whole: bool) -> None:
    async with front(tmp_path, apis=routes([]), cancels_whole=cancels_whole) as world:
        answer = await world.ask(parrot("x-request-id: mine-7"))
        assert answer.status == 200
        assert answer.json["parrot"]["choices"][0]["message"]["content"] == "Hello"
        assert answer.headers["x-request-id"] == "mine-7"
        assert await world.settled() == {"served": 1}
        assert world.stats.arrivals == 1


async def test_stream_gives_each_event_and_the_usage_that_was_asked_for(tmp_path: Path) -> None:
    made: list[Parrot] = []
    async with front(tmp_path, apis=routes(made)) as world:
        answer = await world.ask(parrot(stream=True, stream_options={"include_usage": True}))
        events = [event["parrot"] for event in data_of(answer.body)]
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        assert text == "Hello"
        assert events[-1]["usage"]["completion_tokens"] == 2
        assert made[0].ended == ["whole", "end"]
        assert await world.settled() == {"served": 1}


async def test_comments_of_a_long_prefill_are_pieces_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laya.gateway.relay.PREFILL_NOTE_EVERY_S", 0.0)
    async with front(tmp_path, streams(progress(3, 9), *hello_events()), apis=routes([])) as world:
        answer = await world.ask(parrot(stream=True))
        assert answer.body.startswith(b": prefill 33 %\n\n")
        assert await world.settled() == {"served": 1}


async def test_refusals_keep_their_status_and_are_counted(tmp_path: Path) -> None:
    async with front(tmp_path, apis=routes([])) as world:
        for body, status, code in (
            (parrot(bad=1), 400, "invalid_request"),
            (parrot(model="stab"), 404, "model_not_found"),
            (parrot(temperature=9), 400, "invalid_request"),
            (parrot(n=5, stream=True), 400, "invalid_request"),
        ):
            answer = await world.ask(body)
            assert (answer.status, answer.error["code"]) == (status, code)
            assert answer.headers["x-should-retry"] == "false"
        assert await world.settled() == {"refused": 4}
        wrong_key = await world.ask(parrot(key="other"))
        assert wrong_key.status == 401
        assert world.engine.calls == []


async def test_fault_of_a_translator_is_one_failed_request(tmp_path: Path) -> None:
    async with front(tmp_path, apis=routes([])) as world:
        answer = await world.ask(parrot(broken=True))
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert (await world.ask(parrot(silent=True))).json == {"parrot": None}
        assert await world.settled() == {"failed": 1, "served": 1}


async def test_engine_that_breaks_off_says_so_in_the_stream(tmp_path: Path) -> None:
    made: list[Parrot] = []

    async def broken(call: Call) -> None:
        await streams(delta(content="Hel"), ends=False)(call)
        call.close()

    async with front(tmp_path, broken, apis=routes(made)) as world:
        answer = await world.ask_broken(parrot(stream=True))
        assert answer.status == 200
        assert data_of(answer.body)[-1]["error"]["code"] == "engine_crashed"
        assert made[0].ended == ["engine_crashed", "end"]
        assert await world.settled() == {"failed": 1}


async def test_client_that_leaves_a_stream_frees_its_engine(tmp_path: Path) -> None:
    async with begun_stream(tmp_path) as (world, client, made):
        client.abort()
        await asyncio.wait_for(world.engine.calls[0].gone.wait(), 1)
        assert await world.settled() == {"cancelled": 1}
        await until(lambda: made.ended == ["end"])


@pytest.mark.parametrize("script", [streams(delta(content="Hel"), ends=False), streams(progress(1, 9), ends=False)])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_before_its_answer_frees_its_engine(
    tmp_path: Path, script: Script, stream: bool
) -> None:
    async with front(tmp_path, script, apis=routes([])) as world:
        client = await world.client()
        client.send(parrot(stream=stream))
        await until(lambda: world.engine.calls)
        client.abort()
        await asyncio.wait_for(world.engine.calls[0].gone.wait(), 1)
        assert await world.settled() == {"cancelled": 1}


async def test_client_that_leaves_while_it_waits_frees_its_place(tmp_path: Path) -> None:
    async with front(tmp_path, streams(delta(content="Hel"), ends=False), apis=routes([]), max_num_seqs=1) as world:
        first, second = await world.client(), await world.client()
        first.send(parrot(stream=True))
        await first.head()
        second.send(parrot())
        await until(lambda: world.endpoint.queue)
        second.abort()
        await until(lambda: not [each for each in world.endpoint.queue if each.outcome is None])
        first.abort()
        assert await world.settled() == {"cancelled": 2}


async def test_slow_reader_slows_its_engine_down(tmp_path: Path) -> None:
    piece = delta(content="x" * 60_000)

    async def endless(call: Call) -> None:
        call.write(STREAM_HEAD)
        for _ in range(2000):
            call.write(chunk(piece))
            await call.drain()

    async with front(tmp_path, endless, apis=routes([])) as world:
        client = await world.client(limit=2**16)
        client.send(parrot(stream=True))
        await until(lambda: world.engine.calls and world.endpoint.live)
        (exchange,) = world.endpoint.live
        await until(lambda: exchange.upstream_paused)
        assert isinstance(exchange, InnerExchange)
        assert exchange._unread_bytes < 2**21
        n_written = world.engine.calls[0].n_written
        for _ in range(200):  # it reads on, and so does the gateway
            await client.reader.readexactly(100_000)
        await until(lambda: world.engine.calls[0].n_written > n_written)
        client.abort()
        assert await world.settled() == {"cancelled": 1}


async def test_body_is_held_to_the_limits_of_the_hot_path(tmp_path: Path) -> None:
    server = {"max_body_bytes": 1000, "body_timeout_s": 0.05}
    async with front(tmp_path, apis=routes([]), server=server) as world:
        large = await world.ask(parrot(filler="x" * 1000))
        assert (large.status, large.error["code"]) == (413, "payload_too_large")
        client = await world.client()
        whole_body = parrot()
        client.send(whole_body[:-5])
        late = await client.answer()
        assert (late.status, late.error["code"]) == (408, "request_timeout")
        assert await world.settled() == {"refused": 2}
        assert world.limits.bodies.held_bytes == 0


async def test_body_bytes_are_given_back(tmp_path: Path) -> None:
    async with front(tmp_path, apis=routes([])) as world:
        assert (await world.ask(parrot(metadata={"filler": "x" * 200_000}))).status == 200
        assert (await world.ask(parrot(metadata={"filler": "x" * 200_000}, bad=True))).status == 400
        assert world.limits.bodies.held_bytes == 0


async def test_another_replica_takes_what_the_first_one_failed(tmp_path: Path) -> None:
    async with front(tmp_path, apis=routes([]), model={"replicas": 2}) as world:

        async def fails_once(call: Call) -> None:
            if sum(len(engine.calls) for engine in world.engines) > 1:
                await hello(call)
            else:
                call.write(whole({"error": {"message": "no"}}, 500))

        for engine in world.engines:
            engine.script = fails_once
        answer = await world.ask(parrot())
        assert answer.json["parrot"]["choices"][0]["message"]["content"] == "Hello"
        assert [len(engine.calls) for engine in world.engines] == [1, 1]
        assert await world.settled() == {"served": 1}


async def test_stream_of_another_replica_tells_its_origin_as_any(tmp_path: Path) -> None:
    async with front(tmp_path, apis=routes([]), model={"replicas": 2}) as world:

        async def fails_once(call: Call) -> None:
            call.write(whole({"error": {"message": "no"}}, 500))
            for engine in world.engines:
                engine.script = hello

        for engine in world.engines:
            engine.script = fails_once
        answers = [await world.ask(parrot(stream=True)) for _ in range(2)]
        assert sum(len(engine.calls) for engine in world.engines) == 3
        assert [answer.headers["x-laya-model"] for answer in answers] == ["stub", "stub"]


async def test_server_that_stops_tells_the_stream(tmp_path: Path) -> None:
    async with begun_stream(tmp_path) as (world, client, _):
        world.endpoint.fail_all(InvalidRequest("The end."))
        assert data_of(await client.broken_body())[-1]["error"]["message"] == "The end."


async def test_session_and_key_come_with_it(tmp_path: Path) -> None:
    seen: list[Any] = []
    async with front(tmp_path, apis=routes([])) as world:
        dispatch = world.gateway.dispatcher.dispatch

        def watching(exchange: Any) -> None:
            seen.append((exchange.key_name, exchange.header_session, exchange.request_id))
            dispatch(exchange)

        world.gateway.dispatcher.dispatch = watching  # type: ignore[method-assign]
        answer = await world.ask(parrot("x-session-id: talk-1"))
        assert seen == [("tests", "talk-1", answer.headers["x-request-id"].encode())]


async def test_hot_path_is_the_same_beside_it(tmp_path: Path) -> None:
    async with front(tmp_path, hello, apis=routes([])) as world:
        client = await world.client()
        for body in (parrot(), request(CHAT), parrot(stream=True), request(CHAT | {"stream": True}), parrot(bad=1)):
            answer = await client.ask(body)
            assert answer.status in (200, 400)
        assert await world.settled() == {"served": 4, "refused": 1}
        assert world.stats.arrivals == 5
