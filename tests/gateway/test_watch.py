"""Engines that do nothing any more are found, whoever waits there is told or served elsewhere, and a new one comes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from laya.gateway.watch import ASK_EVERY_S, IDLE_LIMIT_S

from .front import Front, chat, front, request, until
from .scripted_engine import SLOTS, STREAM_HEAD, Call, chunk, hello, progress

pytestmark = pytest.mark.anyio
LIMIT_S = 3.0


async def hangs(call: Call) -> None:
    """It takes the request, and that is the last that is heard of it."""


def a_second_later(gate: Front) -> None:
    """What the server's sweep does each second."""
    gate.seconds += 1  # type: ignore[attr-defined]
    gate.sweep(gate.seconds)  # type: ignore[attr-defined]


def watched(home: Path, script: Any = hangs, *, replicas: int = 1, **more: Any) -> Any:
    return front(home, script, model={"progress_timeout_s": LIMIT_S, "replicas": replicas}, **more)


async def look(gate: Front, n_seconds: float) -> None:
    if not hasattr(gate, "seconds"):
        gate.seconds = 0  # type: ignore[attr-defined]
    for _ in range(int(n_seconds)):
        n_looks = [engine.n_looks for engine in gate.engines]
        a_second_later(gate)
        await asyncio.sleep(0)  # what was written is sent
        asked = [endpoint for endpoint in gate.endpoints if gate.gateway.fleet.watch.is_asking(endpoint)]
        if asked and all(engine.tells_slots for engine in gate.engines):
            await until(lambda n_looks=n_looks: [engine.n_looks for engine in gate.engines] > n_looks)
            await until(lambda asked=asked: not any(gate.gateway.fleet.watch.is_asking(each) for each in asked))


def stuck_events(gate: Front) -> list[str]:
    return [event.text for event in gate.gateway.events.after() if event.kind == "engine_stuck"]


