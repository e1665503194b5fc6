"""Five hundred clients that send a byte now and then, and one that wants to be served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from .front import Client, Front, chat, front, request, until

N_SLOW = 500
PLACES = (  # where in their request they have stopped
    b"POST /v1/chat/compl",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-slow: ",
    request(b"{" * 100)[:-50],
    b"POST /v1/messages HTTP/1.1\r\nhost: a\r\nauthorization: Bearer the-key\r\ncontent-length: 900\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{",
)


@asynccontextmanager
async def slowed(folder: Path) -> AsyncIterator[tuple[Front, list[Client]]]:
    """A gateway, and clients that have stopped in their requests."""
    async with front(folder) as gate:
        clients = [await gate.client() for _ in range(N_SLOW)]
        for index, client in enumerate(clients):
            client.send(PLACES[index % len(PLACES)])
        await until(lambda: len(gate.connections) == N_SLOW)
        yield gate, clients


def drip(clients: list[Client]) -> None:
    for client in clients:
        client.send(b"a")


@pytest.mark.anyio
async def test_slow_clients_do_not_stop_a_normal_one(tmp_path: Path) -> None:
    async with slowed(tmp_path) as (gate, clients):
        for turn in range(10):
            drip(clients)
            answer = await gate.ask(chat(stream=turn % 2 == 0))
            assert answer.status == 200
            assert (await gate.ask(request(path="/health", method="GET"))).status == 200


@pytest.mark.anyio
async def test_slow_clients_are_told_and_closed_whatever_they_still_send(tmp_path: Path) -> None:
    async with slowed(tmp_path) as (gate, clients):
        for _ in range(3):
            drip(clients)
            await asyncio.sleep(0)
        gate.sweep(60)  # their deadline is of the whole head or body, so a byte now and then does not move it
        first_words = await asyncio.gather(*(client.reader.read(12) for client in clients))
        assert {*first_words} <= {b"HTTP/1.1 408", b"HTTP/1.1 401", b"HTTP/1.1 400"}
        gate.sweep(120)  # those that read and do not close are closed
        await until(lambda: not gate.connections)
        assert (await gate.ask(chat())).json["choices"]
        assert (await gate.settled())["served"] == 1
