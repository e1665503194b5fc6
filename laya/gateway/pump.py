"""Owns: which streams flow through the native pump: their bytes go from socket to socket without Python.

A stream is offered once its first token is on its way, and taken when nothing of it is in Python's hands: the engine's
bytes end at a chunk boundary, the client has all that was written. Progress, usage, errors, the end, a slow client and
whatever else is not a whole event bring it back. Where there is no native core, every stream stays.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from laya.gateway.outbox import Outbox

try:
    from laya._core import StreamPump
except ImportError:  # no compiler when Laya was installed
    StreamPump = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange
    from laya.gateway.relay import StreamRelay

TRIES = 4  # turns of the loop within which what was written is usually with the client


class Pump:
    """Streams by the id of the native pump."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._native = StreamPump() if StreamPump is not None else None
        self._streams: dict[int, Exchange] = {}
        self._is_watched = False

    @property
    def n_pieces(self) -> int:
        """Pieces that went through, in all."""
        return self._native.n_pieces if self._native is not None else 0

    def __len__(self) -> int:
        return len(self._streams)

    def offer(self, exchange: Exchange, relay: StreamRelay) -> None:
        """Take the stream as soon as that can be done."""
        if self._native is not None and not relay.is_offered:
            relay.is_offered = True
            asyncio.get_running_loop().call_soon(self._take, exchange, relay, TRIES)

    def _take(self, exchange: Exchange, relay: StreamRelay, tries: int) -> None:
        native, connection, client = self._native, exchange.connection, exchange.protocol.transport
        relay.is_offered = False
        can_flow = connection is not None and connection.is_at_boundary and not connection.is_paused
        if native is None or connection is None or not can_flow or not relay.is_steady or client.is_closing():
            return
        if client.get_write_buffer_size():
            if tries:
                relay.is_offered = True
                asyncio.get_running_loop().call_soon(self._take, exchange, relay, tries - 1)
            return
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().add_reader(native.fileno(), self._turn)
        stream = native.add(connection.fileno(), client.get_extra_info("socket").fileno())
        if stream:
            self._streams[stream] = exchange
            connection.lend(lambda: self._forget(stream))

    def _forget(self, stream: int) -> None:
        """Its connection is dropped, with all that was still to come."""
        if self._streams.pop(stream, None) is not None and self._native is not None:
            self._native.remove(stream)

    def _turn(self) -> None:
        assert self._native is not None
        for stream, raw, unsent in self._native.turn() or ():
            self._come_back(self._streams.pop(stream), raw, unsent)

    def _come_back(self, exchange: Exchange, raw: bytes, unsent: bytes) -> None:
        connection = exchange.connection
        if connection is not None:
            if unsent:
                self._outbox.write(exchange.protocol.transport, unsent)
            connection.come_back(raw)

    def close(self) -> None:
        """The server ends."""
        if self._is_watched and self._native is not None:
            self._is_watched = False
            asyncio.get_running_loop().remove_reader(self._native.fileno())
