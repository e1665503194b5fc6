"""Who is let in, who waits, who is refused, and that what was reserved is released once, however it ended."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laya.errors import EngineFailed
from laya.gateway.server import sweep

from .front import CHAT, Client, Front, chat, front, request, until
from .scripted_engine import STREAM_HEAD, Call, answers, chunk, delta, hello, streams, whole

pytestmark = pytest.mark.anyio


class Gate:
    """An engine that answers each call when it is told to, first come first served."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(0)

    async def __call__(self, call: Call) -> None:
        await self._free.acquire()
        await hello(call)

    def let(self, n_calls: int = 1) -> None:
        for _ in range(n_calls):
            self._free.release()


async def sent(gate: Front, *bodies: dict[str, Any]) -> list[Client]:
    """A client for each body, the requests arriving in this order."""
    clients = []
    for body in bodies:
        n_arrivals = gate.stats.arrivals
        client = await gate.client()
        client.send(chat(**body))
        await until(lambda n_arrivals=n_arrivals: gate.stats.arrivals == n_arrivals + 1)
        clients.append(client)
    return clients


def users(gate: Front) -> list[str]:
    return [body["user"] for body in gate.engine.bodies]


async def test_waiting_requests_are_served_first_come_first_served(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        clients = await sent(gate, *({"user": str(number)} for number in range(6)))
        assert len(gate.endpoint.queue) == 5 and users(gate) == ["0"]
        engine.let(6)
        assert [(await client.answer()).status for client in clients] == [200] * 6
        assert users(gate) == ["0", "1", "2", "3", "4", "5"]
        assert await gate.settled() == {"served": 6}


async def test_no_more_run_at_once_than_there_are_sequences(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=3) as gate:
        clients = await sent(gate, *[{"user": "x"}] * 8)
        assert len(gate.engine.calls) == 3
        for n_calls in range(4, 9):
            engine.let()
            await until(lambda n_calls=n_calls: len(gate.engine.calls) == n_calls)
        engine.let(3)
        assert [(await client.answer()).status for client in clients] == [200] * 8


async def test_full_queue_is_told_when_to_come_again(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=2, model={"queue_size": 3}) as gate:
        gate.endpoint.mean_service_s = 10.0
        await sent(gate, *[{}] * 5)
        answer = await gate.ask(chat())
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "20"  # 4 in line, 2 at a time, 10 s each
        assert "x-should-retry" not in answer.headers
        assert answer.error["message"] == "3 requests wait for 'stub' already (queue_size)."
        assert gate.books == (6, 5, {"refused": 1})


async def test_queue_of_none_refuses_at_once(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1, model={"queue_size": 0}) as gate:
        (client,) = await sent(gate, {})
        assert (await gate.ask(chat())).status == 429
        engine.let()
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(("max_num_seqs", "queue_size"), [(1, 0), (4, 0), (4, 1)])
async def test_request_whose_tokens_are_counted_waits_only_where_there_is_no_room(
    tmp_path: Path, max_num_seqs: int, queue_size: int
) -> None:
    engine = Gate()
    model, planned = {"queue_size": queue_size}, {"max_seq_len": 512, "slot_tokens": 512}
    async with front(tmp_path, engine, max_num_seqs=max_num_seqs, model=model, planned=planned) as gate:
        clients = [await gate.client() for _ in range(max_num_seqs + queue_size)]
        for client in clients:  # none of them is counted when the last one comes
            client.send(chat(max_tokens=8))
        await until(lambda: len(gate.engine.calls) == max_num_seqs and len(gate.endpoint.queue) == queue_size)
        refused = await gate.ask(chat(max_tokens=8))
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        words = "1 requests wait for 'stub' already" if queue_size else "No request may wait for 'stub', which is busy"
        assert refused.error["message"] == f"{words} (queue_size)."
        engine.let(len(clients))
        assert [(await client.answer()).status for client in clients] == [200] * len(clients)
        assert gate.engine.n_counts == len(clients)


async def test_wait_too_long_is_told(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1, model={"queue_timeout_s": 60.0}) as gate:
        clients = await sent(gate, {}, {})
        gate.sweep(59)
        assert gate.books == (2, 2, {})
        gate.sweep(61)
        answer = await clients[1].answer()
        assert (answer.status, answer.error["code"]) == (503, "queue_timeout")
        assert int(answer.headers["retry-after"]) >= 1
        assert "queue_timeout_s" in answer.error["message"]
        engine.let()
        assert (await clients[0].answer()).status == 200
        assert await gate.settled() == {"refused": 1, "served": 1}


async def test_expired_head_of_the_queue_lets_the_next_one_in(tmp_path: Path) -> None:
    """The one behind needs less room: it goes in while the sweep still goes over those that waited too long."""
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=2) as gate:
        clients = await sent(gate, {"user": "runs"}, {"user": "large", "n": 2}, {"user": "small"})
        assert users(gate) == ["runs"]
        gate.sweep(61)
        assert (await clients[1].answer()).status == 503
        await until(lambda: users(gate) == ["runs", "small"])
        engine.let(2)
        assert [(await clients[number].answer()).status for number in (0, 2)] == [200, 200]
        assert await gate.settled() == {"refused": 1, "served": 2}


