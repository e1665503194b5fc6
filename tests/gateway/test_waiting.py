"""What clients are told of a wait: comments in a stream, and in an answer's head who gave it and how long it waited."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from .front import CHAT, Answer, Front, chat, front, request, until
from .keyed import chat_as, grant, keep
from .scripted_engine import hello
from .test_admission import Gate, sent

pytestmark = pytest.mark.anyio


def origin(answer: Answer) -> tuple[str | None, str | None, str | None]:
    headers = answer.headers
    return headers.get("x-laya-model"), headers.get("x-laya-engine"), headers.get("x-laya-queue-ms")


@pytest.mark.parametrize("cancels_whole", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_answer_tells_model_engine_and_wait(tmp_path: Path, cancels_whole: bool, stream: bool) -> None:
    """On the plain lane and off it, flowing natively and assembled."""
    async with front(tmp_path, hello, cancels_whole=cancels_whole) as gate:
        for body in (chat(stream=stream), chat(stream=stream, model="stub-alias", temperature=0.5)):
            client = await gate.client()
            assert origin(await client.ask(body)) == ("stub", "stub", "0")


async def test_answer_names_the_replica(tmp_path: Path) -> None:
    async with front(tmp_path, hello, model={"replicas": 2}) as gate:
        names = {origin(await gate.ask(chat()))[:2] for _ in range(20)}
        assert names <= {("stub", "stub#1"), ("stub", "stub#2")} and names


async def test_error_tells_no_model(tmp_path: Path) -> None:
    async with front(tmp_path, hello, max_num_seqs=1) as gate:
        assert origin(await gate.ask(chat(n=2))) == (None, None, None)


async def test_wait_is_told(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        clients = await sent(gate, {}, {})
        waiting = next(iter(gate.endpoint.queue))
        waiting.read_s -= 2
        engine.let(2)
        assert origin(await clients[0].answer())[2] == "0"
        assert 2000 <= int(origin(await clients[1].answer())[2] or 0) < 12_000


async def comments(gate: Front, client: Any, after_s: float) -> str:
    """What the client gets from a sweep so much later."""
    gate.sweep(after_s)
    gate.gateway.dispatcher.outbox.flush()
    raw: bytes = await client.reader.readuntil(b"s\n\n\r\n")
    return raw.decode()


async def test_stream_that_waits_is_told_so_and_then_served(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        first, waits = await sent(gate, {}, {"stream": True})
        gate.sweep(4.5)
        assert next(iter(gate.endpoint.queue)).noted_s == 0  # silent for five seconds
        said = await comments(gate, waits, 6)
        assert (
            said.startswith("HTTP/1.1 200 OK")
            and "text/event-stream" in said
            and said.endswith(": waiting, 6 s\n\n\r\n")
        )
        gate.sweep(7)
        assert (await comments(gate, waits, 9.5)).endswith(": waiting, 9 s\n\n\r\n")
        engine.let(2)
        assert (await first.answer()).status == 200
        rest = (await waits.reader.readuntil(b"\r\n0\r\n\r\n")).decode()
        assert "HTTP/1.1" not in rest and rest.count("data: [DONE]") == 1
        assert await gate.settled() == {"served": 2}


async def test_stream_that_waits_for_a_load_is_told_how_far_it_is_and_so_are_the_events(tmp_path: Path) -> None:
    percent: int | None = None
    go_on = asyncio.Event()
    async with front(tmp_path, hello, loaded=False) as gate:
        supervisor, fleet = gate.supervisor, gate.gateway.fleet
        load = supervisor.ensure_ready

        async def slowly(model_id: str) -> Any:
            await go_on.wait()
            return await load(model_id)

        supervisor.ensure_ready = slowly  # type: ignore[method-assign]
        supervisor.load_percent = lambda name: percent  # type: ignore[method-assign]
        client = await gate.client()
        client.send(chat(stream=True))
        await until(lambda: len(gate.endpoint.queue) == 1)
        assert (await comments(gate, client, 6)).endswith(": loading, 6 s\n\n\r\n")
        for percent, after_s in ((0, 10), (45, 14), (47, 18), (99, 22)):
            told = await comments(gate, client, after_s + 0.5)
            assert told.endswith(f": loading {percent} %, {after_s} s\n\n\r\n")
        go_on.set()
        rest = (await client.reader.readuntil(b"\r\n0\r\n\r\n")).decode()
        assert rest.count("data: [DONE]") == 1
        fleet.engine_changed("stub", "ready", gate.addresses[0])
        events = [(each.kind, each.figures["percent"]) for each in gate.gateway.events.after(0)]
        assert events == [("loading", 0), ("loading", 45), ("loading", 99), ("ready", 100)]


async def test_refusal_after_a_comment_is_an_event(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        first, waits = await sent(gate, {}, {"stream": True})
        await comments(gate, waits, 6)
        gate.sweep(61)
        rest = (await waits.broken_body()).decode()
        event = rest[rest.index("data: ") + 6 :].split("\n")[0]
        assert json.loads(event)["error"]["code"] == "queue_timeout" and "[DONE]" not in rest
        engine.let()
        assert (await first.answer()).status == 200
        assert await gate.settled() == {"served": 1, "refused": 1}


async def test_stream_that_was_told_moves_to_a_replica_that_is_free(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1, model={"replicas": 2}) as gate:
        await sent(gate, {"user": "1"}, {"user": "2"})
        (waits,) = await sent(gate, {"stream": True})
        await until(lambda: sum(len(endpoint.queue) for endpoint in gate.endpoints) == 1)
        await comments(gate, waits, 6)
        engine.let(3)
        rest = (await waits.reader.readuntil(b"\r\n0\r\n\r\n")).decode()
        assert rest.count("data: [DONE]") == 1
        assert await gate.settled() == {"served": 3}


async def test_waiting_in_silence_where_the_config_says_so(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1, server={"waiting_note_s": 0}) as gate:
        _, waits = await sent(gate, {}, {"stream": True})
        gate.sweep(30)
        gate.sweep(61)
        assert (await waits.answer()).status == 503


async def test_urgent_requests_go_first(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        clients = []
        for user, headers in (
            ("0", ()),
            ("1", ()),
            ("2", ("x-laya-priority: bulk",)),
            ("3", ("x-laya-priority: interactive",)),
        ):
            client = await gate.client()
            client.send(request(CHAT | {"user": user}, headers=headers))
            clients.append(client)
            await until(lambda: gate.stats.arrivals == len(clients))
        engine.let(4)
        for client in clients:
            assert (await client.answer()).status == 200
        assert [body["user"] for body in gate.engine.bodies] == ["0", "3", "1", "2"]


async def test_keys_take_turns_and_system_is_for_admins(tmp_path: Path) -> None:
    """Who sends many does not shut out who sends one, and a user's key does not come before an admin's."""
    keep(tmp_path, grant("root", role="admin"), grant("greedy", role="user"), grant("modest", role="user"))
    keep(tmp_path, grant("batch", priority="bulk", max_priority="default"))
    engine = Gate()
    asked = [("greedy", str(number), ()) for number in range(4)]
    asked += [
        ("batch", "b", ()),
        ("batch", "d", ("x-laya-priority: interactive",)),
        ("modest", "m", ()),
        ("greedy", "u", ("x-laya-priority: system",)),
        ("root", "r", ("x-laya-priority: system",)),
    ]
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        clients: list[Any] = []
        for key, user, headers in asked:
            clients.append(await gate.client())
            clients[-1].send(chat_as(key, *headers, user=user))
            await until(lambda: gate.stats.arrivals == len(clients))
        engine.let(len(asked))
        assert [(await client.answer()).status for client in clients] == [200] * len(asked)
        assert [body["user"] for body in gate.engine.bodies] == ["0", "r", "u", "1", "d", "m", "2", "3", "b"]


async def test_queue_of_none_still_loads_what_is_asked_for(tmp_path: Path) -> None:
    async with front(tmp_path, hello, loaded=False, model={"queue_size": 0}) as gate:
        assert (await gate.ask(chat())).status == 200
