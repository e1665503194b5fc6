"""What `/v1/requests` tells: what a request waits for, where the time of an ended one went; to its own key alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from laya.errors import MemoryBusy
from laya.gateway.recent import QUICK_S
from laya.gateway.request_view import listed

from .front import front, until
from .keyed import chat_as, get_as, grant, keep
from .scripted_engine import STREAM_HEAD, Call, chunk, delta
from .test_request_log import ask_for_log
from .test_roles import held

pytestmark = pytest.mark.anyio


async def test_request_that_waits_says_for_what_and_ended_ones_are_their_keys_own(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob"))
    end = asyncio.Event()
    async with front(tmp_path, held(end), max_num_seqs=1) as gateway:
        first, second = await gateway.client(), await gateway.client()
        first.send(chat_as("ann", "x-request-id: runs"))
        await until(lambda: gateway.engine.calls)
        second.send(chat_as("bob", "x-request-id: waits"))
        await until(lambda: gateway.endpoint.queue)
        (waits,) = (await gateway.ask(get_as("bob", "/v1/requests"))).json["data"]
        assert waits["waits_for"] == "a place at stub: 1 of 1 taken"
        assert waits["client"] == "127.0.0.1"
        live = (await gateway.ask(get_as("bob", "/v1/requests/waits"))).json
        assert [part["part"] for part in live["parts"]] == ["read", "route", "load", "queue"]
        assert live["route"]["tried"][0]["candidates"][0]["name"] == "stub"
        assert (await gateway.ask(get_as("bob", "/v1/requests/runs"))).status == 404
        await gateway.ask(get_as("ann", "/v1/requests/runs", "DELETE"))
        assert (await first.answer()).status == 499

        async def ended(who: str) -> list[str]:
            return [each["id"] for each in (await gateway.ask(get_as(who, "/v1/requests?ended=5"))).json["ended"]]

        assert (await ended("ann"), await ended("bob"), await ended("admin")) == (["runs"], [], ["runs"])
        told = (await gateway.ask(get_as("ann", "/v1/requests/runs"))).json
        assert (told["outcome"], told["error"]["code"]) == ("cancelled", "request_cancelled")
        assert told["route"]["verdicts"] == []  # rules are the admins'
        assert (told["body"], told["is_captured"]) == (None, False)
        total_ms = sum(part["ms"] for part in told["parts"])
        assert total_ms == pytest.approx(1e3 * told["age_s"], abs=2)
        assert (await gateway.ask(get_as("bob", "/v1/requests/runs"))).status == 404
        second.close()
        await gateway.settled()


async def test_who_waits_for_an_engine_hears_what_that_waits_for(tmp_path: Path) -> None:
    """Only what it may know of: another model has no name for a key that may not use it."""
    keep(tmp_path, grant("admin", role="admin"), grant("ann", models=("stub",)))
    end = asyncio.Event()
    async with front(tmp_path, held(end), max_num_seqs=1) as gateway:
        first, second = await gateway.client(), await gateway.client()
        first.send(chat_as("admin"))
        await until(lambda: gateway.engine.calls)
        second.send(chat_as("ann"))
        await until(lambda: gateway.endpoint.queue)
        fleet, (waits,) = gateway.gateway.fleet, gateway.endpoint.queue
        pool, gateway.endpoint.pool = gateway.endpoint.pool, None
        gateway.endpoint.no_room = MemoryBusy("", 1.0, need_bytes=2, available_bytes=1, held_bytes={"qwen": 1})

        def told(*known: str) -> str:
            return str(listed(waits, fleet, time.monotonic(), lambda model_id: model_id in known)["waits_for"])

        assert (told("stub", "qwen"), told("stub")) == ("qwen to be done", "another model to be done")
        gateway.endpoint.no_room = None
        assert told("stub") == "stub to load"
        gateway.endpoint.pool = pool
        for client in (first, second):
            client.close()
        await gateway.settled()


async def test_what_a_failed_request_said_is_told_where_it_is_captured(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"))

    async def breaks(call: Call) -> None:
        call.write(STREAM_HEAD + chunk(delta(content="Hel")))
        await asyncio.sleep(QUICK_S)
        call.abort()

    async with front(tmp_path, breaks) as gateway:
        ask_for_log(gateway, tmp_path / "requests.jsonl", content=True)
        assert (await gateway.ask(chat_as("ann", "x-request-id: broken"))).status == 502
        told = (await gateway.ask(get_as("ann", "/v1/requests/broken"))).json
    assert (told["outcome"], told["engine"], told["is_captured"]) == ("failed", "stub", True)
    assert told["error"]["code"] == "engine_crashed"
    assert [part["part"] for part in told["parts"]] == ["read", "route", "load", "queue", "prefill", "decode"]
    assert '"messages"' in told["body"]
