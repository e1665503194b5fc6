"""Request bodies of all connections together are bounded, and what holds them lets go however it ends."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.gateway.limits import BODIES_AT_ONCE, SMALL_BODY_BYTES, BodyBudget, Limits
from laya.gateway.listening import allow_connections

from .front import CHAT, KEY, Client, Front, chat, front, request, until
from .scripted_engine import Call, hello

BODY_BYTES = 4 * SMALL_BODY_BYTES
HEAD = request(headers=(f"content-length: {BODY_BYTES}",))
anyio = pytest.mark.anyio


def budget(gate: Front) -> BodyBudget:
    return gate.limits.bodies


def full_body() -> bytes:
    """A valid body of exactly BODY_BYTES."""
    data = request(CHAT).partition(b"\r\n\r\n")[2]
    return data + b" " * (BODY_BYTES - len(data))


@given(st.lists(st.integers(0, 60), max_size=30))
def test_budget_never_holds_more_than_its_limit(sizes: list[int]) -> None:
    budget = BodyBudget(100)
    held = []
    for size in sizes:
        if budget.try_take(size):
            held.append(size)
        elif held:
            budget.give_back(held.pop(0))
        assert budget.held_bytes == sum(held) <= 100


def test_budget_follows_from_the_largest_body() -> None:
    limits = Limits(max_body_bytes=1000, header_timeout_s=1, body_timeout_s=1, keep_alive_s=1)
    assert limits.bodies.limit_bytes == BODIES_AT_ONCE * 1000


def test_open_files_are_raised_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert allow_connections(512) == 512
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, before[1])
        assert allow_connections(300) == 512
        if before[1] != resource.RLIM_INFINITY:
            assert allow_connections(before[1] + 1) == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def fill(gate: Front) -> list[Client]:
    """Clients that hold all the bytes there are, each with a body that is all but complete."""
    clients = []
    while budget(gate).held_bytes + BODY_BYTES - 1 <= budget(gate).limit_bytes:
        held = budget(gate).held_bytes
        client = await gate.client()
        client.send(HEAD + full_body()[:-1])
        await until(lambda held=held: budget(gate).held_bytes == held + BODY_BYTES - 1)
        clients.append(client)
    return clients


@anyio
async def test_bodies_beyond_the_budget_are_refused_and_small_ones_are_not(tmp_path: Path) -> None:
    async with front(tmp_path, server={"max_body_bytes": BODY_BYTES}, planned=WIDE) as gate:
        clients = await fill(gate)
        assert len(clients) == BODIES_AT_ONCE
        answer = await gate.ask(request(full_body()))
        assert (answer.status, answer.error["code"]) == (503, "server_busy")
        assert answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
        assert (await gate.ask(chat())).status == 200

        clients.pop().abort()
        await until(lambda: budget(gate).held_bytes < budget(gate).limit_bytes - BODY_BYTES)
        assert (await gate.ask(request(full_body()))).status == 200
        for client in clients:
            client.send(b" ")
        assert [(await client.answer()).status for client in clients] == [200] * len(clients)
        assert budget(gate).held_bytes == 0
        assert await gate.settled() == {"served": 2 + len(clients), "refused": 1, "cancelled": 1}


WIDE = {"max_seq_len": 2**20, "slot_tokens": 2**20, "kv_pool_tokens": 2**22}


@anyio
async def test_body_is_held_until_the_engine_answers(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await hello(call)

    async with front(tmp_path, slow, max_num_seqs=1, planned=WIDE) as gate:
        clients = [await gate.client() for _ in range(3)]
        for client in clients:
            client.send(request(full_body()))
        await until(lambda: gate.engine.calls and len(gate.endpoint.queue) == 2)
        assert budget(gate).held_bytes == 3 * BODY_BYTES
        clients[2].abort()  # from the queue
        await until(lambda: budget(gate).held_bytes == 2 * BODY_BYTES)
        assert len(gate.endpoint.queue) == 1
        release.set()
        assert [(await client.answer()).status for client in clients[:2]] == [200, 200]
        assert budget(gate).held_bytes == 0


@anyio
async def test_long_answer_does_not_hold_its_body(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        call.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await release.wait()

    async with front(tmp_path, slow, planned=WIDE) as gate:
        client = await gate.client()
        client.send(request(full_body()))
        await until(lambda: gate.engine.calls and not budget(gate).held_bytes)
        exchange = next(iter(gate.endpoint.live))
        assert not exchange.body and not exchange.upstream_body and not exchange.parsed.data


@anyio
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"x" * BODY_BYTES, 400),
        (HEAD + full_body().replace(b"stub", b"nope"), 404),
        (HEAD.replace(KEY.encode(), b"bad") + full_body(), 401),
        (HEAD.replace(b"%d" % BODY_BYTES, b"%d" % (2 * BODY_BYTES)) + full_body(), 413),
    ],
)
async def test_refused_bodies_are_let_go(tmp_path: Path, sent: bytes, status: int) -> None:
    async with front(tmp_path, server={"max_body_bytes": BODY_BYTES}) as gate:
        assert (await gate.ask(sent)).status == status
        assert budget(gate).held_bytes == 0


@anyio
async def test_bodies_that_time_out_or_leave_are_let_go(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        clients = [await gate.client() for _ in range(2)]
        for client in clients:
            client.send(HEAD + b"x" * (BODY_BYTES - 1))
        await until(lambda: budget(gate).held_bytes == 2 * (BODY_BYTES - 1))
        clients[0].abort()
        await until(lambda: budget(gate).held_bytes == BODY_BYTES - 1)
        gate.sweep(100)
        assert (await clients[1].answer()).status == 408
        assert budget(gate).held_bytes == 0
        assert await gate.settled() == {"cancelled": 1, "refused": 1}
