"""The express lane: that plain requests take it, and that whatever else happens on it is what the full way does."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from laya.gateway import plain
from laya.types import KeyGrant

from .front import CHAT, Client, Front, chat, front, request, until
from .scripted_engine import STREAM_HEAD, Call, answers, chunk, hello, hello_events, standstill, streams, whole

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not plain.NATIVE, reason="there is no native core here")]
GOOD = {"choices": [{"index": 0}]}


class Engine:
    """Answers well until it is told otherwise."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.waits.set()
        self.next: Any = None  # what the next request gets instead

    async def __call__(self, call: Call) -> None:
        script, self.next = self.next, None
        if script is not None:
            await script(call)
            return
        await self.waits.wait()
        if call.json.get("stream"):
            await streams(*hello_events())(call)
        else:
            call.write(whole(GOOD))


async def lent(gate: Front) -> Client:
    """A client that the native lane reads from."""
    client = await gate.client()
    for _ in range(3):
        assert (await client.ask(chat())).status == 200
    assert len(gate.gateway.dispatcher.express) > 0
    return client


def n_lent(gate: Front) -> int:
    return len(gate.gateway.dispatcher.express)


async def running(gate: Front, client: Client, engine: Engine, data: bytes | None = None) -> Call:
    """A request of the client that waits at the engine, by the native lane."""
    engine.waits.clear()
    n_calls = len(gate.engine.calls)
    client.send(data or chat())
    await until(lambda: len(gate.engine.calls) > n_calls)
    assert gate.endpoint.n_express == 1 and gate.stats.in_flight == 1
    return gate.engine.calls[-1]


async def test_plain_requests_go_there_and_are_counted_as_ever(tmp_path: Path) -> None:
    async with front(tmp_path, Engine(), cancels_whole=True) as gate:
        clients = [await gate.client() for _ in range(4)]
        for number in range(30):
            asked = [request(CHAT, headers=(f"x-request-id: {number}-{index}",)) for index in range(len(clients))]
            got = await asyncio.gather(*(client.ask(data) for client, data in zip(clients, asked, strict=True)))
            for index, answer in enumerate(got):
                assert (answer.status, answer.json) == (200, GOOD)
                assert answer.headers["x-request-id"] == f"{number}-{index}"
                assert answer.headers["content-type"] == "application/json"
        assert n_lent(gate) == 4
        assert await gate.settled() == {"served": 120}
        model = gate.endpoint.stats
        for histogram in (gate.stats.route, model.queue_wait, model.ttft):
            assert sum(histogram.counts) == 120
        assert model.outcomes == {("chat", "served"): 120}
        assert gate.engine.n_connections <= 8


async def test_ids_are_given_and_never_twice(tmp_path: Path) -> None:
    async with front(tmp_path, Engine(), cancels_whole=True) as gate:
        client = await gate.client()
        ids = [(await client.ask(chat())).headers["x-request-id"] for _ in range(10)]
        assert n_lent(gate) == 1 and len(set(ids)) == 10 and all(each.startswith("req-") for each in ids)


