"""Owns: that one model is loaded at a time: two would read the disk against each other, and promise the same bytes.

A load that only waits, as for a program that does nothing or listens elsewhere, lets the others go on.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class LoadTurns:
    """`async with turns:` is one load."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._whose: asyncio.Task[object] | None = None

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._whose = asyncio.current_task()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_others(asyncio.current_task())

    def let_others(self, load: asyncio.Task[object] | None) -> None:
        """The turn of this task is over; nothing where it was over before."""
        if self._whose is load and load is not None:
            self._whose = None
            self._lock.release()
