"""Owns: a closed-loop HTTP load: N connections, each sends its next request when the last answer is whole.

Reads answers with the same parser on every target, so that ratios compare targets and not clients. Every answer is
checked: another status than 200, a whole answer without choices, a stream without [DONE] are failures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import httptools
import msgspec


class LoadResult(msgspec.Struct):
    """What one run saw. Times in microseconds."""

    n_requests: int
    n_failed: int
    seconds: float
    latencies_us: list[float]

    @property
    def per_s(self) -> float:
        return self.n_requests / self.seconds

    def percentile_us(self, percent: float) -> float:
        ordered = sorted(self.latencies_us)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Asked(NamedTuple):
    """One of the requests of a load. `answers`: a right answer to it has one of these in its body."""

    request: bytes
    answers: tuple[bytes, ...] = (b"",)


class _Answer(msgspec.Struct):
    choices: list[dict[str, Any]]


_ANSWER = msgspec.json.Decoder(_Answer)


class _Client(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._start_s = 0.0
        self._body: list[bytes] = []
        self._asked = Asked(b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        asked = self._run.take()
        if asked is None:
            self._transport.close()
            return
        self._asked = asked
        self._body = []
        self._start_s = time.perf_counter()
        self._transport.write(asked.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        good = self._parser.get_status_code() == 200 and self._is_whole()
        self._run.record(time.perf_counter() - self._start_s, good)
        self._next()

    def _is_whole(self) -> bool:
        if self._run.streams:
            return self._body[-1].endswith(b"data: [DONE]\n\n")
        body = b"".join(self._body)
        return any(map(body.__contains__, self._asked.answers)) and bool(_ANSWER.decode(body).choices)

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.closed(exc)


class _Run:
    def __init__(self, asked: Sequence[Asked], n_requests: int, n_connections: int, streams: bool) -> None:
        self._asked = cycle(asked)
        self.streams = streams
        self.latencies_us: list[float] = []
        self.n_failed = 0
        self._left = n_requests
        self._open = n_connections
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self) -> Asked | None:
        self._left -= 1
        return next(self._asked) if self._left >= 0 else None

    def record(self, seconds: float, good: bool) -> None:
        self.latencies_us.append(seconds * 1e6)
        self.n_failed += not good

    def closed(self, exc: Exception | None) -> None:
        self._open -= 1
        if not self._open and not self.done.done():
            self.done.set_result(None)


def request_bytes(port: int, path: str, body: dict[str, Any], api_key: str | None = None) -> bytes:
    data = msgspec.json.encode(body)
    key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{key}user-agent: laya-bench\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def drive(
    port: int,
    request: bytes | Sequence[Asked],
    *,
    n_requests: int,
    n_connections: int,
    streams: bool,
    warm_up: int = 200,
) -> LoadResult:
    """Send `n_requests`, of several in turn, over `n_connections` after a warm-up that is not counted."""
    asked = [Asked(request)] if isinstance(request, bytes) else request
    loop = asyncio.get_running_loop()
    result = None
    for count in (warm_up, n_requests):
        run = _Run(asked, count, n_connections, streams)
        start_s = time.perf_counter()
        for _ in range(n_connections):
            await loop.create_connection(lambda run=run: _Client(run), "127.0.0.1", port)  # type: ignore[misc]
        await run.done
        seconds = time.perf_counter() - start_s
        result = LoadResult(len(run.latencies_us), run.n_failed, seconds, run.latencies_us)
    assert result is not None
    return result
