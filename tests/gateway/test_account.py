"""Limits of a key, and of a model: at once, requests and tokens a minute; what is refused says the numbers and when to
come again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from laya.config.model_limits import ModelLimits
from laya.gateway.account import Key
from laya.gateway.metering import MINUTE_S, Bucket, Metered
from laya.gateway.retry import counts_there

from .front import CHAT, Answer, Front, front, request, until
from .keyed import chat_as, get_as, grant, keep, secret
from .scripted_engine import META, STREAM_HEAD, Call, chunk, delta, hello, progress, streams, usage, whole

pytestmark = pytest.mark.anyio


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


# the bucket
@given(
    per_minute=st.integers(1, 100_000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 100_000)), max_size=50),
)
def test_bucket_never_lets_more_through_than_two_minutes_worth_in_any_minute(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    taken: list[tuple[float, int]] = []
    for passed_s, amount in steps:
        clock.now_s += passed_s
        if bucket.wait_s(amount) == 0:
            bucket.take(amount)
            taken.append((clock.now_s, amount))
        assert 0 <= bucket.level() <= per_minute
    for start_s, _ in taken:
        assert sum(n for at_s, n in taken if start_s <= at_s < start_s + MINUTE_S) <= 2 * per_minute


@given(per_minute=st.integers(1, 100_000), used=st.integers(0, 200_000), share=st.floats(0.01, 1))
def test_bucket_keeps_its_word_about_the_wait(per_minute: int, used: int, share: float) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    bucket.take(used)
    amount = per_minute * share
    clock.now_s += bucket.wait_s(amount) + 1e-6
    assert bucket.wait_s(amount) == pytest.approx(0, abs=1e-3)


def test_limit_that_changes_keeps_what_was_used() -> None:
    key = Key(grant("a", tokens_per_minute=100))
    assert key.tokens is not None
    key.tokens.take(80)
    key.apply(grant("a", tokens_per_minute=1000))
    assert key.tokens.level() == pytest.approx(920, abs=1)
    key.apply(grant("a"))
    assert key.tokens is None and not key.is_bound


@pytest.mark.parametrize(
    ("fields", "is_bound"),
    [({}, False), ({"role": "admin"}, False), ({"role": "metrics"}, True), ({"models": ("m",)}, True),
     ({"max_concurrent": 1}, True), ({"requests_per_minute": 1}, True), ({"tokens_per_minute": 1}, True),
     ({"expires_s": 2e9}, False)],
)  # fmt: skip
def test_key_without_limits_is_not_looked_at(fields: dict[str, Any], is_bound: bool) -> None:
    assert Key(grant("a", **fields)).is_bound is is_bound


# through the gateway
def limit_of(answer: Answer) -> tuple[int, str, int, int, int]:
    error = answer.error
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert "x-should-retry" not in answer.headers
    return answer.status, error["limit"], error["allowed"], error["used"], error["asked"]


async def test_so_many_at_once_waiting_ones_too(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", max_concurrent=2), grant("bob", max_concurrent=2))
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        await hello(call)

    async with front(tmp_path, script, max_num_seqs=1) as gateway:
        clients = [await gateway.client() for _ in range(3)]
        for client, who in zip(clients, ("ann", "ann", "bob"), strict=True):
            client.send(chat_as(who))
        await until(lambda: gateway.engine.calls and len(gateway.endpoint.queue) == 2)
        assert limit_of(await gateway.ask(chat_as("ann"))) == (429, "max_concurrent", 2, 2, 1)
        for path in ("/v1/models", "/v1/requests"):  # limits are of inference alone
            assert (await gateway.ask(get_as("ann", path))).status == 200
        clients[1].close()  # who leaves makes room
        await until(lambda: len(gateway.endpoint.queue) == 1)
        go_on.set()
        assert (await gateway.ask(chat_as("ann"))).status == 200
        assert [(await each.answer()).status for each in (clients[0], clients[2])] == [200, 200]
        assert await gateway.settled() == {"served": 3, "refused": 1, "cancelled": 1}
        assert [key.n_running for key in gateway.gateway.keys.keys] == [0, 0, 0, 0]


async def test_so_many_requests_a_minute(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", requests_per_minute=3), grant("bob"))
    async with front(tmp_path) as gateway:
        client = await gateway.client()
        assert [(await client.ask(chat_as("ann"))).status for _ in range(3)] == [200] * 3
        refused = await client.ask(chat_as("ann"))
        assert limit_of(refused) == (429, "requests_per_minute", 3, 3, 1)
        assert 15 <= int(refused.headers["retry-after"]) <= 20
        assert (await client.ask(chat_as("bob"))).status == 200
        key = gateway.gateway.keys.find("ann")
        assert key.requests is not None
        key.requests._at_s -= int(refused.headers["retry-after"])  # as if that had passed
        assert (await client.ask(chat_as("ann"))).status == 200


def left(gateway: Front, name: str) -> int:
    bucket = gateway.gateway.keys.find(name).tokens
    assert bucket is not None
    return round(bucket.level())


# a bound of 60 bytes and more for the body, so that what is charged is far from what is used
@pytest.mark.parametrize("cancels_whole", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_are_charged_by_their_bound_and_settled_by_what_was_used(
    tmp_path: Path, stream: bool, cancels_whole: bool
) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=100_000))
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        await hello(call)

    async with front(tmp_path, script, cancels_whole=cancels_whole) as gateway:
        client = await gateway.client()
        client.send(chat_as("ann", stream=stream, max_tokens=500))
        await until(lambda: gateway.engine.calls)
        assert 100_000 - 500 - 200 < left(gateway, "ann") < 100_000 - 500 - 60
        go_on.set()
        assert (await client.answer()).status == 200
        await gateway.settled()
        assert left(gateway, "ann") >= 100_000 - 11  # 9 read, 2 written; and some came back meanwhile


async def test_embeddings_are_settled_by_the_engines_count(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=6))
    answer = {"object": "list", "data": [], "usage": {"prompt_tokens": 4, "total_tokens": 4}}

    async def script(call: Call) -> None:
        call.write(whole(META | answer))

    async with front(tmp_path, script, model={"task": "embed"}) as gateway:
        asked = request({"model": "stub", "input": "hello there"}, "/v1/embeddings", key=secret("ann"))
        assert (await gateway.ask(asked)).status == 200
        await gateway.settled()
        assert left(gateway, "ann") == 2


async def test_more_tokens_than_are_left_are_refused_with_the_numbers(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=1000))
    async with front(
        tmp_path, streams(progress(400, 400), delta(content="x"), delta("stop"), usage(400, 300))
    ) as gateway:
        assert (
            await gateway.ask(chat_as("ann", max_tokens=300))
        ).status == 502  # it had no [DONE]: nobody's fault here
        await gateway.settled()
        assert left(gateway, "ann") == 1000
        gateway.engine.script = streams(
            progress(400, 400), delta(content="x"), delta("stop"), usage(400, 300), b"data: [DONE]\n\n"
        )
        assert (await gateway.ask(chat_as("ann", max_tokens=300))).status == 200
        refused = await gateway.ask(chat_as("ann", max_tokens=300))
        status, limit, allowed, used, asked = limit_of(refused)
        assert (status, limit, allowed) == (429, "tokens_per_minute", 1000)
        assert 690 <= used <= 700 and 360 <= asked <= 500
        wait_s = (asked - (allowed - used)) * 60 / allowed
        assert wait_s - 1 <= int(refused.headers["retry-after"]) <= wait_s + 2
        assert f"may take {asked}" in refused.error["message"]
        assert len(gateway.engine.calls) == 2


async def test_a_request_above_a_whole_minutes_worth_waits_for_a_full_minute_not_forever(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=50))
    async with front(tmp_path) as gateway:
        assert (await gateway.ask(chat_as("ann", max_tokens=4000))).status == 200
        refused = await gateway.ask(chat_as("ann", max_tokens=4000))
        assert limit_of(refused)[4] == 50
        assert int(refused.headers["retry-after"]) <= 14  # for the 11 that were used


async def test_an_answer_above_its_bound_is_owed(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=1000))
    long = streams(progress(9, 9), delta(content="x"), delta("stop"), usage(9, 5000), b"data: [DONE]\n\n")
    async with front(tmp_path, long) as gateway:
        assert (await gateway.ask(chat_as("ann"))).status == 200
        assert -4010 <= left(gateway, "ann") <= -3990
        refused = await gateway.ask(chat_as("ann", max_tokens=1))
        assert limit_of(refused)[3] >= 4990


async def test_what_was_written_for_who_left_counts_and_what_was_not_does_not(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=10_000))
    never = asyncio.Event()

    async def script(call: Call) -> None:
        call.write(STREAM_HEAD + chunk(progress(90, 90)) + chunk(delta(role="assistant", content=None)))
        for _ in range(10):
            call.write(chunk(delta(content="word ")))
        await never.wait()

    async with front(tmp_path, script) as gateway:
        client = await gateway.client()
        client.send(chat_as("ann", stream=True, max_tokens=5000))
        await client.head()
        read = 0
        async for piece in client.pieces():
            read += piece.count(b"word ")
            if read == 10:
                break
        client.close()
        assert await gateway.settled() == {"cancelled": 1}
        assert 10_000 - 102 <= left(gateway, "ann") <= 10_000 - 98


async def test_what_was_refused_costs_nothing(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=100_000))
    async with front(tmp_path) as gateway:
        too_long = chat_as("ann", messages=[{"role": "user", "content": "x" * 20_000}], max_tokens=10)
        gateway.engine.prompt_tokens = 9000
        assert (await gateway.ask(too_long)).error["code"] == "context_length_exceeded"
        assert (await gateway.ask(chat_as("ann", model="nothing"))).status == 404
        assert left(gateway, "ann") == 100_000


async def test_metrics_tell_keys_by_name_and_no_secret(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("zaphod", requests_per_minute=1))
    async with front(tmp_path) as gateway:
        for _ in range(2):
            await gateway.ask(chat_as("zaphod"))
        text = (await gateway.ask(get_as("admin", "/metrics"))).body.decode()
        assert 'laya_key_requests_total{key="zaphod",outcome="served"} 1.0' in text
        assert secret("zaphod") not in text and secret("admin") not in text


async def test_other_apis_count_against_the_same_limits(tmp_path: Path) -> None:
    """A translated API goes the same steps: one request each, charged, settled and refused alike."""
    keep(tmp_path, grant("admin", role="admin"), grant("ann", requests_per_minute=2, tokens_per_minute=10_000))
    keep(tmp_path, grant("kid", models=("other",)))
    asked = {"model": "stub", "input": "hi", "max_output_tokens": 20, "store": False}
    async with front(tmp_path) as gateway:

        async def respond(name: str) -> Answer:
            return await gateway.ask(request(asked, "/v1/responses", key=secret(name)))

        assert (await respond("ann")).status == 200
        assert (await gateway.ask(chat_as("ann"))).status == 200
        assert limit_of(await respond("ann")) == (429, "requests_per_minute", 2, 2, 1)
        assert (await respond("kid")).error["code"] == "forbidden_model"
        await gateway.settled()
        assert left(gateway, "ann") >= 10_000 - 22


# of a model
@pytest.mark.parametrize("cancels_whole", [True, False])
@pytest.mark.parametrize("asked", ["requests_per_minute", "tokens_per_minute"])
async def test_model_has_limits_that_all_keys_share(tmp_path: Path, asked: str, cancels_whole: bool) -> None:
    """Also where its engine would get plain bodies as they came; a key's own limits stay its own."""
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob", requests_per_minute=9))
    limits = ModelLimits(**{asked: {"requests_per_minute": 2, "tokens_per_minute": 600}[asked]})
    async with front(tmp_path, cancels_whole=cancels_whole, model={"limits": limits, "replicas": 2}) as gateway:
        client = await gateway.client()
        for who in ("ann", "bob"):
            assert (await client.ask(chat_as(who, max_tokens=300))).status == 200
        refused = await client.ask(chat_as("bob", max_tokens=580))
        status, limit, allowed, used, _ = limit_of(refused)
        assert (status, limit, allowed) == (429, asked, getattr(limits, asked))
        assert refused.error["message"].startswith("The model 'stub' may use")
        assert used == 2 or 18 <= used <= 22  # 11 tokens of each answer
        await gateway.settled()
        assert gateway.endpoint.use is not None and gateway.endpoint.use.n_running == 0


