"""Owns: a chat, completion or embedding that a handler of the app asks for, in the name of the client it answers.

Such a request goes the same six steps as one of the hot path (`dispatch.py`), and is counted once. Only its two ends
differ: its body is given, its answer is read piece by piece. When the client leaves, the work is cancelled where it
stands. Knows no API but the one inside. This is what translated APIs stand on:

    async def create(self, request: Request) -> Any:                       # a handler of a Starlette route
        return self._inner.answer(EndpointKind.CHAT, self._answer)

    async def _answer(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = read(body)                                  # a LayaError raised here is counted and answered
        if not asked.stream:
            return reply(translated(await exchange.ask_whole(asked.chat)))     # raises what refused or failed it
        return sse(self._events(exchange, await exchange.ask_stream(asked.chat)))   # here its first piece has come

    async def _events(self, exchange, pieces):
        try:
            async for piece in pieces:     # a dict is an event of the engine, bytes are an SSE comment to pass on
                yield piece if isinstance(piece, bytes) else translated_event(piece)
        except Exception as error:         # it broke off: say so in this API's words, which are the last
            yield error_event(exchange.broken(error))
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from laya.errors import LayaError, RequestTimeout
from laya.gateway.answering import Outcome
from laya.gateway.assemble import encode
from laya.gateway.envelopes import answer_error
from laya.gateway.exchange import Exchange
from laya.gateway.limits import BODY_RATE_BYTES_PER_S, Limits
from laya.types import KIB, EndpointKind

if TYPE_CHECKING:
    from laya.gateway.dispatch import Dispatcher

Piece: TypeAlias = dict[str, Any] | bytes  # an event's JSON, or a comment (": prefill 40 %") to pass on where it can be
Work: TypeAlias = Callable[["InnerExchange", bytes], Awaitable[Response]]
HOLD_BYTES = 64 * KIB  # of an answer whose client reads slowly; above it the engine waits
_OUTER_ALONE = (b"access-control-", b"vary:")  # what the app around the handler sets by itself
_DECODER = msgspec.json.Decoder(dict[str, Any])


def sse(events: AsyncIterator[bytes]) -> StreamingResponse:
    """A stream of server-sent events."""
    return StreamingResponse(events, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"}, "text/event-stream")


class _Door:
    """Stands where an exchange has its client's connection; the answer goes out of the exchange itself."""

    scheme = ""  # there is no socket that the native pump could write to

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.transport = self

    def abort(self) -> None:
        """Nothing is half-written here: who reads the answer is told why it ends."""

    def is_closing(self) -> bool:
        return False

    def exchange_complete(self, exchange: Exchange) -> None:
        """No other request waits behind it."""


