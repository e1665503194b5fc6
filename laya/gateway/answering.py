"""Owns: the bytes of an answer as they go to a client: its head, its framing, whole or piece by piece.

Knows HTTP/1.1; decides neither what is answered nor when a request ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

if TYPE_CHECKING:
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.protocol import LayaProtocol

Outcome = Literal["served", "refused", "failed", "cancelled"]

_JSON_HEAD = b"content-type: application/json\r\n"
SSE_HEAD = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"


class Answering:
    """What an exchange writes; the rest of one is `exchange.py`."""

    protocol: LayaProtocol
    dispatcher: Dispatcher
    request_id: bytes
    body_complete: bool
    chunked: bool
    keep_alive: bool
    extra_headers: list[bytes]
    endpoint: Endpoint | None
    read_s: float
    sent_s: float
    deadline_s: float
    head_sent = False
    is_cut = False  # it broke off, and says so in its last words
    _unsent: list[bytes]  # a head that waits for the first bytes of its body

    def finish(self, outcome: Outcome) -> None:
        raise AssertionError("the exchange says how it ends")

    def _send(self, data: bytes) -> None:
        self.dispatcher.outbox.write(self.protocol.transport, data)

    def _head(self, status: int, kind: bytes) -> list[bytes]:
        origin = self.origin if status == 200 else b""  # an error may be that the key does not get this model
        parts = [STATUS_LINE[status], kind, b"x-request-id: ", self.request_id, b"\r\n", origin, *self.extra_headers]
        if not self.body_complete:
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        self.head_sent = True
        return parts

    @property
    def origin(self) -> bytes:
        """The lines of its head that say which model and engine serve it, and how long it waited for them."""
        endpoint = self.endpoint
        if endpoint is None:
            return b""
        if not self.deadline_s:
            return endpoint.origin
        waited_s = (self.sent_s or time.monotonic()) - self.read_s
        return endpoint.origin[:-3] + b"%d\r\n" % (1000 * waited_s)

    def respond(self, status: int, body: bytes, outcome: Outcome, kind: bytes = _JSON_HEAD) -> None:
        """The whole answer in one write."""
        parts = self._head(status, kind)
        parts.append(b"content-length: %d\r\n\r\n" % len(body))
        parts.append(body)
        self.dispatcher.outbox.write(self.protocol.transport, b"".join(parts))
        self.finish(outcome)

    def start_raw(self, status: int, content_type: bytes, content_length: bytes | None) -> None:
        """The head of an answer that is relayed as it comes; it is sent with the first bytes."""
        parts = self._head(status, b"content-type: " + content_type + b"\r\n")
        if content_length is not None:
            self.chunked = False
            parts.append(b"content-length: " + content_length + b"\r\n\r\n")
        else:
            parts.append(self._framing())
        self._unsent = parts

    def stream_head(self) -> bytes:
        """The head of a stream, for who sends it in this exchange's place."""
        head = b"".join((*self._head(200, SSE_HEAD), self._framing()))
        self.head_sent = False
        return head

    def _framing(self) -> bytes:
        if self.chunked:
            return b"transfer-encoding: chunked\r\n\r\n"
        self.keep_alive = False  # HTTP/1.0: the end of the connection is the end of the answer
        return b"\r\n"

    def _pieces(self, data: bytes) -> list[bytes]:
        """A piece of the answer as it goes on the wire, behind the head where that is still to come."""
        parts, self._unsent = self._unsent, []
        if not self.head_sent:
            parts = self._head(200, SSE_HEAD)
            parts.append(self._framing())
        if not self.chunked:
            parts.append(data)
        elif data:
            parts += (b"%x\r\n" % len(data), data, b"\r\n")
        return parts

    def write(self, data: bytes) -> None:
        """A piece of an answer that is relayed as it comes."""
        self._send(b"".join(self._pieces(data)))

    def end(self, data: bytes, outcome: Outcome) -> None:
        """The last piece of such an answer."""
        parts = self._pieces(data)
        if self.chunked:
            parts.append(b"0\r\n\r\n")
        last = b"".join(parts)
        if last:
            self._send(last)
        self.finish(outcome)

    def break_off(self, data: bytes, outcome: Outcome) -> None:
        """The last piece of one that is not whole: what would end its framing is left out, so that it never looks so.

        Only its connection ends. A client of HTTP/1.0 has the last words alone.
        """
        self.keep_alive, self.is_cut = False, True
        self._send(b"".join(self._pieces(data)))
        self.finish(outcome)
