"""Requests sent before the last answer is read: answered in order, one at a time, in bounded memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from .front import CHAT, Client, Front, chat, front, request, until
from .scripted_engine import DONE, Call, answers, delta, event, hello, streams, whole

pytestmark = pytest.mark.anyio
HEALTH = request(method="GET", path="/health")


class Gate:
    """An engine that answers each call when it is told to."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(0)

    async def __call__(self, call: Call) -> None:
        await self._free.acquire()
        await hello(call)

    def let(self, n_calls: int = 1) -> None:
        for _ in range(n_calls):
            self._free.release()


async def statuses(client: Client, count: int) -> list[int]:
    return [(await client.answer()).status for _ in range(count)]


async def test_pipelined_mix_is_answered_in_order(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        wanted = [
            (chat(), 200),
            (HEALTH, 200),
            (chat(model="nope"), 404),
            (chat(stream=True), 200),
            (request(method="GET", path="/nowhere"), 404),
            (request(b"{"), 400),
            (request(CHAT, key="bad"), 401),
            (request(method="GET"), 405),
            (HEALTH, 200),
            (chat(), 200),
        ]
        client.send(b"".join(data for data, _ in wanted))
        answers = [await client.answer() for _ in wanted]
        assert [answer.status for answer in answers] == [status for _, status in wanted]
        assert answers[1].json == {"status": "ok"} and answers[3].body.endswith(b"data: [DONE]\n\n")
        assert await gate.settled() == {"served": 3, "refused": 3}


async def test_pipelined_request_reaches_the_engine_after_the_answer_before_it(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine) as gate:
        client = await gate.client()
        client.send(chat(user="a") + chat(user="b"))
        await until(lambda: gate.stats.arrivals == 2)
        engine.let()
        assert await statuses(client, 1) == [200]
        await until(lambda: len(gate.engine.calls) == 2)
        assert [body["user"] for body in gate.engine.bodies] == ["a", "b"]
        engine.let()
        assert await statuses(client, 1) == [200]


async def test_pipelined_body_that_arrives_late_is_waited_for(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, server={"body_timeout_s": 30.0, "header_timeout_s": 10.0}) as gate:
        client = await gate.client()
        second = chat(user="late")
        client.send(chat() + second[:-10])
        await until(lambda: gate.stats.arrivals == 2)
        gate.sweep(100)  # the client could send, but nobody reads it now: no fault of its own
        client.send(second[-10:])
        engine.let(2)
        assert await statuses(client, 2) == [200, 200]
        assert gate.engine.bodies[1]["user"] == "late"


async def test_pipelined_body_that_never_comes_is_told_in_its_turn(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, server={"body_timeout_s": 30.0}) as gate:
        client = await gate.client()
        client.send(chat() + chat()[:-10])
        await until(lambda: gate.stats.arrivals == 2)
        engine.let()
        assert await statuses(client, 1) == [200]
        await until(lambda: next(iter(gate.connections)).cycle.started)
        gate.sweep(29)
        gate.sweep(31)
        assert await statuses(client, 1) == [408]
        assert await client.closed()
        assert await gate.settled() == {"served": 1, "refused": 1}


async def test_pipelined_half_head_is_waited_for_and_then_told(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, server={"header_timeout_s": 10.0}) as gate:
        client = await gate.client()
        client.send(chat() + chat()[:20])
        await until(lambda: gate.engine.calls)
        engine.let()
        assert await statuses(client, 1) == [200]
        gate.sweep(11)
        assert await statuses(client, 1) == [408]
        assert await client.closed()


@pytest.mark.parametrize("garbage", [b"\x00\x01\r\n\r\n", b"x" * 100_000])
async def test_pipelined_garbage_closes_after_the_answers_before_it(tmp_path: Path, garbage: bytes) -> None:
    engine = Gate()
    async with front(tmp_path, engine) as gate:
        client = await gate.client()
        client.send(chat() + chat())
        await until(lambda: gate.stats.arrivals == 2)
        client.send(garbage)
        engine.let(2)
        assert await statuses(client, 2) == [200, 200]
        rest = await client.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 4")
        assert await gate.settled() == {"served": 2}


async def test_pipelined_after_connection_close_is_not_answered(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine) as gate:
        client = await gate.client()
        client.send(request(CHAT, headers=("connection: close",)) + chat())
        await until(lambda: gate.engine.calls)
        engine.let(2)
        assert await statuses(client, 1) == [200]
        assert await client.closed()
        outcomes = await gate.settled()
        assert outcomes.pop("served") == 1
        assert outcomes in ({}, {"cancelled": 1})


async def test_pipelined_too_large_body_is_told_in_its_turn(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, server={"max_body_bytes": 1000}) as gate:
        client = await gate.client()
        client.send(chat() + request(b" " * 2000))
        await until(lambda: gate.stats.arrivals == 2)
        engine.let()
        assert await statuses(client, 2) == [200, 413]
        assert (await client.ask(HEALTH)).status == 200


async def test_pipelined_expect_is_told_to_go_on_in_its_turn(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine) as gate:
        client = await gate.client()
        body = json.dumps(CHAT).encode()
        client.send(chat() + request(headers=("expect: 100-continue", f"content-length: {len(body)}")))
        await until(lambda: gate.stats.arrivals == 2)
        engine.let()
        assert await statuses(client, 2) == [200, 100]
        client.send(body)
        engine.let()
        assert await statuses(client, 1) == [200]


async def test_thousands_of_pipelined_refusals_do_not_nest(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine) as gate:
        client = await gate.client()
        client.send(chat() + request(b"{") * 3000)
        await until(lambda: gate.engine.calls)
        engine.let()
        assert await statuses(client, 3001) == [200] + [400] * 3000
        assert await gate.settled() == {"served": 1, "refused": 3000}


async def test_pipelined_requests_wait_unread_while_one_is_answered(tmp_path: Path) -> None:
    """However many a client sends ahead, few are taken off its socket."""
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        client = await gate.client()
        client.send(chat())
        await until(lambda: gate.engine.calls)
        client.send(request(b"{") * 20_000)
        for n_answers in range(1, 4):
            before = gate.stats.arrivals
            client.send(chat())
            engine.let()
            await client.answer()
            assert gate.stats.arrivals - before < 4000, n_answers


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_a_pipelined_answer_cancels_it(tmp_path: Path, stream: bool) -> None:
    async def endless(call: Call) -> None:
        await streams(*[b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'] * 3, ends=False)(call)

    async with front(tmp_path, endless) as gate:
        client = await gate.client()
        client.send(chat(stream=stream) + chat() + HEALTH)
        await until(lambda: gate.stats.arrivals == 2 and gate.engine.calls)
        client.abort()
        await asyncio.wait_for(gate.engine.calls[0].gone.wait(), 5)
        assert await gate.settled() == {"cancelled": 2}
        assert len(gate.engine.calls) == 1


async def test_client_that_leaves_behind_a_page_is_forgotten(tmp_path: Path) -> None:
    """The page's own task learns of it too, though a newer request stands behind it."""
    async with front(tmp_path) as gate:
        opened = asyncio.Event()
        ended = asyncio.Event()

        async def follow(lines: int) -> object:
            opened.set()
            try:
                while True:
                    await asyncio.sleep(0.01)
                    yield "line"
            finally:
                ended.set()

        gate.gateway.supervisor.logs = lambda model_id: type("Logs", (), {"follow": staticmethod(follow)})()  # type: ignore
        client = await gate.client()
        client.send(request(method="GET", path="/admin/models/stub/logs?follow=1") + chat())
        await asyncio.wait_for(opened.wait(), 5)
        await until(lambda: gate.stats.arrivals == 1)
        client.abort()
        await asyncio.wait_for(ended.wait(), 5)
        assert await gate.settled() == {"cancelled": 1}


# a client that asks and does not read
BIG = 512 * 1024


async def no_growth(gate: Front) -> tuple[int, int]:
    """(calls, bytes that wait in the gateway), once they stay as they are."""
    seen = (-1, -1)
    while True:
        connection = next(iter(gate.connections))
        now = (len(gate.engine.calls), connection.transport.get_write_buffer_size())
        if now == seen:
            return now
        seen = now
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("cancels_whole", [True, False])
async def test_client_that_reads_no_answers_gets_no_more_of_them(tmp_path: Path, cancels_whole: bool) -> None:
    big = {"choices": [{"index": 0, "delta": {"content": "x" * BIG}, "finish_reason": "stop"}]}
    script = answers(whole(big)) if cancels_whole else streams(event(big), DONE)
    async with front(tmp_path, script, cancels_whole=cancels_whole) as gate:
        client = await gate.client(limit=1024)
        for _ in range(40):
            client.send(chat())
        await until(lambda: gate.engine.calls)
        n_calls, n_waiting = await no_growth(gate)
        assert n_calls < 20 and n_waiting < 4 * BIG
        client.reader._limit = 2**26  # type: ignore[attr-defined]
        assert await statuses(client, 40) == [200] * 40
        assert len(gate.engine.calls) == 40
        assert await gate.settled() == {"served": 40}


async def test_client_that_reads_late_is_not_an_idle_one(tmp_path: Path) -> None:
    script = streams(*[delta(content="x" * BIG)] * 40, DONE)
    async with front(tmp_path, script, server={"keep_alive_s": 60}) as gate:
        client = await gate.client(limit=1024)
        client.send(chat())
        await until(lambda: gate.stats.outcomes["served"])
        assert next(iter(gate.connections)).flow.write_paused
        gate.sweep(100)
        client.reader._limit = 2**26  # type: ignore[attr-defined]
        assert len((await client.answer()).body) > 40 * BIG
        gate.engine.script = hello
        assert (await client.ask(chat())).status == 200