async def test_who_looks_sees_what_runs_and_it_goes_on(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        await running(gate, client, engine, request(CHAT, headers=("x-request-id: mine",)))
        (exchange,) = gate.endpoint.live
        assert exchange.as_state(exchange.sent_s)["id"] == "mine" and exchange.key_name == "tests"
        assert gate.endpoint.is_busy and gate.books[1] == 1
        engine.waits.set()
        answer = await client.answer()
        assert (answer.json, answer.headers["x-request-id"]) == (GOOD, "mine")
        assert (await client.ask(chat())).json == GOOD
        assert await gate.settled() == {"served": 5}
        assert sum(gate.endpoint.stats.ttft.counts) == sum(gate.endpoint.stats.queue_wait.counts) == 5


async def test_client_that_leaves_ends_its_request_at_the_engine(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        call = await running(gate, client, engine)
        client.abort()
        await asyncio.wait_for(call.gone.wait(), 10)
        assert await gate.settled() == {"served": 3, "cancelled": 1}


async def test_idle_client_that_leaves_is_noticed(tmp_path: Path) -> None:
    async with front(tmp_path, Engine(), cancels_whole=True) as gate:
        client = await lent(gate)
        client.close()
        await until(lambda: not gate.connections)
        assert n_lent(gate) == 0


ODD = {
    "error": (answers(whole({"error": {"message": "no", "code": 400}}, 400)), 400),
    "two pieces": (answers(whole(GOOD)[:50], whole(GOOD)[50:]), 200),
    "large": (answers(whole(GOOD | {"x": "y" * 2_000_000})), 200),
    "chunked": (answers(STREAM_HEAD, chunk(b"{}"), b"0\r\n\r\n"), 200),
    "closes": (lambda call: _closes(call), 200),
}


async def _closes(call: Call) -> None:
    call.close()


@pytest.mark.parametrize("name", ODD)
async def test_odd_answer_goes_the_full_way(tmp_path: Path, name: str) -> None:
    engine = Engine()
    script, status = ODD[name]
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        engine.next = script
        answer = await client.ask(chat())
        assert answer.status == status
        assert name != "large" or len(answer.body) > 2_000_000
        assert (await client.ask(chat())).json == GOOD
        outcomes = await gate.settled()
        assert sum(outcomes.values()) == 5 and outcomes["served"] >= 4


async def test_half_an_answer_is_none(tmp_path: Path) -> None:
    engine = Engine()

    async def breaks_off(call: Call) -> None:
        call.write(whole(GOOD)[:-3])
        call.close()

    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        engine.next = breaks_off
        client.send(chat())
        await client.rest_of_answer()
        outcomes = await gate.settled()
        assert outcomes == {"served": 3, "failed": 1}


async def test_other_key_is_checked_and_a_revoked_one_refused(tmp_path: Path) -> None:
    async with front(tmp_path, Engine(), cancels_whole=True) as gate:
        client = await lent(gate)
        for key in ("bad", None):
            assert (await client.ask(request(CHAT, key=key))).status == 401
        for _ in range(2):
            assert (await client.ask(chat())).status == 200
        assert n_lent(gate) == 1
        gate.gateway.keys.replace([KeyGrant(name="other", sha256="0" * 64)])
        assert n_lent(gate) == 0
        assert (await client.ask(chat())).status == 401
        gate.gateway.keys.replace([])
        assert await gate.settled() == {"served": 5, "refused": 3}


async def test_key_that_is_replaced_is_not_remembered(tmp_path: Path) -> None:
    """Not of a client either that was not lent yet."""
    async with front(tmp_path, Engine(), cancels_whole=True) as gate:
        client = await gate.client()
        assert (await client.ask(chat())).status == 200
        gate.gateway.keys.replace([KeyGrant(name="other", sha256="0" * 64)])
        assert (await client.ask(chat())).status == 401
        assert (await client.ask(chat())).status == 401


async def test_what_is_pipelined_is_answered_in_turn(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        await running(gate, client, engine, request(CHAT, headers=("x-request-id: a",)))
        client.send(request(CHAT, headers=("x-request-id: b",)) + request(method="GET", path="/health"))
        engine.waits.set()
        assert (await client.answer()).headers["x-request-id"] == "a"
        assert (await client.answer()).headers["x-request-id"] == "b"
        assert (await client.answer()).json == {"status": "ok"}
        assert await gate.settled() == {"served": 5}


async def test_who_finds_no_room_waits_in_line(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True, max_num_seqs=1) as gate:
        first, second = await lent(gate), await lent(gate)
        await running(gate, first, engine)
        second.send(chat())
        await until(lambda: len(gate.endpoint.queue) == 1)
        engine.waits.set()
        assert (await first.answer()).status == (await second.answer()).status == 200
        assert await gate.settled() == {"served": 8}


async def test_streams_and_whole_answers_take_turns(tmp_path: Path) -> None:
    async with front(tmp_path, hello, cancels_whole=True) as gate:
        client = await gate.client()
        for number in range(12):
            answer = await client.ask(chat(stream=number % 4 == 3))
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n") == (number % 4 == 3)
        assert await gate.settled() == {"served": 12}


async def test_what_takes_longer_or_is_idle_comes_back(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        idle, busy = await lent(gate), await lent(gate)
        await running(gate, busy, engine)
        gate.sweep(2.0)
        assert n_lent(gate) == gate.endpoint.n_express == 0 and len(gate.endpoint.live) == 1
        engine.waits.set()
        assert (await busy.answer()).json == (await idle.ask(chat())).json == GOOD
        for client in (idle, busy, idle, busy):
            assert (await client.ask(chat())).json == GOOD
        assert n_lent(gate) == 2
        gate.sweep(5.0)
        gate.sweep(gate.limits.idle_s + 6.0)
        assert await idle.closed() and await busy.closed()
        assert await gate.settled() == {"served": 12}


async def test_engine_that_goes_away_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        await running(gate, client, engine)
        address = gate.addresses[0]
        gate.endpoint.close()
        gate.gateway.fleet.open(gate.endpoint, address)
        engine.waits.set()
        assert (await client.answer()).json == GOOD
        assert (await client.ask(chat())).json == GOOD
        assert await gate.settled() == {"served": 5}


async def test_server_that_ends_finishes_what_runs(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        idle, busy = await lent(gate), await lent(gate)
        await running(gate, busy, engine)
        for connection in list(gate.connections):
            connection.shutdown()
        assert await idle.closed()
        engine.waits.set()
        answer = await busy.answer()
        assert (answer.json, answer.headers["connection"]) == (GOOD, "close")
        assert await busy.closed()
        gate.gateway.dispatcher.express.close()
        assert await gate.settled() == {"served": 7}


def hold_up(gate: Front, client: Client, way_bytes: int = 4096) -> Any:
    """The client reads nothing more, and little is on its way to it. Gives the gateway's end of its connection.

    way_bytes: of the kernel's buffers; through very small ones a long answer takes a minute.
    """
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, way_bytes)
    (connection,) = gate.connections
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, way_bytes)
    connection.transport.set_write_buffer_limits(high=1024)
    return connection


async def test_client_that_takes_no_answer_is_not_read_on(tmp_path: Path) -> None:
    engine = Engine()
    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        connection = hold_up(gate, client)
        engine.next = answers(whole(GOOD | {"x": "y" * 60_000}))
        client.send(chat())
        await until(lambda: connection.flow.write_paused)
        assert n_lent(gate) == 0 and not connection.transport.is_reading()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await client.answer()).json["x"] == "y" * 60_000
        assert (await client.ask(chat())).json == GOOD
        assert await gate.settled() == {"served": 5}


async def test_engine_of_a_client_that_takes_no_answer_is_held_up(tmp_path: Path) -> None:
    """Of one that asks on before it is known to take none."""
    engine = Engine()

    async def large(call: Call) -> None:
        engine.next = endless
        call.write(whole(GOOD | {"x": "y" * 60_000}))
        client.send(chat())  # seen in the same turn, behind the answer

    async def endless(call: Call) -> None:
        call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999999999\r\n\r\n")
        while not call.gone.is_set():
            call.write(b" " * 100_000)
            await call.drain()
            await asyncio.sleep(0)

    async with front(tmp_path, engine, cancels_whole=True) as gate:
        client = await lent(gate)
        connection = hold_up(gate, client)
        engine.next = large
        client.send(chat())
        await until(lambda: connection.flow.write_paused and len(gate.engine.calls) == 5)
        await asyncio.wait_for(standstill(gate.engine.calls[-1]), 10)
        assert connection.transport.get_write_buffer_size() < 2**20
        client.abort()
        assert await gate.settled() == {"served": 4, "cancelled": 1}
