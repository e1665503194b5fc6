"""Owns: one connection to an engine: writing a request to it and cutting the answer out of its bytes.

Knows HTTP/1.1, and nothing of models, tokens or events. Opening and keeping connections is `pool.py`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from laya.gateway.plain import read_plain_answer
from laya.types import KIB, MIB

if TYPE_CHECKING:
    from laya.gateway.pool import UpstreamPool

logger = logging.getLogger(__name__)
_TCP_INFO_BYTES, _BYTES_RECEIVED_AT = 136, 128  # struct tcp_info of linux/tcp.h, tcpi_bytes_received
_BYTES_RECEIVED = struct.Struct("=Q")
_FAULT = "Laya could not relay its answer"
HEAD_LIMIT_BYTES = 256 * KIB  # of an answer; proxies before other servers say a lot, but not this much
ANSWER_LIMIT_BYTES = 128 * MIB  # of one that is held here until it is whole: 2048 embeddings as text take half of it


class AnswerHandler(Protocol):
    """Who wants an answer. Calls come in this order: head, data..., then exactly one of end and broken."""

    takes_whole: bool  # an answer that is all there at once goes to `on_whole` instead of the four others

    @property
    def is_whole(self) -> bool:
        """Whether what came says itself that it is all, so that nothing is lost if the connection is."""

    def on_whole(self, content_type: bytes | None, body: bytes) -> None: ...
    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_asked(self) -> None:
        """The request is on its way, and nothing of the answer can be here yet."""

    def on_broken(self, reason: str, *, reusable: bool) -> None:
        """The connection ended before the answer did. `reusable`: before any byte of it, on a kept connection or by a
        reset, so that the request was most likely never read and may be sent once more."""


class UpstreamConnection(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._handler: AnswerHandler | None = None
        self._headers: dict[bytes, bytes] = {}
        self._ended: AnswerHandler | None = None  # whose answer is complete in the bytes that are being parsed
        self._pieces: list[bytes] = []  # of a body, as they are parsed
        self._got_bytes = False
        self._n_head_bytes: int | None = 0  # of an answer whose head is not whole yet
        self._keep = False
        self._until_closed = False  # the end of the connection is the end of the answer
        self._is_chunk_whole = False  # the last that was parsed is the end of a chunk
        self._drop_lent: Callable[[], None] | None = None  # set while the native pump reads from it
        self.is_at_boundary = False  # all that came is whole chunks
        self.is_paused = False
        self.is_open = False
        self.n_uses = 0
        self.idle_since_s = 0.0

    def send(self, request: bytes, handler: AnswerHandler) -> None:
        """Write one request; its answer goes to `handler`."""
        assert self._transport is not None and self._handler is None
        self._handler = handler
        self._got_bytes = self._until_closed = self._is_chunk_whole = self.is_at_boundary = False
        self._headers = {}
        self._n_head_bytes = 0
        self.n_uses += 1
        self._pool.outbox.write(self._transport, request)
        handler.on_asked()

    def abort(self) -> None:
        """Drop the connection: how an engine learns that the client has left."""
        self._handler = None
        self.is_open = False
        self._stop_lending()
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read nothing before `resume`. While it is lent this is only noted: it holds from its coming back on."""
        if self.is_open and not self.is_paused:
            self.is_paused = True
            if self._drop_lent is None:
                self._transport.pause_reading()  # type: ignore[union-attr]

    def resume(self) -> None:
        if self.is_open and self.is_paused:
            self.is_paused = False
            if self._drop_lent is None:
                self._transport.resume_reading()  # type: ignore[union-attr]

    # the native pump
    def fileno(self) -> int:
        assert self._transport is not None
        return int(self._transport.get_extra_info("socket").fileno())

    def n_received(self) -> int:
        """Bytes that came over it, by the kernel's count: while it is lent too. Of an answer whose head is not whole
        none counts: a head says nothing until it is, and one that drips would be waited for without an end."""
        if self._transport is None or (self._drop_lent is None and self._n_head_bytes is not None):
            return 0
        info = self._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])

    def lend(self, drop: Callable[[], None]) -> None:
        """Somebody else reads from it until `come_back`; `drop` is called if it is dropped before."""
        assert self._transport is not None
        self._transport.pause_reading()
        self._drop_lent = drop

    def adopt(self, handler: AnswerHandler, n_uses: int, unsent: bytes) -> None:
        """While it was lent it was sent so many requests, the last of them, but for `unsent`, the handler's."""
        assert self._transport is not None
        self._handler = handler
        self._got_bytes = self._until_closed = self._is_chunk_whole = self.is_at_boundary = False
        self._headers = {}
        self._n_head_bytes = 0
        self.n_uses += n_uses
        if unsent and self.is_open:
            self._transport.write(unsent)

    def keep_idle(self) -> None:
        """It was lent, and nobody asks."""
        if self.is_open:
            self._pool.give_back(self, keep=True)

    def _stop_lending(self) -> None:
        if self._drop_lent is not None:
            drop, self._drop_lent = self._drop_lent, None
            drop()

    def come_back(self, raw: bytes, error: int) -> None:
        """Read here again, first what was read elsewhere and is still to be parsed. `error`: errno of the socket."""
        self._drop_lent = None
        if not self.is_open or self._transport is None:
            return
        if error:
            unread = error == errno.ECONNRESET and not (self._got_bytes or raw)
            self._got_bytes |= bool(raw)
            self._break(f"the connection was lost ({os.strerror(error)})", unread=unread)
            self.abort()
            return
        if not self.is_paused:
            self._transport.resume_reading()
        if raw:
            self.data_received(raw)

    def has_flowed(self, *, keep: bool) -> None:
        """The rest of the answer was read elsewhere, to its end. `keep`: and nothing behind it."""
        self._drop_lent = self._handler = None
        if self.is_open and self._transport is not None:
            self.is_paused = False
            self._transport.resume_reading()
            if self._got_bytes:  # it is in the middle of this answer
                self._parser = httptools.HttpResponseParser(self)
            self._pool.give_back(self, keep=keep and self._pool.address.keeps_streams)

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._handler is None:  # nobody asked: an engine that says why it closes
            self.abort()
            return
        if not self._got_bytes and self._handler.takes_whole:
            answer = read_plain_answer(data)
            if answer is not None:
                handler, self._handler = self._handler, None
                self._pool.give_back(self, keep=True)
                try:
                    handler.on_whole(*answer)
                except Exception as error:
                    self._fault(error)
                    handler.on_broken(_FAULT, reusable=False)
                return
        self._got_bytes = True
        try:
            try:
                self._parser.feed_data(data)
            finally:
                self._pass_on()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                self._give_up(error.__context__ or error)
            else:
                self._break(f"it sent what is not HTTP ({error})")
                self.abort()
        except Exception as error:
            self._give_up(error)
        if self._n_head_bytes is not None and self._handler is not None:
            self._n_head_bytes += len(data)
            if self._n_head_bytes > HEAD_LIMIT_BYTES:
                self._break(f"the head of its answer has no end within {HEAD_LIMIT_BYTES} bytes")
                self.abort()
        self.is_at_boundary = self._is_chunk_whole and data.endswith(b"\r\n")
        ended, self._ended = self._ended, None
        if ended is not None:
            self._pool.give_back(self, keep=self._keep)
            self._end(ended)

    def _give_up(self, error: BaseException) -> None:
        self._fault(error)
        self._break(_FAULT)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self.is_open = False  # who is told now gives it back to no pool
        self._stop_lending()
        self._transport = None
        handler = self._handler
        if handler is not None and (handler.is_whole or (self._until_closed and exc is None)):
            self._handler = None
            self._end(handler)
        # a reset before any byte of an answer: it died with the request still unread
        unread = isinstance(exc, ConnectionResetError) and not self._got_bytes
        self._break("it closed the connection" if exc is None else f"the connection was lost ({exc})", unread=unread)

    def _end(self, handler: AnswerHandler) -> None:
        try:
            handler.on_end()
        except Exception as error:
            self._fault(error)
            handler.on_broken(_FAULT, reusable=False)

    def _break(self, reason: str, *, unread: bool = False) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.on_broken(reason, reusable=unread or (self.n_uses > 1 and not self._got_bytes))

    def _fault(self, error: BaseException) -> None:
        logger.error("relaying an answer failed", exc_info=error)

    # httptools callbacks
    def on_message_begin(self) -> None:
        if self._handler is None:
            self._keep = False  # more than the answer: whatever it is, nobody may take it for the next one

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._handler is None or status < 200:
            return
        sized = b"content-length" in self._headers
        self._until_closed = not sized and b"transfer-encoding" not in self._headers
        self._n_head_bytes = None
        self._keep = (sized or self._pool.address.keeps_streams) and bool(self._parser.should_keep_alive())
        self._handler.on_head(status, self._headers)

    def on_chunk_header(self) -> None:
        self._is_chunk_whole = False

    def on_chunk_complete(self) -> None:
        self._is_chunk_whole = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def _pass_on(self) -> None:
        """What the pieces of a body were that came together goes on together."""
        if self._pieces:
            data, self._pieces = b"".join(self._pieces), []
            if self._handler is not None:
                self._handler.on_data(data)

    def on_message_complete(self) -> None:
        self._pass_on()
        if self._handler is not None and self._parser.get_status_code() >= 200:
            self._ended, self._handler = self._handler, None
