"""Owns: giving memory back when the guard asks: hold what arrives, drop caches, unload what idles, stop an engine.

Knows the fleet; knows nothing of readings and when which step is due.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import psutil

from laya.errors import EngineCrashed, MemoryPressure

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

HELD_RETRY_S = 5.0
_RUNS = ("loading", "ready")


class Relief:
    """The steps, as the guard calls them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.reason: str | None = None  # why nothing new is let in; None: it is

    def set_admitting(self, admitting: bool, reason: str = "") -> None:
        """False: nothing is loaded, and new requests wait in their queues; what runs goes on."""
        self.reason = None if admitting else reason or "memory is short"
        for endpoint in list(self._fleet.endpoints.values()):
            endpoint.hold("memory", self.reason)
            if admitting:
                self._fleet.pump(endpoint)

    def check_admitting(self, model_id: str) -> None:
        """Raise MemoryPressure for a load that must not begin now."""
        if self.reason is not None:
            raise MemoryPressure(f"'{model_id}' is not loaded now: {self.reason}.", HELD_RETRY_S)

    async def drop_caches(self) -> int:
        """Give back what costs nothing to give: the files of models that are not loaded, and freed memory of our own.

        Gives the bytes that this process held before and does not hold now.
        """
        own = psutil.Process()
        before_bytes = own.memory_info().rss
        loaded = {status.id for status in self._fleet.statuses() if status.state != "unloaded"}
        paths = [file.path for model_id, file in self._fleet.files.items() if model_id not in loaded]
        await asyncio.to_thread(_forget_files, [str(path) for path in paths])
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves
        if trim is not None:
            trim(0)
        return int(max(0, before_bytes - own.memory_info().rss))

    async def unload_idle(self, device: str | None = None, seen: Collection[str] = ()) -> list[str]:
        """Unload the longest unused of the idle models; gives its id, or nothing. Pinned models stay.

        device: only what holds memory of that, by its plan or because it was `seen` there.
        """
        for idle in self._fleet.leaving_order(None, at_once=True):
            if device and idle.name not in seen and not self._fleet.ledger.held_by(idle.name, device):
                continue
            await self._fleet.unload(idle, deadline_s=0.0)
            return [idle.name]
        return []

    async def stop_youngest(self, reason: str) -> str | None:
        """Stop the engine that was started last, whatever it does; its requests end with the reason. Gives its id."""
        by_name = {each.name: each for each in self._fleet.endpoints.values() if each.is_here}
        running = [status for status in self._fleet.supervisor.status() if status.state in _RUNS]
        running = [status for status in running if status.id in by_name]
        if not running:
            return None
        youngest = min(running, key=lambda status: status.since_s)
        endpoint: Endpoint = by_name[youngest.id]
        endpoint.close()  # who waits is not let in to it any more
        for exchange in list(endpoint.live):
            words = f"The engine of '{youngest.id}' was stopped to keep this machine alive: {reason}."
            exchange.fail(EngineCrashed(words, cause="memory_pressure"))
        await self._fleet.unload(endpoint, deadline_s=0.0)
        return youngest.id


def _forget_files(paths: list[str]) -> None:
    """Tell the kernel that these files will not be read soon."""
    for path in paths:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # gone, or a folder
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            continue  # a file system without a cache
        finally:
            os.close(file)
