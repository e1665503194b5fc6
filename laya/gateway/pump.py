"""Owns: which streams flow through the native pump: on a thread of its own, from socket to socket, without Python.

A stream whose answer is plain flows from the engine's first byte on, its end included; one that had to come back flows
again when nothing of it is in Python's hands: the engine's bytes end at a chunk boundary, the client has all that was
written. A prefill that takes a while, usage for the client, errors, a slow client and whatever else is not plain bring
it back. Where there is no native core, every stream stays.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from laya.gateway.outbox import Outbox

try:
    from laya._core import StreamBack, StreamPump
except ImportError:  # no compiler when Laya was installed
    StreamPump = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange
    from laya.gateway.relay import StreamRelay
    from laya.gateway.upstream import UpstreamConnection

TRIES = 4  # turns of the loop within which what was written is usually with the client


class Pump:
    """Streams by the id of the native pump."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._native = StreamPump() if StreamPump is not None else None
        self._streams: dict[int, tuple[Exchange, StreamRelay]] = {}
        self._left: dict[int, StreamBack] = {}  # those that left and are still to be seen to
        self._is_watched = False

    @property
    def n_pieces(self) -> int:
        """Pieces that went through, in all."""
        return self._native.n_pieces if self._native is not None else 0

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, exchange: Exchange, relay: StreamRelay) -> None:
        """Take a stream whose request is just being written."""
        if not self._can_take(exchange) or not exchange.chunked or exchange.held_bytes:
            return
        if exchange.head_sent:  # it was told that it waits; it is offered when it has begun
            return
        if self._outbox.is_clear(exchange.protocol.transport):
            self._add(exchange, relay, exchange.stream_head())

    def offer(self, exchange: Exchange, relay: StreamRelay) -> None:
        """Take a stream that has begun as soon as that can be done."""
        if self._can_take(exchange) and not relay.is_offered:
            relay.is_offered = True
            asyncio.get_running_loop().call_soon(self._take, exchange, relay, TRIES)

    def _can_take(self, exchange: Exchange) -> bool:
        """Not over TLS, where the socket has what that makes of it."""
        return self._native is not None and exchange.protocol.scheme == "http"

    def _take(self, exchange: Exchange, relay: StreamRelay, tries: int) -> None:
        connection, client = exchange.connection, exchange.protocol.transport
        relay.is_offered = False
        can_flow = connection is not None and connection.is_at_boundary and not connection.is_paused
        if not can_flow or not relay.is_steady or client.is_closing():
            return
        if self._outbox.is_clear(client):
            self._add(exchange, relay, None)
        elif tries:
            relay.is_offered = True
            asyncio.get_running_loop().call_soon(self._take, exchange, relay, tries - 1)

    def _add(self, exchange: Exchange, relay: StreamRelay, head: bytes | None) -> None:
        """`head`: for the client, where the engine has not sent anything yet."""
        native, connection, client = self._native, exchange.connection, exchange.protocol.transport
        assert native is not None and connection is not None
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().add_reader(native.fileno(), self.see_to_left)
        engine_fd, client_fd = connection.fileno(), client.get_extra_info("socket").fileno()
        is_new = head is not None
        stream = native.add(engine_fd, client_fd, is_new, relay.ends_plainly, not is_new, head or b"")
        if stream:
            self._streams[stream] = exchange, relay
            exchange.stream = stream
            connection.lend(lambda: self.take_back(stream))

    def take_back(self, stream: int) -> None:
        """Have a stream back that is not to go on; it may turn out to be served."""
        assert self._native is not None
        back = self._left.pop(stream, None) or self._native.remove(stream)
        if back is not None:
            self._come_back(back)

    def sweep(self, now_s: float) -> None:
        """Streams that flow have begun, for who looks at them: called a few times a second."""
        assert self._native is not None or not self._streams
        for stream, (exchange, _) in self._streams.items():
            if not exchange.first_token_s:
                exchange.first_token_s = self.first_token_s(stream)

    def first_token_s(self, stream: int) -> float:
        """When the first token of a stream that flows went through; 0 before."""
        return self._native.first_token_s(stream) if self._native is not None else 0.0

    def see_to_end_of(self, stream: int) -> None:
        """Whose client asks for more: settle it, if the client has its end."""
        assert self._native is not None
        self._native.await_step(stream)
        self.see_to_left()

    def see_to_left(self) -> None:
        """Settle what has ended, and go on here with what is not plain."""
        assert self._native is not None
        self._left.update((back.id, back) for back in self._native.leavers())
        while self._left:
            back = self._left.pop(next(iter(self._left)))
            connection = self._come_back(back)
            if connection is not None:
                connection.come_back(back.raw, back.error)

    def _come_back(self, back: StreamBack) -> UpstreamConnection | None:
        """Gives the connection that the rest is to be read from, if there is more to come."""
        exchange, relay = self._streams.pop(back.id)
        connection, exchange.stream = exchange.connection, 0
        exchange.head_sent |= back.is_head_sent
        relay.has_flowed(back)
        if back.unsent:
            self._outbox.write(exchange.protocol.transport, back.unsent)
        if connection is None or not back.is_ended:
            return connection
        connection.has_flowed(keep=back.is_clean)
        relay.on_flowed()
        return None

    def close(self) -> None:
        """The server ends."""
        if self._is_watched and self._native is not None:
            self._is_watched = False
            asyncio.get_running_loop().remove_reader(self._native.fileno())
