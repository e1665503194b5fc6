"""Owns: waiting for room: loads that would fit were busy models gone, and the news that one of them may be.

Nobody waits here under the lock of loads, so what fits meanwhile is loaded. Knows nothing of plans.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from laya.errors import EngineFailed, MemoryBusy
from laya.gateway.endpoint import Endpoint
from laya.types import EngineAddress

LOOK_AGAIN_S = 1.0  # other programs give memory back without a word
BACK_OFF_HELD_S = 5.0  # requests wait this long for an engine that is left alone after it died
CLOCK_STEP_S = 0.01  # a timer may be this early
MORE_SHARE = 1.01  # what can be had moves a little all the time


class Room:
    """The loads that wait, the longest waiting first."""

    def __init__(self, load: Callable[[Endpoint], Awaitable[EngineAddress]], reach_bytes: Callable[[], int]) -> None:
        """reach_bytes: what is free now, and what idle models would return."""
        self._load = load
        self._reach_bytes = reach_bytes
        self._waiting: deque[asyncio.Future[None]] = deque()

    def changed(self) -> None:
        """An engine has nothing to do any more, or is gone: all look again, in the order in which they came."""
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def take_turn(self, endpoint: Endpoint, is_wanted: Callable[[], bool]) -> EngineAddress:
        """Load as soon as busy models leave room. Raises MemoryBusy when it is not wanted any more, and what refuses
        the load."""
        while True:
            try:
                return await self._load(endpoint)
            except MemoryBusy as error:
                endpoint.no_room = error
                seen_bytes = int(error.details["available_bytes"] * MORE_SHARE)
                while is_wanted():
                    await self._news()
                    if is_wanted() and (endpoint.pool is not None or self._reach_bytes() > seen_bytes):
                        break
                else:
                    raise

    async def take_turn_for_queue(self, endpoint: Endpoint) -> None:
        """`take_turn` for who waits at the endpoint; once, a short back-off is waited for instead of refusing them."""
        try:
            await self.take_turn(endpoint, endpoint.is_waited_for)
            return
        except EngineFailed as error:
            if error.retry_after_s is None or error.retry_after_s > BACK_OFF_HELD_S:
                raise
            wait_s = error.retry_after_s
        await asyncio.sleep(wait_s + CLOCK_STEP_S)
        if endpoint.queue and endpoint.pool is None:
            await self.take_turn(endpoint, endpoint.is_waited_for)

    async def _news(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await asyncio.wait((future,), timeout=LOOK_AGAIN_S)
        if not future.done():
            self._waiting.remove(future)
