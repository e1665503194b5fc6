"""Owns: a client's connection: which requests take the hot path, deadlines, limits, pipelining, back-pressure.

The hot endpoints become an `Exchange` and never an ASGI task; everything else is uvicorn's own business, on the same
socket. Deadlines are plain attributes that one sweep per server compares with the clock: a request arms no timer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from laya.errors import LayaError, RequestTimeout
from laya.gateway.entry import begin_plain, go_straight
from laya.gateway.exchange import Exchange
from laya.gateway.heads import Headers, head_bytes, hot_kind, without_upgrade
from laya.gateway.limits import (
    AHEAD_LIMIT_BYTES,
    BODY_RATE_BYTES_PER_S,
    HEAD_LIMIT_BYTES,
    STALL_S,
    Limits,
    bad_http,
    head_too_large,
    parting_answer,
)
from laya.gateway.plain import PlainLane, read_plain_request

if TYPE_CHECKING:
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.express import KnownAs

LAST_WORDS_S = 0.2  # between those of an answer that broke off and the end of its connection
_NEVER = float("inf")


class LayaProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection with Laya's hot path in it. Subclassed per server to carry its dispatcher."""

    dispatcher: ClassVar[Dispatcher]
    limits: ClassVar[Limits]
    lane: ClassVar[PlainLane | None]
    takes_plain: ClassVar[bool]  # False where rules may ask of a request what its short way does not keep
    cycle: Any  # the newest request: an Exchange, or uvicorn's own cycle
    pipeline: Any  # (cycle, app) of requests that wait for their turn

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline_s = _NEVER
        self._deadline_of = ""  # a name of Limits.seconds, or "" while the client is not waited for
        self._bodiless_bytes = 0  # that came since the last piece of a body: of heads, trailers, chunk sizes
        self._offers_upgrade = False
        self._paused_since_s = _NEVER
        self._broken = False  # what comes on this connection is no longer read as HTTP
        self._ahead = b""  # what came while requests wait in the pipeline
        self._is_between = True  # requests: the parser has all of the last one and nothing of the next
        self.known_as: KnownAs | None = None  # by what the express lane may know its requests
        self.lent = 0  # its number in the express lane, while that reads from it
        self._active: Any = None  # the cycle whose answer is being written; those behind it wait in the pipeline

    # connection
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_deadline("first")

    def connection_lost(self, exc: Exception | None) -> None:
        self._take_back()
        for cycle in (self._active, self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(cycle, Exchange):
                cycle.client_gone()
            elif cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_between and self._may_start():
            if self.known_as is not None and self.dispatcher.express.lend(self, self.known_as, data):
                return
            taken = self.lane.take(data, self.limits.plain_body_bytes) if self.lane is not None else None
            if taken is not None:
                go_straight(self, data, *taken)
                return
            request = read_plain_request(data, self.limits.plain_body_bytes)
            if request is not None and request[1][:1] == b"{":  # else its head may say how it is encoded
                begin_plain(self, *request)
                return
        if self._broken:
            return
        if self.pipeline:  # received all the same, so that a client that leaves is noticed
            self._ahead += data
            if len(self._ahead) > AHEAD_LIMIT_BYTES:
                self.flow.pause_reading()
        else:
            self._read(data)

    def shutdown(self) -> None:
        """The server ends: close, or after the answer that is on its way."""
        self._take_back()
        super().shutdown()

    def _take_back(self) -> None:
        if self.lent:
            self.dispatcher.express.take_back(self.lent)

    def lend(self, number: int) -> None:
        """The express lane reads from it."""
        self.lent = number
        self._deadline_s = _NEVER
        self._deadline_of = ""
        self.transport.pause_reading()

    def come_back(self, raw: bytes) -> None:
        """Read here again, first what was read there. What is asked meanwhile has its turn already."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._set_deadline("idle")
        if not self.flow.read_paused:  # as by the rest of an answer that it did not take
            self.transport.resume_reading()
        if raw:
            self.data_received(raw)

    def _may_start(self) -> bool:
        """Whether a plain request that comes now may begin at once."""
        previous = self.cycle
        if isinstance(previous, Exchange) and previous.stream:  # its end may be on its way from the native pump
            self.dispatcher.streams.see_to_end_of(previous.stream)
        is_free = (previous is None or previous.response_complete) and not self._broken and not self.pipeline
        return is_free and self.takes_plain and not self.flow.write_paused

    def take_turn(self, exchange: Exchange) -> None:
        """The request of this exchange is here, whole, and it is the only one of this connection."""
        self.cycle = self._active = exchange
        self._deadline_s = _NEVER
        self._deadline_of = ""

    def _read(self, data: bytes) -> None:
        self._bodiless_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            self._give_up(self.dispatcher.fault("reading a request", error.__context__ or error))
        except httptools.HttpParserError as error:
            self._give_up(bad_http(str(error)))
        else:
            if self._bodiless_bytes > HEAD_LIMIT_BYTES:
                self._give_up(head_too_large())

    def _feed(self, data: bytes) -> None:
        """Parse. A request that offers another protocol is parsed again without the offer, which may be ignored."""
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                n_read = upgrade.args[0]
            else:
                return
            # outside of the handler: what a callback raises here would be taken for the offer that was handled
            self._offers_upgrade = False
            rest = memoryview(rest)[n_read:]
            head = without_upgrade(self.parser.get_method(), self.url, self.headers)
            self.parser = httptools.HttpRequestParser(self)  # one that has read "connection: close" reads no more
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(head)

    def _give_up(self, error: LayaError) -> None:
        """No request can be read here any more. An answer that is on its way is finished first, untouched."""
        self._broken = True
        newest = self.cycle
        if newest is None or newest.response_complete:
            answered = self._deadline_of in ("body", "linger")  # before its body was here
            self._part(b"" if answered else parting_answer(error))
        elif isinstance(newest, Exchange) and not newest.body_complete:
            newest.early_error = error
            if newest.started:
                newest.fail(error)
        elif isinstance(newest, Exchange) or not newest.more_body or newest.response_started:
            newest.keep_alive = False
        else:
            newest.early_error = error  # for when its turn comes
            if newest is self._active:
                self._part_before_body(newest)

    def _part_before_body(self, cycle: Any) -> None:
        """uvicorn's cycle waits for a body that will not come: its client is told why, its handler that it is gone."""
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False  # the handler may only begin to read now
        cycle.message_event.set()
        self._part(parting_answer(cycle.early_error))

    def break_off(self) -> None:
        """The app's answer that is on its way is not whole and gets no end: its connection ends where it is."""
        self._active.disconnected = True
        self._close_soon()

    def _close_soon(self) -> None:
        """Many clients lose the last words of an answer without an end where the connection's end comes with them."""
        self._broken = True
        self._set_deadline("linger")
        self.loop.call_later(LAST_WORDS_S, self._close)

    def _close(self) -> None:
        """Close once what was written is sent."""
        self.dispatcher.outbox.flush()
        self.transport.close()

    def _part(self, last_words: bytes = b"") -> None:
        """Close for writing, and read on for a while: bytes that nobody reads would take the answer with them."""
        self._broken = True
        if not self.transport.is_closing():
            self.dispatcher.outbox.flush()
            self.transport.write(last_words)
            self.transport.write_eof()
            self.flow.resume_reading()
            self._set_deadline("linger")

    # parser callbacks
    def on_message_begin(self) -> None:
        self._is_between = False
        self.url = b""
        self.headers = []
        self._set_deadline("head")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise bad_http("CONNECT is for proxies")
            self._offers_upgrade = True
            return
        headers, self.headers = self.headers, []  # trailers come to a list that nobody reads
        if self._bodiless_bytes > HEAD_LIMIT_BYTES and head_bytes(self.url, headers) > HEAD_LIMIT_BYTES:
            raise head_too_large()
        kind = hot_kind(self.parser.get_method(), self.url)
        if kind is None:
            self._hand_over(headers)
            return
        version = self.parser.get_http_version()
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        exchange = Exchange(self, self.dispatcher, kind, http_1_0=version == "1.0", keep_alive=keep_alive)
        authorization = exchange.read_head(headers, self.limits.max_body_bytes)
        self.dispatcher.arrive(exchange, authorization, headers)
        previous, self.cycle = self.cycle, exchange
        self._set_deadline("body")
        if (previous is None or previous.response_complete) and not self.flow.write_paused:
            self._active = exchange
            exchange.start()
        else:
            self.pipeline.appendleft((exchange, self.app))

    def _hand_over(self, headers: Headers) -> None:
        """Not for the hot path: uvicorn's own way, from the head on."""
        url = self.url
        super().on_message_begin()
        self.scope["state"]["break_off"] = self.break_off  # for who answers
        super().on_url(url)
        for name, value in headers:
            super().on_header(name, value)
        try:
            super().on_headers_complete()
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            raise bad_http("its target is not a URL") from None
        if self.pipeline and not self.flow.write_paused:
            self.flow.resume_reading()
        self.headers = []
        self._set_deadline("body")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._bodiless_bytes = 0
        cycle = self.cycle
        if isinstance(cycle, Exchange):
            cycle.on_body(body)
            if self._deadline_of == "body":
                self._deadline_s += len(body) / BODY_RATE_BYTES_PER_S
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._is_between = True
        self._bodiless_bytes = 0
        if self._deadline_of == "linger":
            self._close()
            return
        if self.cycle.response_complete:
            self._set_deadline("idle")
            return
        self._deadline_s = _NEVER
        self._deadline_of = ""
        if isinstance(self.cycle, Exchange):
            self.cycle.on_body_complete()
        else:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        if not isinstance(cycle, Exchange):
            if self._broken and cycle.more_body:
                self._part_before_body(cycle)
            else:
                super()._start_asgi_task(cycle, app)
        elif cycle.early_error is not None and not cycle.body_complete:
            cycle.fail(cycle.early_error)
        else:
            cycle.start()

    # the end of an answer
    def exchange_complete(self, exchange: Exchange) -> None:
        """An exchange has written its answer."""
        if exchange.keep_alive:
            if self._deadline_of or self.pipeline or self._broken or self.flow.read_paused:
                self.on_response_complete()
            else:  # the plain case of the same
                self.server_state.total_requests += 1
                self._active = None
                self._deadline_of = "idle"
                self._deadline_s = time.monotonic() + self.limits.idle_s
        elif exchange.is_cut:
            self._close_soon()
        elif self._broken:
            self._part()
        else:
            self._set_deadline("linger")
            if exchange.body_complete:
                self._close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._active = None
        if self.transport.is_closing():
            return
        if not (self.pipeline or self._broken or self.flow.read_paused or self._deadline_of):
            self._set_deadline("idle")
        elif self.pipeline:
            self.loop.call_soon(self._go_on)  # not from here: a row of refusals would nest
        elif self._broken:
            self._part()
        else:
            if self._deadline_of == "":
                self._set_deadline("idle")
            if self.flow.read_paused:
                self._go_on()

    def _go_on(self) -> None:
        """Start who is next in line; read on when nobody waits. Neither while the client does not read its answers."""
        if self.flow.write_paused or self.transport.is_closing():
            return
        if self.pipeline and self._active is None:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        if not self.pipeline:
            self.flow.resume_reading()
            if self._deadline_of:
                self._set_deadline(self._deadline_of)  # what was not read could not come
            if self._ahead:
                ahead, self._ahead = self._ahead, b""
                self.data_received(ahead)

    # back-pressure
    def pause_writing(self) -> None:
        self._paused_since_s = time.monotonic()
        if isinstance(self._active, Exchange):
            self._active.pause()
        super().pause_writing()
        self.flow.pause_reading()  # who reads no answers gets no more of them

    def resume_writing(self) -> None:
        self._paused_since_s = _NEVER
        super().resume_writing()
        if isinstance(self._active, Exchange):
            self._active.resume()
        self._go_on()

    # deadlines
    def _set_deadline(self, of: str) -> None:
        self._deadline_of = of
        self._deadline_s = time.monotonic() + self.limits.seconds[of]

    def sweep(self, now_s: float) -> None:
        """Called a few times a second by the server for each connection."""
        if now_s - self._paused_since_s > STALL_S:
            self.transport.abort()
        elif now_s > self._deadline_s and not self.flow.read_paused and not self.pipeline:
            self._pass_deadline()

    def _pass_deadline(self) -> None:
        of = self._deadline_of
        if of == "linger":
            self.transport.abort()
        elif of in ("first", "idle"):
            self._set_deadline("linger")
            self.transport.close()
        else:
            self._deadline_s = _NEVER
            limit_s = self.limits.seconds[of]
            self._give_up(RequestTimeout(f"The request's {of} did not arrive within {limit_s:g} s."))
