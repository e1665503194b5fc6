"""Owns: the connections to one engine: opening, keeping, retiring them, and small requests answered whole.

An engine closes a kept connection after a while without saying so (llama.cpp: 5 s idle, or 100 answers), so ours are
retired before. Knows nothing of models, tokens or events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from laya.gateway.counting import Counting
from laya.gateway.outbox import Outbox
from laya.gateway.upstream import ANSWER_LIMIT_BYTES, UpstreamConnection
from laya.types import EngineAddress

logger = logging.getLogger(__name__)
OPENAI_BASE = "/v1"
HTTPS_PORT = 443
FETCHES_AT_ONCE = 4  # an engine gives each open connection a thread, and has few beyond its sequences


class UpstreamPool:
    """The kept connections of one engine, the last used one first."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self._idle: list[UpstreamConnection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.outbox = Outbox()
        self._asking = asyncio.Semaphore(FETCHES_AT_ONCE)
        self.counting = Counting(self.fetch)
        key = f"authorization: Bearer {address.api_key}\r\n" if address.api_key else ""
        more = "".join(f"{name}: {value}\r\n" for name, value in address.headers)
        if address.is_remote:  # who says nothing may be sent any coding
            more += "accept-encoding: identity\r\n"
        self._base = f" {address.base_path}/".encode() if address.base_path != OPENAI_BASE else None
        host = f"[{address.host}]" if ":" in address.host else address.host
        if not (address.tls is not None and address.port == HTTPS_PORT):  # some servers know their bare name alone
            host += f":{address.port}"
        head = f"host: {host}\r\n{key}{more}content-type: application/json\r\ncontent-length: "
        self._head = head.encode()

    def head(self, start: bytes) -> bytes:
        """Of a request that starts so, up to the length of its body."""
        return b"%b HTTP/1.1\r\n%b" % (start, self._head)

    def request_bytes(self, start: bytes, body: bytes, more: bytes = b"") -> bytes:
        """`start` is method and path, e.g. b"POST /tokenize"; `more`: header lines of this request alone."""
        if self._base is not None:
            start = start.replace(b" /v1/", self._base, 1)
        if more:
            return b"%b HTTP/1.1\r\n%b%b%d\r\n\r\n%b" % (start, more, self._head, len(body), body)
        return b"%b HTTP/1.1\r\n%b%d\r\n\r\n%b" % (start, self._head, len(body), body)

    def take(self) -> UpstreamConnection | None:
        """A kept connection that is still good, or None: then `connect`."""
        oldest_s = time.monotonic() - self.address.idle_limit_s
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    def connect(self, then: Callable[[UpstreamConnection | OSError], None]) -> None:
        """Open a connection and call back with it, or with the error."""
        task = asyncio.get_running_loop().create_task(self._connect(then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, then: Callable[[UpstreamConnection | OSError], None]) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            then(error)
        else:
            then(connection)

    async def _open(self) -> UpstreamConnection:
        address = self.address
        opening = asyncio.get_running_loop().create_connection(
            lambda: UpstreamConnection(self), address.host, address.port, ssl=address.tls
        )
        try:  # an address of this machine answers or refuses at once
            limit_s = address.connect_timeout_s
            _, connection = await (opening if limit_s is None else asyncio.wait_for(opening, limit_s))
        except asyncio.TimeoutError:
            raise ConnectionRefusedError(f"no connection within {address.connect_timeout_s:g} s") from None
        if not connection.is_open:
            raise ConnectionResetError("it hung up at once")
        return connection

    def give_back(self, connection: UpstreamConnection, *, keep: bool) -> None:
        if self._closed or not keep or connection.n_uses >= self.address.answers_kept or not connection.is_open:
            connection.abort()
            return
        if connection.is_paused:  # the last client read too slowly for it
            connection.resume()
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().abort()

    async def fetch(self, method: str, path: str, body: bytes = b"", deadline_s: float = 30.0) -> tuple[int, bytes]:
        """One small request, answered whole: (status, body). Raises OSError when the engine can't be reached."""
        async with self._asking:
            return await self._fetch(method, path, body, deadline_s)

    async def _fetch(self, method: str, path: str, body: bytes, deadline_s: float) -> tuple[int, bytes]:
        request = self.request_bytes(f"{method} {path}".encode(), body)
        connection = self.take()
        if connection is not None:
            try:
                return await self._answer(connection, request, deadline_s)
            except _ClosedUnread:
                logger.debug("a kept connection was closed; %s goes over a new one", path)
        return await self._answer(await self._open(), request, deadline_s)

    async def _answer(self, connection: UpstreamConnection, request: bytes, deadline_s: float) -> tuple[int, bytes]:
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        connection.send(request, _Collector(future))
        try:
            return await asyncio.wait_for(future, deadline_s)
        except (asyncio.TimeoutError, asyncio.CancelledError, AnswerTooLarge) as error:
            connection.abort()
            if not isinstance(error, asyncio.TimeoutError):
                raise
            raise OSError(f"no answer within {deadline_s:.0f} s") from None


class AnswerTooLarge(OSError):
    """More than is held of any answer."""


class _ClosedUnread(ConnectionError):
    """A kept connection was closed before it read the request, which may be sent once more."""


class _Collector:
    """Gathers a small answer for `fetch`."""

    is_whole = False
    takes_whole = True

    def __init__(self, future: asyncio.Future[tuple[int, bytes]]) -> None:
        self._future = future
        self._status = 0
        self._parts: list[bytes] = []
        self._n_bytes = 0

    def on_whole(self, content_type: bytes | None, body: bytes) -> None:
        self.on_head(200, {})
        self.on_data(body)
        self.on_end()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._n_bytes += len(data)
        if self._n_bytes <= ANSWER_LIMIT_BYTES:
            self._parts.append(data)
        elif not self._future.done():  # `_answer` drops the connection
            self._future.set_exception(AnswerTooLarge(f"its answer has more than {ANSWER_LIMIT_BYTES} bytes"))

    def on_asked(self) -> None:
        """It waits."""

    def on_end(self) -> None:
        if not self._future.done():
            self._future.set_result((self._status, b"".join(self._parts)))

    def on_broken(self, reason: str, *, reusable: bool) -> None:
        if not self._future.done():
            self._future.set_exception(_ClosedUnread(reason) if reusable else ConnectionError(reason))
