"""Owns: what is written in one turn of the event loop, so that it leaves together at the turn's end.

A write wakes whoever waits at the other end, and waking a process that sleeps costs more than writing does. Written
at once, each answer of a busy gateway wakes its client anew; written together, only the first one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laya.types import KIB

HOLD_BYTES = 64 * KIB  # more is written at once: a transport tells that its client reads too slowly only then


class Outbox:
    """Writes to any number of transports, in the order they came."""

    def __init__(self) -> None:
        self._call_soon: Callable[..., object] | None = None
        self._pending: list[tuple[asyncio.Transport, bytes]] = []
        self._n_bytes = 0

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write at the end of this turn of the loop."""
        if not self._pending:
            if self._call_soon is None:
                self._call_soon = asyncio.get_running_loop().call_soon
            self._call_soon(self.flush)
        self._pending.append((transport, data))
        self._n_bytes += len(data)
        if self._n_bytes > HOLD_BYTES:
            self.flush()

    def is_clear(self, transport: asyncio.Transport) -> bool:
        """Whether all that was ever written to it has left, so that somebody else may write to its socket."""
        return not transport.get_write_buffer_size() and all(held is not transport for held, _ in self._pending)

    def flush(self) -> None:
        """Write now; before anything else is done to a transport that may have something here."""
        pending, self._pending, self._n_bytes = self._pending, [], 0
        for transport, data in pending:
            if not transport.is_closing():
                transport.write(data)
