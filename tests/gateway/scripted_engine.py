"""An engine whose every answer a test writes: a real HTTP server on loopback, and the events llama.cpp streams."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httptools

META: dict[str, Any] = {"id": "chatcmpl-1", "created": 7, "model": "stub", "system_fingerprint": "b1"}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
SLOTS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n[]"


def event(body: dict[str, Any], *, chat: bool = True) -> bytes:
    """One server-sent event."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    return b"data: " + json.dumps(META | {"object": kind} | body).encode() + b"\n\n"


def delta(reason: str | None = None, index: int = 0, logprobs: Any = None, **fields: Any) -> bytes:
    """A chat event with one choice."""
    choice: dict[str, Any] = {"index": index, "delta": fields, "finish_reason": reason}
    if logprobs is not None:
        choice["logprobs"] = {"content": logprobs}
    return event({"choices": [choice]})


def progress(processed: int, total: int) -> bytes:
    choices = [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]
    return event({"choices": choices, "prompt_progress": {"total": total, "processed": processed}})


def usage(prompt: int = 9, completion: int = 2, **more: Any) -> bytes:
    figures = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return event({"choices": [], "usage": figures} | more)


def hello_events() -> list[bytes]:
    """All events of a small chat answer, as llama.cpp streams it when asked for progress and usage."""
    return [
        progress(9, 9),
        delta(role="assistant", content=None),
        delta(content="Hel"),
        delta(content="lo"),
        delta("stop"),
        usage(),
        DONE,
    ]


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: dict[str, Any], status: int = 200) -> bytes:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
    return head + data


class Call(asyncio.Protocol):
    """One connection of the gateway to the engine, and the request that is on it now."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._url = b""
        self.gone = asyncio.Event()  # the gateway closed this connection
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.n_requests = 0  # on this connection so far
        self.n_written = 0

    @property
    def path(self) -> str:
        return self._url.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def write(self, data: bytes) -> None:
        if not self.gone.is_set():
            self.n_written += len(data)
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the gateway reads, or has gone."""
        await self._writable.wait()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def reset(self) -> None:
        """Close as the kernel does for a process that is killed with bytes unread."""
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._engine.n_connections += 1
        self._engine.open.add(self)
        if self._engine.on_connect is not None:
            self._engine.on_connect(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.open.discard(self)
        self._writable.set()
        self.gone.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # httptools
    def on_message_begin(self) -> None:
        self._url = self.body = b""
        self.headers = {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.n_requests += 1
        self._engine.take(self)


Script = Callable[[Call], Awaitable[None]]


def answers(*pieces: bytes) -> Script:
    """Write these bytes, each on its own, and keep the connection."""

    async def script(call: Call) -> None:
        for piece in pieces:
            call.write(piece)
            await asyncio.sleep(0)

    return script


def streams(*events: bytes, ends: bool = True) -> Script:
    """A stream of these events, each in a chunk of its own; `ends`: with the body's proper end."""
    return answers(STREAM_HEAD, *(chunk(event) for event in events), *([b"0\r\n\r\n"] if ends else []))


async def hello(call: Call) -> None:
    """What a good engine says: a stream where it was asked for, a whole answer where not."""
    if call.json.get("stream"):
        await streams(*hello_events())(call)
        return
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    call.write(whole(META | {"object": "chat.completion", "choices": [choice], "usage": USAGE}))


def hello_after(release: asyncio.Event) -> Script:
    """What a good engine says, later."""

    async def script(call: Call) -> None:
        await release.wait()
        await hello(call)

    return script


async def standstill(call: Call) -> int:
    """Bytes that the engine could write before it was held up."""
    seen = -1
    while call.n_written != seen:
        seen = call.n_written
        await asyncio.sleep(0.05)
    return seen


class ScriptedEngine:
    """`script` answers every request but the counts of tokens; `calls` are those that came, in order."""

    def __init__(self, script: Script = hello) -> None:
        self.script = script
        self.prompt_tokens = 9  # what a count answers
        self.count_of: Callable[[Any], int] = lambda body: self.prompt_tokens
        self.n_counts = 0
        self.n_looks = 0  # how often it was asked for its slots
        self.tells_slots = True
        self.metrics = b""  # what it says of itself
        self.on_connect: Callable[[Call], None] | None = None
        self.calls: list[Call] = []
        self.bodies: list[Any] = []
        self.open: set[Call] = set()
        self.n_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: Call(self), "127.0.0.1", 0)

    def take(self, call: Call) -> None:
        if call.path.endswith(("input_tokens", "tokenize")):
            self.n_counts += 1
            n_tokens = self.count_of(call.json)
            call.write(whole({"input_tokens": n_tokens, "tokens": [0] * n_tokens}))
            return
        if call.path == "/slots":
            self.n_looks += 1
            if self.tells_slots:
                call.write(SLOTS)
            return
        if call.path == "/metrics":
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
            call.write(head % len(self.metrics) + self.metrics)
            return
        self.calls.append(call)
        self.bodies.append(call.json)
        task = asyncio.ensure_future(self.script(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for call in list(self.open):
            call.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
