"""Owns: a client's connection: which requests take the hot path, deadlines, limits, pipelining, back-pressure.

The hot endpoints become an `Exchange` and never an ASGI task; everything else is uvicorn's own business, on the same
socket. Deadlines are plain attributes that one sweep per server compares with the clock: a request arms no timer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from laya.errors import LayaError, RequestTimeout
from laya.gateway.assemble import encode
from laya.gateway.exchange import Exchange, bad_http
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya.gateway.dispatch import Dispatcher

HOT_PATHS = {
    b"/v1/chat/completions": EndpointKind.CHAT,
    b"/v1/completions": EndpointKind.COMPLETION,
    b"/v1/embeddings": EndpointKind.EMBEDDING,
    b"/v1/rerank": EndpointKind.RERANK,
    b"/rerank": EndpointKind.RERANK,
}
HEAD_LIMIT_BYTES = 64 * 1024
LINGER_S = 5.0  # how long what a refused client still sends is read and thrown away, so that it gets to read why
STALL_S = 120.0  # how long a client may leave its answer unread
BODY_RATE_BYTES_PER_S = 64 * 1024  # slower than this, after the first `body_timeout_s`, is a client that holds a place
_NEVER = float("inf")


class Limits:
    """What a connection may take; from the config's `server` section."""

    def __init__(self, *, max_body_bytes: int, header_timeout_s: float, body_timeout_s: float, keep_alive_s: float):
        self.max_body_bytes = max_body_bytes
        self.header_timeout_s = header_timeout_s
        self.body_timeout_s = body_timeout_s
        self.keep_alive_s = keep_alive_s


class LayaProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection with Laya's hot path in it. Subclassed per server to carry its dispatcher."""

    dispatcher: ClassVar[Dispatcher]
    limits: ClassVar[Limits]
    cycle: Any  # the newest request: an Exchange, or uvicorn's own cycle
    pipeline: Any  # (cycle, app) of requests that wait for their turn

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline_s = _NEVER
        self._deadline_of = ""  # "head", "body", "idle", "linger"
        self._head_bytes = 0
        self._head_open = True
        self._paused_since_s = _NEVER
        self._broken = False  # what comes on this connection is no longer read as HTTP
        self._active: Exchange | None = None  # whose answer is being written; those behind it wait in the pipeline

    # connection
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_deadline("head", self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(cycle, Exchange):
                cycle.client_gone()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        if self._head_open:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._give_up(bad_http(str(error)))
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        if self._head_open and self._head_bytes > HEAD_LIMIT_BYTES:
            self._give_up(bad_http(f"its head is larger than {HEAD_LIMIT_BYTES} bytes"), status=431)

    def _give_up(self, error: LayaError, status: int = 400) -> None:
        """No request can be read here any more. An answer that is on its way is finished first, untouched."""
        self._broken = True
        newest = self.cycle
        if isinstance(newest, Exchange) and not newest.response_complete and not newest.body_complete:
            newest.early_error = error
            if newest.started:
                newest.fail(error)
        elif newest is not None and not newest.response_complete:
            newest.keep_alive = False
        else:
            self._write_error(error, status)

    def _write_error(self, error: LayaError, status: int) -> None:
        """An error for a request that never became one."""
        if self.transport.is_closing():
            return
        body = encode(error.body())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    # parser callbacks
    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._head_open = True
        self._head_bytes = 0
        if self._deadline_of != "head":
            self._set_deadline("head", self.limits.header_timeout_s)

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._set_deadline("body", self.limits.body_timeout_s)
        kind = HOT_PATHS.get(self.url.partition(b"?")[0]) if self.parser.get_method() == b"POST" else None
        if kind is None:
            self._hand_over()
            return
        version = self.parser.get_http_version()
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        exchange = Exchange(self, self.dispatcher, kind, http_1_0=version == "1.0", keep_alive=keep_alive)
        authorization = exchange.read_head(self.headers, self.limits.max_body_bytes)
        previous, self.cycle = self.cycle, exchange
        self.dispatcher.arrive(exchange, authorization, self.headers)
        if previous is None or previous.response_complete:
            self._active = exchange
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def _hand_over(self) -> None:
        """Not for the hot path: uvicorn's own way, from the head on."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        super().on_url(url)
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.on_body(body, self.limits.max_body_bytes)
            if self._deadline_of == "body":
                self._deadline_s += len(body) / BODY_RATE_BYTES_PER_S
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deadline_of == "linger":
            self.transport.close()
            return
        if self.cycle.response_complete:
            self._set_deadline("idle", self.limits.keep_alive_s)
            return
        self._deadline_s = _NEVER
        self._deadline_of = ""
        if isinstance(self.cycle, Exchange):
            self.cycle.on_body_complete()
        else:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Exchange):
            self._active = cycle
            if cycle.early_error is not None and not cycle.body_complete:
                cycle.fail(cycle.early_error)
            else:
                cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    # the end of an answer
    def exchange_complete(self, exchange: Exchange) -> None:
        """An exchange has written its answer."""
        self._active = None
        if exchange.keep_alive:
            self.on_response_complete()
        elif exchange.body_complete or self._broken:
            self.transport.close()
        else:
            self._set_deadline("linger", LINGER_S)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._broken:
            self.transport.close()
        elif self._deadline_of == "":
            self._set_deadline("idle", self.limits.keep_alive_s)

    # back-pressure
    def pause_writing(self) -> None:
        self._paused_since_s = time.monotonic()
        if self._active is not None:
            self._active.pause()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._paused_since_s = _NEVER
        if self._active is not None:
            self._active.resume()
        super().resume_writing()

    # deadlines
    def _set_deadline(self, of: str, seconds: float) -> None:
        self._deadline_of = of
        self._deadline_s = time.monotonic() + seconds

    def sweep(self, now_s: float) -> None:
        """Called a few times a second by the server for each connection."""
        if now_s - self._paused_since_s > STALL_S:
            self.transport.abort()
        elif now_s > self._deadline_s:
            self._pass_deadline()

    def _pass_deadline(self) -> None:
        of, self._deadline_of, self._deadline_s = self._deadline_of, "", _NEVER
        if of in ("idle", "linger") or (of == "head" and self._head_bytes == 0):
            self.transport.close()
        elif of == "head":
            limit_s = self.limits.header_timeout_s
            self._give_up(RequestTimeout(f"The request's head did not arrive within {limit_s:g} s."), 408)
        else:
            limit_s = self.limits.body_timeout_s
            self._give_up(RequestTimeout(f"The request's body did not arrive within {limit_s:g} s."), 408)
