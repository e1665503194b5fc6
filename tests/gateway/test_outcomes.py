"""A thousand requests at 64 connections, good, bad, left and broken: each one has exactly one outcome."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .live import MODEL, Serving, is_idle, model_state, plain, until

pytestmark = pytest.mark.engine

N_REQUESTS, CONNECTIONS = 1000, 64
GOOD: dict[str, Any] = {"model": "smollm2", "prompt": "Hi", "max_tokens": 1}
LONG = GOOD | {"stream": True, "max_tokens": 500, "ignore_eos": True}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("whole", GOOD),
    ("streamed", GOOD | {"stream": True}),
    ("unknown model", GOOD | {"model": "no-such-model"}),
    ("bad value", GOOD | {"temperature": 9}),
    ("wrong shape", {"model": "smollm2", "prompt": {"a": 1}}),
    ("left", LONG),
]
WEIGHTS = (55, 15, 8, 7, 5, 10)


@pytest.fixture(scope="module")
def busy(start_server: Callable[..., Any]) -> Iterator[Serving]:
    """Many short sequences, so that a thousand requests take seconds."""
    server = start_server("smollm2", "--max-num-seqs", "8", "--max-seq-len", "256", "--n-threads", "1")
    yield server
    assert server.stop() == 0


async def request(server: Serving, kind: str, body: dict[str, Any], kill: Callable[[], None]) -> str:
    """One request on a connection of its own; the status the client saw, or "left". "killed": so is its engine."""
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    if kind == "left":
        await asyncio.sleep(random.uniform(0.0, 0.3))
        writer.transport.abort()
        return "left"
    answer = b""
    if kind == "killed":
        answer = await reader.readuntil(b"data: ")
        kill()
    answer += await reader.read(-1)
    writer.close()
    status = answer.split(b" ", 2)[1].decode()
    return "broken" if status == "200" and b'"error"' in answer else status


async def thousand(server: Serving, kill: Callable[[], None]) -> Counter[tuple[str, str]]:
    random.seed(4)
    kinds = random.choices(KINDS, WEIGHTS, k=N_REQUESTS)
    kinds[N_REQUESTS // 2] = ("killed", LONG)
    places = asyncio.Semaphore(CONNECTIONS)
    seen: Counter[tuple[str, str]] = Counter()

    async def one(kind: str, body: dict[str, Any]) -> None:
        async with places:
            status = await request(server, kind, body, kill)
        seen[kind, status] += 1

    await asyncio.gather(*(one(kind, body) for kind, body in kinds))
    return seen


def test_a_thousand_requests_have_a_thousand_outcomes(busy: Serving) -> None:
    pid = model_state(busy)["pid"]
    seen = asyncio.run(thousand(busy, kill=lambda: os.kill(pid, signal.SIGKILL)))
    until(lambda: is_idle(busy))
    assert seen.total() == N_REQUESTS
    by_status: Counter[str] = Counter()
    for (_, status), count in seen.items():
        by_status[status] += count
    assert set(by_status) <= {"200", "400", "404", "429", "502", "503", "left", "broken"}, seen
    with plain(busy) as client:
        state = client.get("/admin/state").json()
        text = client.get("/metrics").text
    outcomes = state["outcomes"]
    assert state["arrivals"] == sum(outcomes.values()) == N_REQUESTS
    assert state["in_flight"] == 0
    assert outcomes["served"] >= by_status["200"]  # a client may leave an answer that was already whole
    assert seen["killed", "broken"] == 1 and outcomes["failed"] > 0
    assert outcomes["refused"] > 0 < outcomes["cancelled"] <= by_status["left"]
    assert model_state(busy)["state"] == "ready"
    assert model_state(busy)["restarts"] == 1
    agree_with_metrics(text, outcomes)


def agree_with_metrics(text: str, outcomes: dict[str, int]) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in families["laya_arrivals"].samples] == [N_REQUESTS]
    assert [sample.value for sample in families["laya_requests_in_flight"].samples] == [0]
    counted: Counter[str] = Counter()
    for sample in families["laya_requests"].samples:
        assert sample.labels["model"] in (MODEL, "")  # no name that a client made up becomes a label
        counted[sample.labels["outcome"]] += int(sample.value)
    assert counted == Counter(outcomes)