class Moved:
    """As much of a request as is counted."""

    arrived_s = 0.0
    charged_tokens = 0


async def test_request_that_moves_counts_once_against_the_limits_of_the_model_that_serves_it(tmp_path: Path) -> None:
    async with front(tmp_path, model={"replicas": 2, "limits": ModelLimits(max_concurrent=1)}) as gateway:
        first, second = gateway.gateway.fleet.replicas(gateway.endpoint)
        other: Any = SimpleNamespace(use=Metered())
        other.use.limit("The model 'other'", ModelLimits(max_concurrent=1))
        asked: Any = Moved()
        another: Any = Moved()
        assert first.use is second.use is not None
        first.use.begin(asked)
        assert counts_there(asked, first, second) and first.use.n_running == 1
        assert counts_there(asked, second, other) and (first.use.n_running, other.use.n_running) == (0, 1)
        first.use.begin(asked)
        assert not counts_there(another, first, other) and other.use.n_running == 1


async def test_so_many_of_a_model_at_once_until_a_reload_lets_in_more(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        await hello(call)

    async with front(tmp_path, script, model={"limits": ModelLimits(max_concurrent=1)}) as gateway:
        first, endpoint = await gateway.client(), gateway.endpoint
        first.send(request(CHAT))
        await until(lambda: gateway.engine.calls)
        assert limit_of(await gateway.ask(request(CHAT))) == (429, "max_concurrent", 1, 1, 1)
        assert endpoint.use is not None
        endpoint.use.limit("The model 'stub'", ModelLimits(max_concurrent=2))
        second = await gateway.client()
        second.send(request(CHAT))
        await until(lambda: len(gateway.engine.calls) == 2)
        go_on.set()
        assert [(await each.answer()).status for each in (first, second)] == [200, 200]
        assert await gateway.settled() == {"served": 2, "refused": 1}
        assert endpoint.use.n_running == 0
