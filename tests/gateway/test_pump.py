"""Streams that the native pump relays: what it passes on, what brings a stream back, and that nothing is lost."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laya.gateway import pump, sse
from laya.gateway.pump import Pump

from .front import Client, Front, chat, front, until
from .scripted_engine import DONE, STREAM_HEAD, Call, chunk, delta, hello, hello_events, progress, usage

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(pump.StreamPump is None, reason="there is no native core here"),
]
START = [progress(9, 9), delta(role="assistant", content=None), delta(content="a")]
END = [delta("stop"), usage(), DONE]


class Paced:
    """An engine that waits, behind its first token, until the pump has relayed it."""

    def __init__(self, *then: bytes, last: Callable[[Call], None] | None = None) -> None:
        self.then = then  # bytes on the wire, each on its own once the one before is through, or has come back
        self.last = last
        self.gate: Front
        self.n_returned = 0

    @property
    def pump(self) -> Pump:
        return self.gate.gateway.dispatcher.streams

    async def __call__(self, call: Call) -> None:
        call.write(STREAM_HEAD + b"".join(map(chunk, START)))
        await until(lambda: self.pump.n_pieces == 1)
        for piece in self.then:
            n_before = self.pump.n_pieces + self.n_returned
            call.write(piece)
            if piece.endswith(b"\n"):
                await until(lambda n=n_before: self.pump.n_pieces + self.n_returned > n)
            else:  # half a chunk moves nothing
                for _ in range(10):
                    await asyncio.sleep(0)
        if self.last is not None:
            self.last(call)


def ends(call: Call) -> None:
    call.write(b"".join(map(chunk, END)) + b"0\r\n\r\n")


async def body_of(client: Client) -> bytes:
    return b"".join([piece async for piece in client.pieces()])


async def asked(gate: Front, script: Paced) -> Client:
    script.gate = gate
    come_back = script.pump._come_back

    def counted(*given: Any) -> Any:
        script.n_returned += 1
        return come_back(*given)

    script.pump._come_back = counted  # type: ignore[method-assign]
    client = await gate.client()
    client.send(chat(stream=True))
    assert (await client.head()).status == 200
    return client


async def test_pump_relays_what_the_full_way_relays(tmp_path: Path) -> None:
    tokens = [delta(content=f"word {index} ") for index in range(20)]
    split = chunk(delta(content="in two reads"))
    script = Paced(*map(chunk, tokens), chunk(tokens[0]) + chunk(tokens[1]), split[:9], split[9:], last=ends)
    async with front(tmp_path, script) as gate:
        client = await asked(gate, script)
        body = await body_of(client)
        assert body == b"".join([*START[1:], *tokens, *tokens[:2], delta(content="in two reads"), delta("stop"), DONE])
        assert await gate.settled() == {"served": 1}
        assert script.pump.n_pieces >= 22 and len(script.pump) == 0 and script.n_returned == 1
        gate.engine.script = hello
        client.send(chat(stream=True))  # both connections are whole
        assert (await client.answer()).status == 200
        assert await gate.settled() == {"served": 2}


async def test_plain_streams_flow_from_head_to_end(tmp_path: Path) -> None:
    async with front(tmp_path, hello, cancels_whole=True) as gate:
        gate.endpoint.pool.give_back(await gate.endpoint.pool._open(), keep=True)  # the plain lane opens none
        client = await gate.client()
        for _ in range(3):
            client.send(chat(stream=True))
            assert (await client.answer()).body == b"".join(hello_events()[1:-2]) + DONE
        assert await gate.settled() == {"served": 3}
        assert gate.engine.n_connections == 1
        stats = gate.endpoint.stats
        assert (stats.tokens_in, stats.tokens_out) == (3 * 9, 3 * 2)
        assert stats.ttft.cumulative()[-1][1] == 3


async def test_client_of_a_flowing_stream_gets_the_usage_it_asks_for(tmp_path: Path) -> None:
    async with front(tmp_path, hello, cancels_whole=True) as gate:
        gate.endpoint.pool.give_back(await gate.endpoint.pool._open(), keep=True)
        answer = await gate.ask(chat(stream=True, stream_options={"include_usage": True}))
        assert b'"completion_tokens":2' in answer.body and answer.body.endswith(DONE)
        assert b"prompt_progress" not in answer.body
        assert await gate.settled() == {"served": 1}


async def test_first_token_of_a_flowing_stream_is_known_to_who_looks(tmp_path: Path) -> None:
    is_seen = asyncio.Event()

    async def watched(call: Call) -> None:
        call.write(STREAM_HEAD + b"".join(map(chunk, START)))
        await is_seen.wait()
        ends(call)

    async with front(tmp_path, watched) as gate:
        client = await gate.client()
        client.send(chat(stream=True))
        await until(lambda: gate.gateway.dispatcher.streams.n_pieces == 1)
        (exchange,) = gate.endpoint.live
        assert not exchange.first_token_s
        gate.sweep(0.0)
        assert exchange.arrived_s < exchange.first_token_s
        assert exchange.as_state(exchange.arrived_s)["phase"] == "decode"
        is_seen.set()
        assert (await client.answer()).body.endswith(DONE)
        assert await gate.settled() == {"served": 1}


@pytest.mark.parametrize(
    "piece",
    [chunk(b": a comment\r\n\r\n"), chunk(delta(content="half")[:-1]), chunk(usage()) * 2, b"zz\r\n",
     chunk(delta(content="x" * 300_000))],
    ids=["carriage return", "half an event", "usage twice", "no chunk", "a large chunk"],
)  # fmt: skip
async def test_what_is_not_a_whole_plain_event_brings_the_stream_back(tmp_path: Path, piece: bytes) -> None:
    token = chunk(delta(content="b"))
    rest = b"".join(map(chunk, [b"\n", *END])) if b"half" in piece else b"".join(map(chunk, END))
    script = Paced(token, piece, last=lambda call: call.write(rest + b"0\r\n\r\n"))
    async with front(tmp_path, script) as gate:
        client = await asked(gate, script)
        if piece == b"zz\r\n":
            body = await client.broken_body()
            assert b"engine_crashed" in body and DONE not in body
            assert await gate.settled() == {"failed": 1}
        else:
            body = await body_of(client)
            assert body.endswith(delta("stop") + DONE)
            assert (b"half" in body) == (b"half" in piece) and (b"xxx" in body) == (b"xxx" in piece)
            assert await gate.settled() == {"served": 1}


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("last", [b"", chunk(delta(content="cut"))[:-9]])
async def test_engine_that_breaks_in_the_pump_is_told(tmp_path: Path, end: str, last: bytes) -> None:
    def breaks(call: Call) -> None:
        call.write(last)
        getattr(call, end)()

    script = Paced(chunk(delta(content="b")), last=breaks)
    async with front(tmp_path, script) as gate:
        client = await asked(gate, script)
        body = await client.broken_body()
        assert b"engine_crashed" in body and DONE not in body and delta(content="b") in body
        assert await gate.settled() == {"failed": 1}
        assert len(script.pump) == 0


@pytest.mark.parametrize("leave", [Client.close, Client.abort])
async def test_client_that_leaves_the_pump_ends_its_engines_work(tmp_path: Path, leave: Any) -> None:
    script = Paced(chunk(delta(content="b")))
    async with front(tmp_path, script) as gate:
        client = await asked(gate, script)
        await until(lambda: script.pump.n_pieces == 2)
        leave(client)
        await asyncio.wait_for(gate.engine.calls[0].gone.wait(), 10)
        assert await gate.settled() == {"cancelled": 1}
        assert len(script.pump) == 0


async def test_client_that_reads_slowly_gets_all_of_it(tmp_path: Path) -> None:
    token = delta(content="y" * 50_000)
    n_tokens = 600

    async def script(call: Call) -> None:
        call.write(STREAM_HEAD + b"".join(map(chunk, START)))
        await until(lambda: len(gate.gateway.dispatcher.streams) == 1)
        for _ in range(n_tokens):
            call.write(chunk(token))
            await call.drain()
        ends(call)

    async with front(tmp_path, script) as gate:
        client = await gate.client(limit=2**16)
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # the kernel would take tens of megabytes for it
        client.send(chat(stream=True))
        await client.head()
        await until(lambda: gate.gateway.dispatcher.streams.n_pieces > 0)
        written = 0
        while written != gate.engine.calls[0].n_written:  # until nothing moves any more
            written = gate.engine.calls[0].n_written
            await asyncio.sleep(0.1)
        assert written < n_tokens * len(token)  # the engine is held back
        body = await body_of(client)
        assert body == b"".join([*START[1:], *[token] * n_tokens, delta("stop"), DONE])
        assert await gate.settled() == {"served": 1}


async def test_nothing_flows_past_what_is_still_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, n_flowing = Pump._take, []

    def take_behind_a_write(streams: Pump, exchange: Any, relay: Any, tries: int) -> None:
        streams._outbox.write(exchange.protocol.transport, b"")
        take(streams, exchange, relay, tries)
        n_flowing.append(len(streams))

    async def script(call: Call) -> None:
        call.write(STREAM_HEAD + chunk(progress(1, 9)) + b"".join(map(chunk, START)))
        await until(lambda: len(n_flowing) > pump.TRIES)
        ends(call)

    monkeypatch.setattr(Pump, "_take", take_behind_a_write)
    async with front(tmp_path, script) as gate:
        assert (await gate.ask(chat(stream=True))).body == b"".join([*START[1:], delta("stop"), DONE])
        assert await gate.settled() == {"served": 1}
    assert set(n_flowing) == {0}


async def test_stopping_server_ends_a_stream_in_the_pump(tmp_path: Path) -> None:
    script = Paced(chunk(delta(content="b")))
    async with front(tmp_path, script) as gate:
        client = await asked(gate, script)
        await until(lambda: script.pump.n_pieces == 2)
        from laya.errors import ServerStopping

        gate.endpoint.fail_all(ServerStopping("The server stops."))
        body = await client.broken_body()
        assert b"server_stopping" in body and DONE not in body
        assert len(script.pump) == 0


PARTS = [delta(content="x"), progress(1, 9), usage(), DONE, b'data: {"a": "\\"usage\\": {"}\n\n', b"data: null\n\n",
         b'data: {"usage" : null, "b": 1}\n\n', b'data: {"error": {}}\n\n', b": ping\n\n", b"event: x\ndata: {}\n\n",
         b'data: {"error"\t:1}\n\n', b"data:[DONE]\n\n", b'data: {"content": "data: none"}\n\n']  # fmt: skip


def test_runs_of_events_are_those_of_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "laya._core", None)
        twin = importlib.reload(sse).stream_runs
    native = importlib.reload(sse).stream_runs
    assert native is not twin
    dice = random.Random(5)
    for _ in range(5000):
        data = b"".join(dice.choices(PARTS, k=dice.randrange(8)))
        assert native(data) == twin(data), data
        assert b"".join(run for _, run in native(data)) == data
