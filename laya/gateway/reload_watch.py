"""Owns: noticing that config.yaml has changed, once for several quick edits. Reads no line of it.

A look is one `stat`. A change counts when the file has been still between two looks, so a file that is half written, or
saved three times in a second, is read once and whole. A file that is gone for a moment, as editors do it, is no change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

LOOK_EVERY_S = 0.5

Stamp = tuple[str, int, int, int]  # path, inode, size, time of the last change in nanoseconds


class ConfigWatch:
    """See the module. `look` is the clockwork, one step; `run` calls it for as long as the server runs."""

    def __init__(
        self, path: Callable[[], Path | None], is_on: Callable[[], bool], changed: Callable[[], Awaitable[None]]
    ) -> None:
        """path: the file that would be read now. is_on: whether its changes are of interest at all."""
        self._path = path
        self._is_on = is_on
        self._changed = changed
        self._in_force = self._last = self._stamp()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        stamp, before = self._stamp(), self._last
        self._last = stamp
        if stamp is None or stamp != before or stamp == self._in_force:
            return
        self._in_force = stamp
        if self._is_on():
            await self._changed()

    def _stamp(self) -> Stamp | None:
        try:
            path = self._path()
            if path is None:
                return None
            stat = path.stat()
        except OSError:
            return None
        return str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns
