"""Streams in the express lane: that plain ones take it, and that whatever else happens is what the full way does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.gateway import plain

from .front import CHAT, Answer, Client, Front, chat, front, request, until
from .scripted_engine import DONE, STREAM_HEAD, Call, chunk, delta, hello_events, progress, standstill, usage, whole
from .test_express import hold_up, n_lent

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not plain.NATIVE, reason="there is no native core here")]
BEGIN = STREAM_HEAD + b"".join(map(chunk, (progress(9, 9), delta(role="assistant", content=None))))
HELLO = delta(content="Hel"), delta(content="lo")
END = b"".join(map(chunk, (delta("stop"), usage(), DONE))) + b"0\r\n\r\n"
WHOLE = BEGIN + b"".join(map(chunk, HELLO)) + END
SAID = b"".join(hello_events()[1:5]) + DONE  # what the client gets of it


class Engine:
    """Streams what it is told to, in as many writes; the next one goes out when the one before is with the client."""

    def __init__(self) -> None:
        self.pieces: tuple[bytes, ...] = (WHOLE,)
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.last: Callable[[Call], Any] | None = None

    async def __call__(self, call: Call) -> None:
        for index, piece in enumerate(self.pieces):
            if index:
                await self.go_on.wait()
            call.write(piece)
            await call.drain()
            for _ in range(4):
                await asyncio.sleep(0)
        if self.last is not None:
            self.last(call)


async def lent(gate: Front) -> Client:
    client = await gate.client()
    for _ in range(3):
        answer = await client.ask(chat(stream=True))
        assert (answer.status, answer.body) == (200, SAID)
    assert n_lent(gate) == 1
    return client


async def flowing(gate: Front, client: Client, engine: Engine, more: tuple[bytes, ...] = HELLO[1:]) -> bytes:
    """A stream in the lane whose engine waits behind its second event; gives what is here of it."""
    engine.pieces = (BEGIN + chunk(HELLO[0]), *map(chunk, more), END)
    engine.go_on.clear()
    client.send(chat(stream=True))
    assert (await client.head()).status == 200
    first = await anext(client.pieces())
    assert gate.endpoint.n_express == 1 and gate.stats.in_flight == 1
    return first


async def test_plain_streams_go_there_and_are_counted_as_ever(tmp_path: Path) -> None:
    async with front(tmp_path, Engine(), cancels_whole=True) as gate:
        clients = [await gate.client() for _ in range(4)]
        for number in range(10):
            asked = [
                request(CHAT | {"stream": True}, headers=(f"x-request-id: {number}-{index}",)) for index in range(4)
            ]
            got = await asyncio.gather(*(client.ask(data) for client, data in zip(clients, asked, strict=True)))
            for index, answer in enumerate(got):
                assert (answer.status, answer.body) == (200, SAID)
                assert answer.headers["x-request-id"] == f"{number}-{index}"
        assert n_lent(gate) == 4 and gate.gateway.dispatcher.streams.n_pieces < 20  # by the pump, before they were lent
        assert await gate.settled() == {"served": 40}
        model = gate.endpoint.stats
        assert (model.tokens_in, model.tokens_out) == (360, 80)
        assert sum(model.ttft.counts) == sum(model.inter_token.counts) == 40
        assert gate.engine.n_connections <= 8


async def test_lane_answers_as_the_full_way_does(tmp_path: Path) -> None:
    """However the engine's bytes are cut."""
    dice, engine = random.Random(7), Engine()
    tokens = [delta(content=f'word "{index}" usage error ') for index in range(20)]
    raw = BEGIN + b"".join(map(chunk, tokens)) + END
    expected = b"".join((hello_events()[1], *tokens, delta("stop"), DONE))
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        full = await gate.client()
        full.send(chat(stream=True)[:40])
        await until(lambda: len(gate.connections) == 1)
        oracle = await full.ask(chat(stream=True)[40:])
        client = await lent(gate)
        for _ in range(60):
            cuts = sorted(dice.sample(range(1, len(raw)), dice.randrange(9)))
            engine.pieces = tuple(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True))
            answer = await client.ask(chat(stream=True))
            assert (answer.status, answer.body) == (200, expected)
            names = set(oracle.headers) - {"x-request-id"}
            assert {name: answer.headers[name] for name in names} == {name: oracle.headers[name] for name in names}
            assert set(answer.headers) == set(oracle.headers)
        assert await gate.settled() == {"served": 64}


