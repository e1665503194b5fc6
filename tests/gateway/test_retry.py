"""What one replica fails another serves: before the first byte, once, within the budget; and what that tells of it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from laya.config.routing import RouteRule, RoutingConfig
from laya.routing.endpoint_twin import CLOSED, OPEN, TRIP_AFTER
from laya.routing.health import COOL_DOWN_S

from .front import Front, chat, front
from .scripted_engine import STREAM_HEAD, Call, answers, chunk, delta, hello, progress, streams, whole

pytestmark = pytest.mark.anyio
SESSIONS = itertools.count()


async def breaks_off(call: Call) -> None:
    """It dies with the request in its hands."""
    call.write(STREAM_HEAD + chunk(progress(4, 9)))
    await asyncio.sleep(0.005)
    call.abort()


async def fails(call: Call) -> None:
    call.write(whole({"error": {"message": "compute error", "code": 500}}, status=500))


def breaker(gate: Front, number: int) -> int:
    """Of the endpoint with this number, from 0."""
    state: int = gate.gateway.router.table.inspect(gate.endpoints[number].index)[1]
    return state


async def ask_of(gate: Front, number: int, **fields: object) -> int:
    """The status of a request whose session is at home at this endpoint."""
    router, wanted = gate.gateway.router, gate.endpoints[number].index
    for session in map(str, SESSIONS):
        index = router.choose("stub", session=session)
        router.settle(index, 0)
        if index == wanted:
            client = await gate.client()
            client.send(chat(user=session, **fields))
            return (await client.answer_so_far()).status
    raise AssertionError("SESSIONS never end")


async def ask_anew(gate: Front) -> int:
    """The status of a request that belongs nowhere yet."""
    name = str(next(SESSIONS))
    return (await gate.ask(chat(user=name, messages=[{"role": "user", "content": name}]))).status


@pytest.mark.parametrize("script", [breaks_off, fails])
async def test_failed_request_is_served_by_the_other_replica(tmp_path: Path, script: object) -> None:
    async with front(tmp_path, model={"replicas": 2}) as gate:
        gate.engines[0].script = script  # type: ignore[assignment]
        assert await ask_of(gate, 0) == 200
        assert [len(engine.calls) for engine in gate.engines] == [1, 1]
        assert gate.engines[0].bodies == gate.engines[1].bodies
        assert await gate.settled() == {"served": 1}
        assert gate.stats.retries == gate.stats.engine_errors == {"stub": 1}


async def test_stream_is_tried_again_before_its_first_byte_and_not_after(tmp_path: Path) -> None:
    async with front(tmp_path, model={"replicas": 2}) as gate:
        gate.engines[0].script = breaks_off
        assert await ask_of(gate, 0, stream=True) == 200
        assert await gate.settled() == {"served": 1}

        async def breaks_after_a_token(call: Call) -> None:
            await streams(delta(content="Hel"), ends=False)(call)
            await asyncio.sleep(0.005)
            call.abort()

        gate.engines[0].script = breaks_after_a_token
        assert await ask_of(gate, 0, stream=True) == 200
        assert [len(engine.calls) for engine in gate.engines] == [2, 1]
        assert await gate.settled() == {"served": 1, "failed": 1}


async def test_request_is_tried_twice_and_no_more(tmp_path: Path) -> None:
    async with front(tmp_path, fails, model={"replicas": 3}) as gate:
        answer = await gate.ask(chat())
        assert (answer.status, answer.error["message"]) == (503, "The engine of 'stub' failed: compute error")
        assert sum(len(engine.calls) for engine in gate.engines) == 2
        assert await gate.settled() == {"failed": 1}


async def test_retries_end_with_their_budget(tmp_path: Path) -> None:
    async with front(tmp_path, model={"replicas": 2}) as gate:
        gate.engines[0].script = fails
        statuses = [await ask_of(gate, 0) for _ in range(TRIP_AFTER - 1)]
        assert statuses == [200, 503, 503, 503], "a tenth of so few requests is the first one"
        assert await gate.settled() == {"served": 1, "failed": 3}


async def test_request_that_no_engine_saw_costs_no_budget(tmp_path: Path) -> None:
    """An engine that is gone takes no connection: whoever is sent to it goes on to the other one."""
    async with front(tmp_path, model={"replicas": 2}) as gate:
        await gate.engines[0].stop()
        assert [await ask_of(gate, 0) for _ in range(TRIP_AFTER - 1)] == [200] * (TRIP_AFTER - 1)
        assert gate.stats.retries == {}
        assert await gate.settled() == {"served": TRIP_AFTER - 1}


async def test_large_body_that_was_let_go_of_is_not_sent_again(tmp_path: Path) -> None:
    async with front(tmp_path, model={"replicas": 2}, planned={"max_seq_len": 10**6, "slot_tokens": 10**6}) as gate:
        gate.engines[0].script = breaks_off
        messages = [{"role": "user", "content": "x" * 100_000}]
        assert await ask_of(gate, 0, messages=messages) == 502
        assert await gate.settled() == {"failed": 1}


async def test_breaker_opens_lets_one_trial_through_and_closes(tmp_path: Path) -> None:
    async with front(tmp_path, model={"replicas": 2}) as gate:
        gate.engines[0].script = fails
        for _ in range(TRIP_AFTER):
            await ask_of(gate, 0)
        assert breaker(gate, 0) == OPEN
        n_calls = len(gate.engines[0].calls)
        assert {await ask_anew(gate) for _ in range(20)} == {200}
        assert len(gate.engines[0].calls) == n_calls, "an open breaker lets nothing through"
        gate.engines[0].script = hello
        gate.sweep(COOL_DOWN_S + 0.1)
        assert {await ask_anew(gate) for _ in range(40)} == {200}
        assert breaker(gate, 0) == CLOSED
        assert not gate.endpoints[0].is_troubled
        assert len(gate.engines[0].calls) > n_calls + 1
        await gate.settled()


OF_OTHERS = RoutingConfig(
    pools={"p": ["a", "b"], "alone": ["stub"]},
    rules=[RouteRule(model="x", to="a", fallbacks=["p"]), RouteRule(model="y", to="stub")],
)


@pytest.mark.parametrize("routing", [None, OF_OTHERS])
async def test_only_engine_of_a_model_is_asked_however_often_it_failed(
    tmp_path: Path, routing: RoutingConfig | None
) -> None:
    async with front(tmp_path, fails, routing=routing) as gate:
        assert {(await gate.ask(chat())).error["message"] for _ in range(3 * TRIP_AFTER)} == {
            "The engine of 'stub' failed: compute error"
        }
        gate.engine.script = hello
        assert (await gate.ask(chat())).status == 200


async def test_plain_lane_obeys_breakers_and_gives_verdicts(tmp_path: Path) -> None:
    """Requests that the native core routes on its own."""

    async def plain_hello(call: Call) -> None:
        call.write(whole({"choices": [], "model": "stub"}))

    async with front(tmp_path, plain_hello, cancels_whole=True, model={"replicas": 2}) as gate:
        for _ in range(8):
            assert await ask_anew(gate) == 200
        gate.engines[0].script = fails
        for _ in range(TRIP_AFTER):
            await ask_of(gate, 0)
        assert breaker(gate, 0) == OPEN
        gate.engines[0].script = answers(whole({"choices": [], "model": "stub"}))
        gate.sweep(COOL_DOWN_S + 0.1)
        assert {await ask_anew(gate) for _ in range(40)} == {200}
        assert breaker(gate, 0) == CLOSED
        await gate.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_request_of_the_plain_lane_is_served_by_the_other_replica(tmp_path: Path, stream: bool) -> None:
    async with front(tmp_path, cancels_whole=True, model={"replicas": 2}) as gate:
        for _ in range(16):  # connections to both are kept, so that requests go straight through
            assert await ask_anew(gate) == 200
        gate.engines[0].script = breaks_off if stream else fails
        assert await ask_of(gate, 0, stream=stream) == 200
        assert gate.engines[0].bodies[-1] == gate.engines[1].bodies[-1]
        assert gate.stats.retries == {"stub": 1}
        assert await gate.settled() == {"served": 17}


async def test_request_whose_engine_dies_while_it_is_counted_goes_to_the_other_one(tmp_path: Path) -> None:
    planned = {"max_seq_len": 2000, "slot_tokens": 2048}  # padded: the prompt's tokens are asked for
    async with front(tmp_path, model={"replicas": 2}, planned=planned) as gate:
        fleet, dying = gate.gateway.fleet, gate.endpoints[0]
        gate.supervisor.dead.add(dying.name)

        def count(body: object) -> int:
            fleet.engine_changed(dying.name, "failed", None)
            return 9

        gate.engines[0].count_of = count
        assert await ask_of(gate, 0) == 200
        assert [len(engine.calls) for engine in gate.engines] == [0, 1]
        assert await gate.settled() == {"served": 1}