async def test_choices_take_a_sequence_each(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=3) as gate:
        clients = await sent(gate, {"n": 2}, {"n": 2}, {})
        admission = gate.endpoint.admission
        assert admission is not None and admission.reserved_seqs == 2
        assert len(gate.engine.calls) == 1  # the third would fit, but it is not its turn
        engine.let()
        assert (await clients[0].answer()).status == 200
        await until(lambda: len(gate.engine.calls) == 3)
        assert admission.free_seqs == 0
        engine.let(2)
        await clients[1].answer(), await clients[2].answer()
        assert await gate.settled() == {"served": 3}


async def test_more_choices_than_sequences_are_refused_at_once(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=2) as gate:
        await sent(gate, {}, {}, {})
        answer = await gate.ask(chat(n=3))
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert answer.error["message"] == ("This request asks for 3 sequences at once; 'stub' runs 2 (max_num_seqs).")


async def test_pool_of_tokens_is_shared_by_what_requests_may_take(tmp_path: Path) -> None:
    engine = Gate()
    planned = {"kv_unified": True, "kv_pool_tokens": 8128, "max_seq_len": 8000, "slot_tokens": 8128, "n_batch": 128}
    async with front(tmp_path, engine, planned=planned) as gate:
        gate.engine.prompt_tokens = 1000
        clients = await sent(gate, {"max_tokens": 2500})
        await until(lambda: len(gate.engine.calls) == 1)
        clients += await sent(gate, {"max_tokens": 2500})
        await until(lambda: len(gate.engine.calls) == 2)
        clients += await sent(gate, {"max_tokens": 10})  # 2 x 3500 and 1010 more are above 8000
        await until(lambda: gate.endpoint.queue)
        engine.let()
        assert (await clients[0].answer()).status == 200
        await until(lambda: len(gate.engine.calls) == 3)
        engine.let(2)
        assert [(await client.answer()).status for client in clients[1:]] == [200, 200]
        answer = await gate.ask(chat(max_tokens=7900, n=2))
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")
        assert "8000 (kv_pool_tokens)" in answer.error["message"]
        assert await gate.settled() == {"served": 3, "refused": 1}