async def test_engine_that_closes_behind_a_stream_is_asked_anew(tmp_path: Path) -> None:
    engine = Engine()
    engine.last = Call.close
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        address = msgspec.structs.replace(gate.addresses[0], keeps_streams=False)
        gate.endpoint.close()
        gate.gateway.fleet.open(gate.endpoint, address)
        client = await gate.client()
        for _ in range(8):
            assert (await client.ask(chat(stream=True))).body == SAID
        assert await gate.settled() == {"served": 8}
        assert gate.engine.n_connections >= 8


async def test_who_wants_usage_gets_it(tmp_path: Path) -> None:
    async with front(tmp_path, Engine(), cancels_whole=True) as gate:
        client = await lent(gate)
        for _ in range(3):
            answer = await client.ask(chat(stream=True, stream_options={"include_usage": True}))
            assert answer.body.count(b'"prompt_tokens":9') == 1 and answer.body.endswith(DONE)
        assert await gate.settled() == {"served": 6}


async def rest_of(client: Client) -> Answer:
    body, is_whole = await client.body_so_far()
    return Answer(200 if is_whole else 0, {}, body)


async def test_who_looks_sees_a_stream_and_it_goes_on(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        first = await flowing(gate, client, engine)
        (exchange,) = gate.endpoint.live
        assert exchange.as_state(exchange.sent_s)["phase"] == "decode" and n_lent(gate) == 0
        engine.go_on.set()
        assert first + (await rest_of(client)).body == SAID
        assert await gate.settled() == {"served": 4}
        assert (gate.endpoint.stats.tokens_in, gate.endpoint.stats.tokens_out) == (36, 8)
        assert sum(gate.endpoint.stats.ttft.counts) == 4


async def test_stream_that_takes_longer_goes_on_in_the_pump(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        more = tuple(delta(content=str(index)) for index in range(20))
        await flowing(gate, client, engine, more)
        n_before = gate.gateway.dispatcher.streams.n_pieces
        gate.sweep(2.0)
        assert n_lent(gate) == gate.endpoint.n_express == 0 and len(gate.endpoint.live) == 1
        engine.go_on.set()
        assert (await rest_of(client)).body == b"".join((*more, delta("stop"), DONE))
        engine.pieces = (WHOLE,)
        assert (await client.ask(chat(stream=True))).body == SAID
        assert gate.gateway.dispatcher.streams.n_pieces > n_before
        assert await gate.settled() == {"served": 5}


async def test_client_that_leaves_ends_its_stream_at_the_engine(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        await flowing(gate, client, engine)
        client.abort()
        await asyncio.wait_for(gate.engine.calls[-1].gone.wait(), 10)
        assert await gate.settled() == {"served": 3, "cancelled": 1}


def breaks_off(call: Call) -> None:
    call.close()


ODD: dict[str, tuple[tuple[bytes, ...], Callable[[Call], Any] | None, str]] = {
    "error status": ((whole({"error": {"message": "no", "code": 500}}, 500),), None, "failed"),
    "error event": ((BEGIN, chunk(b'data: {"error":{"message":"no"}}\n\n') + b"0\r\n\r\n"), None, "failed"),
    "breaks off": ((BEGIN, chunk(HELLO[0])), breaks_off, "failed"),
    "resets": ((BEGIN, chunk(HELLO[0])), Call.reset, "failed"),
    "half a chunk": ((BEGIN, chunk(HELLO[0])[:20]), breaks_off, "failed"),
    "no end": ((BEGIN + chunk(HELLO[0]) + b"0\r\n\r\n",), None, "failed"),
    "no HTTP": ((b"nonsense\r\n\r\n",), None, "failed"),
    "a whole answer": ((whole({"choices": []}),), None, "failed"),
    "not chunked": ((STREAM_HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + SAID,), breaks_off, "served"),
    "more behind": ((WHOLE + b"HTTP/1.1 200 OK\r\n",), None, "served"),
    "event in two chunks": ((BEGIN, chunk(HELLO[0][:9]) + chunk(HELLO[0][9:]) + chunk(HELLO[1]) + END), None, "served"),
}


@pytest.mark.parametrize("name", ODD)
async def test_odd_stream_goes_the_full_way(tmp_path: Path, name: str) -> None:
    engine = Engine()
    pieces, last, outcome = ODD[name]

    async def ask(gate: Front, client: Client) -> tuple[int, bytes]:
        engine.pieces, engine.last = pieces, last
        answer = await asyncio.wait_for(_so_far(client), 10)
        engine.pieces, engine.last = (WHOLE,), None
        return answer

    async def _so_far(client: Client) -> tuple[int, bytes]:
        client.send(chat(stream=True))
        answer = await client.answer_so_far()
        return answer.status, answer.body

    async with front(tmp_path, engine, cancels_whole=True) as gate:
        known = await lent(gate)
        assert n_lent(gate) == 1
        got = await ask(gate, known)
        stranger = await gate.client()  # its first request is in no lane
        assert got == await ask(gate, stranger)
        outcomes = await gate.settled()
        assert outcomes.get(outcome) == (5 if outcome == "served" else 2), outcomes
        client = await gate.client()
        assert (await client.ask(chat(stream=True))).body == SAID


async def test_slow_client_misses_nothing_and_holds_its_engine_up(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        connection = hold_up(gate, client, way_bytes=2**17)
        tokens = [delta(content="x" * 8000) for _ in range(400)]
        engine.pieces = (BEGIN, *map(chunk, tokens), END)
        client.send(chat(stream=True))
        await until(lambda: connection.flow.write_paused)
        await asyncio.wait_for(standstill(gate.engine.calls[-1]), 10)
        assert n_lent(gate) == 0 and connection.transport.get_write_buffer_size() < 2**20
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert answer.body == b"".join((hello_events()[1], *tokens, delta("stop"), DONE))
        assert await gate.settled() == {"served": 4}


async def test_what_is_asked_behind_a_stream_is_answered_in_turn(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        first = await flowing(gate, client, engine)
        client.send(chat(stream=True) + request(method="GET", path="/health"))
        await until(lambda: n_lent(gate) == 0)
        engine.go_on.set()
        assert first + (await rest_of(client)).body == SAID
        assert (await client.answer()).body == SAID
        assert (await client.answer()).json == {"status": "ok"}
        assert await gate.settled() == {"served": 5}


async def test_lane_and_pump_and_whole_answers_on_the_same_connections(tmp_path: Path) -> None:
    dice = random.Random(3)

    class Both(Engine):
        async def __call__(self, call: Call) -> None:
            if call.json.get("stream"):
                await super().__call__(call)
            else:
                call.write(whole({"choices": []}))

    async def ask(gate: Front, times: int) -> None:
        client = await gate.client()
        for _ in range(times):
            is_stream = dice.random() < 0.6
            answer = await client.ask(chat(stream=is_stream))
            assert answer.status == 200 and (answer.body == SAID) == is_stream
            if dice.random() < 0.1:
                gate.sweep(dice.choice((0.3, 2.0)))

    run: list[Awaitable[None]]
    async with front(tmp_path, Both(), cancels_whole=True, max_num_seqs=4) as gate:
        run = [ask(gate, 40) for _ in range(6)]
        await asyncio.gather(*run)
        assert await gate.settled() == {"served": 240}