class InnerExchange(Exchange):
    """One request, asked by `ask_whole` or `ask_stream`, once."""

    def __init__(self, dispatcher: Dispatcher, limits: Limits, kind: EndpointKind) -> None:
        super().__init__(cast(Any, _Door(limits)), dispatcher, kind, http_1_0=True, keep_alive=False)
        self.started = True
        self._pieces_here: deque[bytes] = deque()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._error: LayaError | None = None
        self.ends_later = False  # what is made of the answer may still fail: its handler's end is its own
        self._is_answered = False  # its engine is done with it

    async def ask_whole(self, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """The answer to this body, whole. Raises the LayaError that refused or failed it."""
        self.ends_later = True
        self._ask(body)
        pieces = []
        while (data := await self._next()) is not None:
            pieces.append(data)
        return _DECODER.decode(b"".join(pieces))

    async def ask_stream(self, body: dict[str, Any] | bytes) -> AsyncIterator[Piece]:
        """The events of the answer to this body, which says `stream`; from the first one on, no other engine is tried.

        Raises the LayaError that refused or failed it before; the iterator raises what fails it later.
        """
        self._ask(body)
        return self._events(await self._next())

    def broken(self, error: Exception) -> LayaError:
        """What the last words of its stream are to tell. The stream gets no end, so that it looks whole to nobody."""
        self.is_cut = True
        return self.dispatcher.fault(f"request {self.request_id!r}", error)

    @property
    def answer_headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer's head tells of this request, for the answer of the outer one."""
        lines = b"".join((b"" if self._error else self.origin, *self.extra_headers)).split(b"\r\n")
        pairs = (line.partition(b": ") for line in lines if line and not line.lower().startswith(_OUTER_ALONE))
        return [(name.lower(), value) for name, _, value in pairs]

    def _ask(self, body: dict[str, Any] | bytes) -> None:
        self.on_body(body if isinstance(body, bytes) else encode(body))
        self.body_complete = True
        self.begin()

    async def _next(self) -> bytes | None:
        """The next bytes of the answer; None at its end."""
        while not self._pieces_here:
            if self._error is not None:
                raise self._error
            if self.outcome is not None:
                if self.outcome != "served":
                    raise asyncio.CancelledError  # the client left: nobody reads on
                return None
            if self._is_answered:
                return None
            self._news.clear()
            await self._news.wait()
        data = self._pieces_here.popleft()
        self._unread_bytes -= len(data)
        if self.upstream_paused and self._unread_bytes <= HOLD_BYTES // 2:
            self.resume()
        return data

    async def _events(self, data: bytes | None) -> AsyncIterator[Piece]:
        rest = b""
        while data is not None:
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event.startswith(b":"):
                    yield event + b"\n\n"
                elif not event.endswith(b"[DONE]"):
                    yield _DECODER.decode(event[event.find(b"data:") + 5 :])
            data = await self._next()

    def enough(self, prompt_tokens: int, output_tokens: int) -> None:
        """What has come is all that is wanted: the request is served, and its engine stops. The tokens are what the
        events told of it so far."""
        if self.stream:
            self.dispatcher.streams.take_back(self.stream)
        self.prompt_tokens, self.n_tokens_out = prompt_tokens, output_tokens
        self.finish("served")

    async def read_outer(self, receive: Callable[[], Awaitable[Any]]) -> bytes:
        """The outer request's body, held to the same limits as one of the hot path.

        Raises what refuses it, and ClientDisconnect.
        """
        limits = self.protocol.limits
        deadline_s = time.monotonic() + limits.seconds["body"]
        while self.early_error is None:
            try:
                message = await asyncio.wait_for(receive(), deadline_s - time.monotonic())
            except asyncio.TimeoutError:
                limit_s = limits.seconds["body"]
                raise RequestTimeout(f"The request's body did not arrive within {limit_s:g} s.") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            data = message.get("body", b"")
            deadline_s += len(data) / BODY_RATE_BYTES_PER_S
            self.on_body(data)
            if self.early_error is None and not message.get("more_body"):
                body, self.body = bytes(self.body), b""
                return body
        raise self.early_error

    # what the steps write and how they end, in place of a connection's
    def write(self, data: bytes) -> None:
        self.head_sent = True
        if data:
            self._pieces_here.append(data)
            self._unread_bytes += len(data)
            self._news.set()
            if self._unread_bytes > HOLD_BYTES and not self.upstream_paused:
                self.pause()

    def start_raw(self, status: int, content_type: bytes, content_length: bytes | None) -> None:
        self.head_sent = True

    def respond(self, status: int, body: bytes, outcome: Outcome, kind: bytes = b"") -> None:
        self.end(body, outcome)

    def end(self, data: bytes, outcome: Outcome) -> None:
        if outcome == "served":  # what else would be written is the error, which is raised
            self.write(data)
            if self.ends_later:
                self._is_answered = True
                self._news.set()
                self.dispatcher.let_go(self)
                return
        self.finish(outcome)

    break_off = end  # its framing is the outer answer's, which `broken` cuts

    def fail(self, error: LayaError) -> None:
        if self.outcome is None:
            self._error = error
            super().fail(error)
            if self.outcome is None:  # another replica has taken the request
                self._error = None

    def finish(self, outcome: Outcome) -> None:
        super().finish(outcome)
        self._news.set()


class InnerAnswer:
    """What a handler returns to Starlette: runs `work` and ends it when the client leaves."""

    def __init__(self, exchange: InnerExchange, work: Work) -> None:
        self._exchange = exchange
        self._work = work

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        exchange, headers = self._exchange, scope["headers"]
        authorization = exchange.read_head(headers, exchange.protocol.limits.max_body_bytes)
        exchange.dispatcher.arrive(exchange, authorization, headers)
        try:
            body = await exchange.read_outer(receive)
        except LayaError as error:
            await self._refuse(error, scope)(scope, receive, send)
        except ClientDisconnect:
            exchange.client_gone()
        else:
            await self._run(body, scope, receive, send)
        finally:
            if exchange.outcome is None:
                exchange.client_gone()

    async def _run(self, body: bytes, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Work and answer, until that is done or the client leaves."""
        work = asyncio.ensure_future(self._serve(body, scope, send))
        gone = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                self._exchange.client_gone()
            elif not work.cancelled() and work.exception() is not None:
                self._exchange.finish("failed")
            work.cancel()
            gone.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()

    async def _serve(self, body: bytes, scope: MutableMapping[str, Any], send: Any) -> None:
        exchange = self._exchange
        try:
            response = await self._work(exchange, body)
        except Exception as error:
            response = self._refuse(exchange.dispatcher.fault(f"request {exchange.request_id!r}", error), scope)
        said = {name for name, _ in response.raw_headers}
        response.raw_headers += [header for header in exchange.answer_headers if header[0] not in said]

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                exchange.finish("served")  # where the work needed no engine, or not all of its answer
                if exchange.is_cut:
                    scope["state"]["break_off"]()
            await send(message)

        await response(scope, _nothing_comes, send_on)

    def _refuse(self, error: LayaError, scope: MutableMapping[str, Any]) -> Response:
        self._exchange.fail(error)
        self._exchange.finish("failed")  # no other replica takes what nobody waits for
        return answer_error(error, scope["path"])


class Inner:
    """Makes the answers; one for each gateway."""

    def __init__(self, dispatcher: Dispatcher, limits: Limits) -> None:
        self._dispatcher = dispatcher
        self._limits = limits

    def answer(self, kind: EndpointKind, work: Work) -> InnerAnswer:
        """What a handler returns. `work` gets an exchange of this kind and the outer request's body."""
        return InnerAnswer(InnerExchange(self._dispatcher, self._limits, kind), work)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing_comes() -> Any:
    """The client is watched already, so a response does not."""
    await asyncio.get_running_loop().create_future()
