"""Clients that leave, at any point of their request: the engine's slots are free again at once, and no memory stays.

LAYA_FULL=1 runs the counts of a release (200 streams, 50 whole, 50 in prefill) and holds its deadlines.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from .live import FULL, Serving, is_idle, model_state, plain, prompt_of, until, user

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

N_STREAMS, N_WHOLE, N_PREFILL = (200, 50, 50) if FULL else (40, 10, 6)
AT_ONCE = 8
# What is left of each answer takes minutes, so a slot is not free by having come to its end.
TOKENS_LEFT = 3000
FREE_AFTER_S, FREE_AFTER_PREFILL_S = (1.0, 2.0) if FULL else (10.0, 20.0)
FLAT_BYTES = 8 * 1024 * 1024


@pytest.fixture(scope="module")
def server(server: Serving, start_server: Callable[..., Any]) -> Serving:
    """The shared one; where its deadlines count, one that computes on every core, as a user's does."""
    return start_server("smollm2", "--max-num-seqs", "2", "--max-seq-len", "4096") if FULL else server


async def leave(server: Serving, body: dict[str, Any], after_s: float, after: bytes | None = None) -> bytes:
    """Ask, read for a while, or until `after` has come, and close. Gives what had come by then."""
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = json.dumps(body | {"model": "smollm2", "max_tokens": TOKENS_LEFT, "ignore_eos": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
    )
    read = b""

    async def read_on() -> None:
        nonlocal read
        while piece := await reader.read(65536):
            read += piece
            if after is not None and after in read:
                return

    try:
        await asyncio.wait_for(read_on(), after_s)
    except asyncio.TimeoutError:
        pass
    writer.transport.abort()
    return read


async def leave_all(server: Serving, visits: list[tuple[dict[str, Any], float]]) -> list[bytes]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(body: dict[str, Any], after_s: float) -> bytes:
        async with places:
            return await leave(server, body, after_s)

    return await asyncio.gather(*(one(body, after_s) for body, after_s in visits))


def resident_bytes(server: Serving) -> tuple[int, int]:
    """Of the gateway and of its engine."""
    return psutil.Process(server.pid).memory_info().rss, psutil.Process(model_state(server)["pid"]).memory_info().rss


def counted(server: Serving) -> tuple[int, int]:
    """Requests that have arrived, and those that were cancelled."""
    with plain(server) as client:
        state = client.get("/admin/state").json()
    assert state["arrivals"] == state["in_flight"] + sum(state["outcomes"].values())
    return state["arrivals"], state["outcomes"]["cancelled"]


def test_clients_that_leave_free_their_slots(server: Serving) -> None:
    draw = random.Random(1)
    before = counted(server)
    asyncio.run(leave_all(server, [({"messages": user("Hi"), "stream": True}, 0.3)] * AT_ONCE))  # buffers are there
    until(lambda: is_idle(server))
    held = resident_bytes(server)
    visits = [
        ({"messages": user(f"Tell story {index}."), "stream": index < N_STREAMS}, draw.uniform(0.0, 0.5))
        for index in range(N_STREAMS + N_WHOLE)
    ]
    draw.shuffle(visits)
    answers = asyncio.run(leave_all(server, visits))
    until(lambda: is_idle(server), FREE_AFTER_S)
    arrived, cancelled = (now - then for now, then in zip(counted(server), before, strict=True))
    assert len(visits) // 2 < cancelled <= arrived <= AT_ONCE + len(visits)  # some may leave before they are heard
    assert any(b'"content"' in answer for answer in answers)  # some had begun to read
    assert not all(answers)  # some had not
    for now, then in zip(resident_bytes(server), held, strict=True):
        assert now - then < FLAT_BYTES


def test_clients_that_leave_during_prefill_free_their_slots(server: Serving) -> None:
    draw = random.Random(2)
    waits_s = []
    for index in range(N_PREFILL):
        body = {"messages": user(prompt_of(2000, seed=f"story {index} {draw.random()}")), "stream": index % 2 == 0}
        answer = asyncio.run(leave(server, body, draw.uniform(0.3, 2.5)))
        assert b'"content"' not in answer
        waits_s.append(until(lambda: is_idle(server)))
    assert max(waits_s) < FREE_AFTER_PREFILL_S, sorted(round(wait_s, 2) for wait_s in waits_s)


def test_slot_serves_the_next_client_after_one_has_left(server: Serving) -> None:
    fields = {"model": "smollm2", "messages": user("Name three colours."), "max_tokens": 6, "temperature": 0}
    with plain(server) as client:
        before = client.post("/v1/chat/completions", json=fields).json()
        asyncio.run(leave_all(server, [({"messages": user("Hi"), "stream": True}, 0.3)] * 4))
        after = client.post("/v1/chat/completions", json=fields).json()
    assert after["choices"] == before["choices"]


def test_prefill_shows_in_the_state_and_as_comments(server: Serving) -> None:
    body = {"messages": user(prompt_of(1000, seed="shown")), "stream": True}

    async def watch() -> bytes:
        asking = asyncio.create_task(leave(server, body, 60, after=b"\r\n: prefill "))
        shown: list[Any] = []
        while not asking.done():
            await asyncio.sleep(0.1)
            shown += (await asyncio.to_thread(model_state, server))["requests"]
        prefills = [request for request in shown if request.get("prompt_tokens")]
        assert prefills and all(request["phase"] == "prefill" for request in prefills)
        assert 0 <= prefills[-1]["prefill_tokens"] <= prefills[-1]["prompt_tokens"]
        return await asking

    answer = asyncio.run(watch())
    assert b"\r\n: prefill " in answer
    assert b"prompt_progress" not in answer
    until(lambda: is_idle(server))
