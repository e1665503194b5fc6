"""Owns: clients that stream chats and note when each token came: one request a connection, which is open beforehand.

The same reader for every server, so that what is compared are servers. A token is an event with content; how many they
were is what `usage` says at the end. Anything but a whole stream of status 200 measures nothing: EngineFailed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import Any

import httptools
import msgspec

from laya.errors import EngineFailed

DONE = b"[DONE]"
STREAM_S = 600.0
AHEAD_S = 0.02  # of the first of several chats


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and the model's name there."""

    name: str
    host: str
    port: int
    model: str
    key: str | None = None
    base_path: str = "/v1"
    headers: tuple[tuple[str, str], ...] = ()
    is_tls: bool = False

    def request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = b"" if body is None else msgspec.json.encode(body)
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {self.host}:{self.port}"]
        lines += [f"authorization: Bearer {self.key}"] if self.key else []
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
        return "\r\n".join([*lines, "", ""]).encode() + data


class Answer(msgspec.Struct, kw_only=True):
    """One stream. Times in seconds since its request was written."""

    content_s: list[float]  # when each event with content was read
    end_s: float
    n_tokens: int
    prompt_tokens: int
    engine: str | None  # the header by which Laya says what answered
    timings: dict[str, float] | None = None  # llama.cpp's own

    @property
    def first_s(self) -> float:
        return self.content_s[0]

    @property
    def inter_token_s(self) -> float:
        """The mean from the first token to the last."""
        return (self.content_s[-1] - self.content_s[0]) / max(1, self.n_tokens - 1)


class _Event(msgspec.Struct):
    choices: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    timings: dict[str, float] | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


class _Reader(asyncio.Protocol):
    """One connection: sends when it is told to, and has `done` when the answer is whole."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []
        self.status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def send(self, request: bytes) -> None:
        self.sent_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter() - self.sent_s, data))

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(EngineFailed("The connection ended in the middle of an answer."))


async def connected(side: Side) -> _Reader:
    context = ssl.create_default_context() if side.is_tls else None
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(_Reader, side.host, side.port, ssl=context)
    return reader


async def ask(side: Side, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes, float]:
    """A whole answer: its status, its body, and the seconds until it was read."""
    reader = await connected(side)
    reader.send(side.request(path, body))
    await asyncio.wait_for(reader.done, STREAM_S)
    return reader.status, b"".join(data for _, data in reader.pieces), time.perf_counter() - reader.sent_s


async def together(side: Side, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[Answer]]:
    """So many chats at once, and the seconds from the first request to the end of the last answer.

    The first is sent a moment before the others: an engine computes at once the prompts that are there when it begins,
    so which these are would be left to the tenths of a millisecond between arrivals, and be others from turn to turn.
    """
    readers = await asyncio.gather(*(connected(side) for _ in bodies))
    more = {"model": side.model, "stream": True, "stream_options": {"include_usage": True}}
    requests = [side.request(f"{side.base_path}/chat/completions", body | more) for body in bodies]
    start_s = time.perf_counter()
    for number, (reader, request) in enumerate(zip(readers, requests, strict=True)):
        if number == 1:
            await asyncio.sleep(AHEAD_S)
        reader.send(request)
    await asyncio.wait_for(asyncio.gather(*(reader.done for reader in readers)), STREAM_S)
    seconds = time.perf_counter() - start_s
    return seconds, [_answer(side, reader) for reader in readers]


def _answer(side: Side, reader: _Reader) -> Answer:
    if reader.status != 200:
        said = b"".join(data for _, data in reader.pieces)[:500].decode(errors="replace")
        raise EngineFailed(f"{side.name} answered {reader.status}: {said}")
    content_s, usage, timings, is_done, rest = [], None, None, False, b""
    for at_s, data in reader.pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == DONE:
                is_done = True
                continue
            event = _EVENT.decode(payload)
            if event.error is not None:
                raise EngineFailed(f"{side.name} broke off: {event.error}")
            usage, timings = event.usage or usage, event.timings or timings
            if any(choice.get("delta", {}).get("content") for choice in event.choices):
                content_s.append(at_s)
    if not is_done or usage is None or not content_s:
        last = "[DONE]" if is_done else "no [DONE]"
        raise EngineFailed(f"{side.name} streamed {len(content_s)} pieces of text, usage {usage} and {last}.")
    return Answer(
        content_s=content_s,
        end_s=reader.pieces[-1][0],
        n_tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        engine=reader.headers.get("x-laya-engine"),
        timings=timings,
    )