async def test_client_that_leaves_the_queue_is_not_sent_on(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        clients = await sent(gate, *({"user": str(number)} for number in range(4)))
        clients[2].abort()
        await until(lambda: gate.stats.outcomes["cancelled"] == 1)
        assert len(gate.endpoint.queue) == 2
        engine.let(3)
        assert [(await clients[number].answer()).status for number in (0, 1, 3)] == [200] * 3
        assert users(gate) == ["0", "1", "3"]
        assert await gate.settled() == {"served": 3, "cancelled": 1}


async def test_client_that_leaves_makes_room_for_the_next(tmp_path: Path) -> None:
    async with front(tmp_path, streams(delta(content="a"), ends=False), max_num_seqs=1) as gate:
        clients = await sent(gate, {"user": "0"}, {"user": "1"})
        clients[0].abort()
        await until(lambda: users(gate) == ["0", "1"])
        clients[1].abort()
        assert await gate.settled() == {"cancelled": 2}


async def test_hundreds_that_can_no_longer_be_held_are_refused_without_nesting(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=2, model={"queue_size": 400}) as gate:
        (first,) = await sent(gate, {"n": 2})
        clients = [await gate.client() for _ in range(400)]
        for client in clients:
            client.send(chat(n=2))
        await until(lambda: len(gate.endpoint.queue) == 400)
        assert gate.endpoint.pool is not None
        address = gate.endpoint.pool.address
        plan = gate.gateway.fleet.plans["stub"]  # the engine comes back with room for one
        gate.gateway.fleet.plans["stub"] = replace(plan, settings=replace(plan.settings, max_num_seqs=1))
        gate.gateway.fleet.open(gate.endpoint, address)
        assert [(await client.answer()).status for client in clients] == [400] * 400
        engine.let()
        assert (await first.answer()).status == 200
        assert await gate.settled() == {"served": 1, "refused": 400}


# a model that is not loaded yet
async def test_first_request_loads_the_model_and_the_others_wait(tmp_path: Path) -> None:
    loaded = asyncio.Event()
    async with front(tmp_path, loaded=False) as gate:
        supervisor: Any = gate.gateway.supervisor
        n_loads = 0

        async def ensure_ready(model_id: str) -> Any:
            nonlocal n_loads
            n_loads += 1
            await loaded.wait()
            return supervisor._address

        supervisor.ensure_ready = ensure_ready
        clients = await sent(gate, {"user": "0"}, {"user": "1"})
        assert len(gate.endpoint.queue) == 2 and gate.engine.calls == []
        gate.sweep(61)  # a load may take longer than a turn
        assert gate.stats.in_flight == 2
        loaded.set()
        assert [(await client.answer()).status for client in clients] == [200, 200]
        assert users(gate) == ["0", "1"]
        assert await gate.settled() == {"served": 2}


async def test_load_that_fails_is_told_to_all_who_wait(tmp_path: Path) -> None:
    fail = asyncio.Event()

    async def ensure_ready(model_id: str) -> Any:
        await fail.wait()
        raise EngineFailed("the engine did not start")

    async with front(tmp_path, loaded=False) as gate:
        gate.gateway.supervisor.ensure_ready = ensure_ready  # type: ignore[method-assign]
        clients = await sent(gate, {}, {}, {})
        fail.set()
        for client in clients:
            answer = await client.answer()
            assert (answer.status, answer.error["message"]) == (503, "the engine did not start")
        assert await gate.settled() == {"failed": 3}


async def test_full_queue_before_a_load_says_that_it_loads(tmp_path: Path) -> None:
    async def ensure_ready(model_id: str) -> Any:
        await asyncio.Event().wait()

    async with front(tmp_path, loaded=False, model={"queue_size": 1}) as gate:
        gate.gateway.supervisor.ensure_ready = ensure_ready  # type: ignore[method-assign]
        await sent(gate, {})
        answer = await gate.ask(chat())
        assert (answer.status, answer.error["code"]) == (503, "model_loading")
        assert int(answer.headers["retry-after"]) >= 5


async def test_engine_that_goes_away_keeps_its_queue(tmp_path: Path) -> None:
    engine = Gate()
    async with front(tmp_path, engine, max_num_seqs=1) as gate:
        clients = await sent(gate, {"user": "0"}, {"user": "1"})
        assert gate.endpoint.pool is not None
        address = gate.endpoint.pool.address
        gate.endpoint.close()
        engine.let()
        assert (await clients[0].answer()).status == 200
        assert len(gate.endpoint.queue) == 1
        gate.gateway.fleet.open(gate.endpoint, address)
        engine.let()
        assert (await clients[1].answer()).status == 200
        assert await gate.settled() == {"served": 2}


async def test_sweep_goes_on_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("laya.gateway.server.SWEEP_EVERY_S", 0.001)
    async with front(tmp_path) as gate:
        n_sweeps = 0

        def faulty(now_s: float) -> None:
            nonlocal n_sweeps
            n_sweeps += 1
            raise ZeroDivisionError

        monkeypatch.setattr(gate.gateway.fleet, "sweep", faulty)
        server: Any = type("Server", (), {"server_state": gate._state})()
        sweeping = asyncio.ensure_future(sweep(server, gate.gateway))
        await until(lambda: n_sweeps > 3)
        sweeping.cancel()
        assert "ZeroDivisionError" in caplog.text


# everything at once
class Unreliable:
    """An engine that answers, is slow, refuses, or breaks at some point, as the dice say."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    async def __call__(self, call: Call) -> None:
        kind = self._dice.choices(range(8), weights=[50, 10, 5, 5, 5, 5, 5, 5])[0]
        if kind == 1:
            await asyncio.sleep(self._dice.random() * 0.02)
        if kind in (0, 1):
            await hello(call)
        elif kind == 2:
            call.write(whole({"error": {"message": "no"}}, self._dice.choice([400, 500, 503])))
        elif kind == 3:
            call.abort()
        elif kind == 4:
            await answers(STREAM_HEAD, chunk(delta(content="a")))(call)
            call.close()
        elif kind == 5:
            await answers(STREAM_HEAD, chunk(delta(content="a")))(call)
            call.abort()
        elif kind == 6:
            await streams(delta(content="a"), b'data: {"error": {"message": "full"}}\n\n')(call)
        else:
            await answers(b"\x00 garbage")(call)


def any_request(dice: random.Random) -> bytes:
    body = CHAT | {
        "stream": dice.random() < 0.5,
        "n": dice.choice([1, 1, 1, 2, 5]),
        "max_tokens": dice.choice([5, 9000]),
    }
    kind = dice.choices(range(5), weights=[85, 4, 4, 4, 3])[0]
    if kind == 1:
        return request(b'{"model": "stub"')
    if kind == 2:
        return request(body, key="bad")
    if kind == 3:
        return request(body | {"model": "nope"})
    if kind == 4:
        return request(CHAT | {"messages": [{"role": "user", "content": "x" * 200_000}]})
    return request(body)


async def storm_client(gate: Front, dice: random.Random, turns: list[int]) -> None:
    client = await gate.client()
    while turns:
        turns.pop()
        if client.reader.at_eof() or client.writer.is_closing():
            client = await gate.client()
        client.send(any_request(dice))
        if dice.random() < 0.2:  # leaves, sooner or later
            await asyncio.sleep(dice.choice([0, 0, 0.001, 0.01]))
            client.abort()
            client = await gate.client()
            continue
        try:
            answer = await client.answer()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            client = await gate.client()
            continue
        if answer.headers.get("connection") == "close" or b'"engine_crashed"' in answer.body:
            client.close()
            client = await gate.client()


@pytest.mark.parametrize("cancels_whole", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
async def test_storm_leaves_the_books_straight(tmp_path: Path, cancels_whole: bool, seed: int) -> None:
    dice = random.Random(seed)
    model = {"queue_size": 40}
    async with front(tmp_path, Unreliable(seed), cancels_whole=cancels_whole, max_num_seqs=4, model=model) as gate:
        turns = list(range(1000))
        checks = asyncio.ensure_future(always(lambda: gate.books))
        await asyncio.gather(*(storm_client(gate, dice, turns) for _ in range(64)))
        outcomes = await gate.settled()
        checks.cancel()
        assert gate.stats.arrivals <= 1000
        assert sum(outcomes.values()) == gate.stats.arrivals > 800
        assert set(outcomes) == {"served", "refused", "failed", "cancelled"}
        counted = [*gate.endpoint.stats.outcomes.values(), *gate.stats.unknown.outcomes.values()]
        assert sum(counted) == gate.stats.arrivals
        assert gate.limits.bodies.held_bytes == 0
        assert not gate.endpoint.queue and gate.endpoint.n_counting == 0
        gate.engine.script = hello
        assert (await gate.ask(chat())).status == 200


async def always(check: Any) -> None:
    while True:
        check()
        await asyncio.sleep(0.005)


async def test_requests_wait_while_memory_is_short_and_are_told_why_when_they_waited_too_long(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        fleet = gate.gateway.fleet
        fleet.relief.set_admitting(False, "3.0 MiB of 1.0 GiB left")
        first = await gate.client()
        first.send(chat())
        await until(lambda: len(gate.endpoint.queue) == 1)
        gate.sweep(61)
        answer = await first.answer()
        assert (answer.status, answer.error["code"]) == (503, "queue_timeout")
        assert "new requests are held back: 3.0 MiB of 1.0 GiB left" in answer.error["message"]
        second = await gate.client()
        second.send(chat())
        await until(lambda: len(gate.endpoint.queue) == 1)
        assert not gate.engine.calls
        fleet.relief.set_admitting(True)
        assert (await second.answer()).status == 200
        assert await gate.settled() == {"refused": 1, "served": 1}