async def test_engine_that_gives_nothing_is_stopped_and_its_request_is_told(tmp_path: Path) -> None:
    async with watched(tmp_path) as gate:
        client = await gate.client()
        client.send(chat(stream=True))
        await until(lambda: gate.engine.calls)
        await look(gate, LIMIT_S)
        assert not stuck_events(gate)
        gate.engine.script = hello
        await look(gate, 2)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (503, "engine_stuck")
        assert "without any progress" in answer.error["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert len(stuck_events(gate)) == 1
        await until(lambda: gate.endpoint.is_serving)
        assert gate.supervisor.unloaded == ["stub"]
        assert (await gate.ask(chat())).status == 200, "by the new one"
        assert gate.stats.unloads == {("stub", "stuck"): 1}
        assert await gate.settled() == {"failed": 1, "served": 1}


@pytest.mark.parametrize(("cpu_share", "is_stuck"), [(0.001, True), (0.03, False), (1.0, True)])
async def test_engine_that_gets_little_of_the_machine_is_no_stuck_one(
    tmp_path: Path, cpu_share: float, is_stuck: bool
) -> None:
    """The shares: what its answers to questions take, what a busy machine leaves it, and one that turns in circles."""
    async with watched(tmp_path) as gate:
        gate.supervisor.cpu_s = lambda model_id: cpu_share * gate.seconds  # type: ignore[attr-defined, method-assign]
        client = await gate.client()
        client.send(chat(stream=True))
        await until(lambda: gate.engine.calls)
        await look(gate, 3 * LIMIT_S)
        assert len(stuck_events(gate)) == is_stuck
        gate.supervisor.cpu_s = lambda model_id: 1.0  # type: ignore[method-assign]
        if not is_stuck:  # now it is
            await look(gate, LIMIT_S + 2)
            assert len(stuck_events(gate)) == 1
        assert (await client.answer()).error["code"] == "engine_stuck"


async def test_drained_engine_that_is_stuck_is_stopped_and_not_started_again(tmp_path: Path) -> None:
    stopping, is_gone = [], asyncio.Event()

    async def unload(name: str, deadline_s: float) -> None:
        stopping.append(name)
        await is_gone.wait()

    async with watched(tmp_path) as gate:
        gate.supervisor.unload = unload  # type: ignore[method-assign]
        client = await gate.client()
        client.send(chat(stream=True))
        await until(lambda: gate.engine.calls)
        gate.gateway.fleet.draining.begin(gate.endpoint)
        await look(gate, LIMIT_S + 2)
        assert (await client.answer()).error["code"] == "engine_stuck"
        await until(lambda: stopping == ["stub", "stub"])  # since it is stuck, and since it is drained
        is_gone.set()
        await until(lambda: not gate.gateway.fleet._tasks)
        assert not gate.endpoint.is_serving


async def test_slow_prefill_is_no_silence(tmp_path: Path) -> None:
    calls: list[Call] = []

    async def reads(call: Call) -> None:
        calls.append(call)
        call.write(STREAM_HEAD + chunk(progress(1, 100)))

    async with watched(tmp_path, reads) as gate:
        client = await gate.client()
        client.send(chat())
        for n_read in range(2, 12):
            await until(lambda n_read=n_read: any(each.prefill_done == n_read - 1 for each in gate.endpoint.live))
            await look(gate, LIMIT_S)
            calls[0].write(chunk(progress(n_read, 100)))
        assert not stuck_events(gate)
        client.close()


async def test_answer_that_comes_whole_may_take_its_time_while_the_engine_answers(tmp_path: Path) -> None:
    settings = {"task": "embed", "progress_timeout_s": 2 * ASK_EVERY_S}
    async with front(tmp_path, hangs, model=settings) as gate:
        client = await gate.client()
        client.send(request({"model": "stub", "input": "x"}, "/v1/embeddings"))
        await until(lambda: gate.engine.calls)
        await look(gate, 20 * ASK_EVERY_S)
        assert not stuck_events(gate)
        assert gate.engine.n_looks >= 10
        gate.engine.tells_slots = False
        await look(gate, 5 * ASK_EVERY_S)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (503, "engine_stuck")
        assert "has not answered" in answer.error["message"]


async def test_idle_engine_that_hangs_is_found_before_a_request_is(tmp_path: Path) -> None:
    async with front(tmp_path, hello) as gate:
        await look(gate, 10 * ASK_EVERY_S)
        assert not stuck_events(gate)
        gate.engine.tells_slots = False
        await look(gate, IDLE_LIMIT_S + 2 * ASK_EVERY_S)
        assert len(stuck_events(gate)) == 1
        await until(lambda: gate.endpoint.is_serving)
        assert gate.supervisor.unloaded == ["stub"]


async def test_time_that_this_process_was_stopped_for_does_not_count(tmp_path: Path) -> None:
    async with watched(tmp_path) as gate:
        client = await gate.client()
        client.send(chat(stream=True))
        await until(lambda: gate.engine.calls)
        gate.sweep(0)
        gate.sweep(1000)
        assert not stuck_events(gate)
        client.close()


async def test_engine_that_goes_on_later_than_this_process_has_the_whole_time_again(tmp_path: Path) -> None:
    async with front(tmp_path, hello) as gate:
        await look(gate, 2 * ASK_EVERY_S)
        gate.engine.tells_slots = False  # the engine is stopped first
        await look(gate, IDLE_LIMIT_S - ASK_EVERY_S)
        gate.seconds += 60  # type: ignore[attr-defined]  # then this process too, which goes on before it
        await look(gate, IDLE_LIMIT_S - 1)
        assert not stuck_events(gate)
        (asked,) = [call for call in gate.engine.open if call.path == "/slots"]
        asked.write(SLOTS)
        gate.engine.tells_slots = True
        await until(lambda: not gate.gateway.fleet.watch.is_asking(gate.endpoint))
        await look(gate, 2 * IDLE_LIMIT_S)
        assert not stuck_events(gate)
        gate.engine.tells_slots = False
        await look(gate, IDLE_LIMIT_S + 2 * ASK_EVERY_S)
        assert len(stuck_events(gate)) == 1, "one that does not go on is found all the same"


async def test_what_waits_at_a_stuck_replica_is_served_by_the_other(tmp_path: Path) -> None:
    async with watched(tmp_path, replicas=2, max_num_seqs=1) as gate:
        asked = [asyncio.ensure_future(gate.ask(chat(user=str(number)))) for number in range(6)]
        await until(lambda: all(engine.calls for engine in gate.engines))
        await until(lambda: sum(len(endpoint.queue) for endpoint in gate.endpoints) == 4)
        gate.engines[1].script = hello
        (call,) = gate.engines[1].calls
        await hello(call)  # this one works; the other one hangs
        await until(lambda: gate.stats.outcomes["served"] == 5)
        assert not stuck_events(gate), "an engine that is done takes what waits at the other one"
        await look(gate, LIMIT_S + 2)
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 6, "the one that ran there was tried again"
        assert len(stuck_events(gate)) == 1 and "stub#1" in stuck_events(gate)[0]
        assert await gate.settled() == {"served": 6}
