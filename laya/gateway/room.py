"""Owns: waiting for room: loads that would fit were busy models gone, and the news that one of them may be.

Nobody waits here under the lock of loads, so what fits meanwhile is loaded. Knows nothing of plans.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from laya.errors import EngineFailed, MemoryBusy
from laya.gateway.endpoint import Endpoint
from laya.gateway.turns import Turns
from laya.types import EngineAddress

LOOK_AGAIN_S = 0.5  # other programs give memory back without a word, and who was just used lingers
BACK_OFF_HELD_S = 5.0  # requests wait this long for an engine that is left alone after it died
CLOCK_STEP_S = 0.01  # a timer may be this early
MORE_SHARE = 1.01  # what can be had moves a little all the time


class Room:
    """The loads that wait, the longest waiting first."""

    def __init__(
        self, load: Callable[[Endpoint], Awaitable[EngineAddress]], reach_bytes: Callable[[Endpoint], int], turns: Turns
    ) -> None:
        """reach_bytes: what is free now for an endpoint's engine, and what idle models would return."""
        self._load = load
        self._reach_bytes = reach_bytes
        self._turns = turns
        self._waking: set[Endpoint] = set()
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
        since_s = time.monotonic()
        try:
            while True:
                try:
                    return await self._load(endpoint)
                except MemoryBusy as error:
                    endpoint.no_room = error
                    if not await self._more_room(endpoint, is_wanted, since_s, error):
                        raise
        finally:
            self._turns.settle(endpoint)

    async def _more_room(
        self, endpoint: Endpoint, is_wanted: Callable[[], bool], since_s: float, error: MemoryBusy
    ) -> bool:
        """Wait until there is more room than this refusal saw; False: the load is not wanted any more."""
        seen_bytes = int(error.details["available_bytes"] * MORE_SHARE)
        while is_wanted():
            self._turns.ask(endpoint, since_s, error)
            await self._news()
            may_try = self._turns.may_try(endpoint) and self._reach_bytes(endpoint) > seen_bytes
            if is_wanted() and (endpoint.pool is not None or may_try):
                return True
        return False

    async def take_turn_for_queue(self, endpoint: Endpoint) -> bool:
        """`take_turn` for who waits at the endpoint; once, a short back-off is waited for instead of refusing them.

        False: that is being done already.
        """
        if endpoint in self._waking:
            return False
        self._waking.add(endpoint)
        try:
            await self._take_turn_or_later(endpoint)
        finally:
            self._waking.discard(endpoint)
        return True

    async def _take_turn_or_later(self, endpoint: Endpoint) -> None:
        try:
            await self.take_turn(endpoint, lambda: bool(endpoint.queue))
            return
        except EngineFailed as error:
            if error.retry_after_s is None or error.retry_after_s > BACK_OFF_HELD_S:
                raise
            wait_s = error.retry_after_s
        await asyncio.sleep(wait_s + CLOCK_STEP_S)
        if endpoint.queue and endpoint.pool is None:
            await self.take_turn(endpoint, lambda: bool(endpoint.queue))

    async def _news(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await asyncio.wait((future,), timeout=LOOK_AGAIN_S)
        if not future.done():
            self._waiting.remove(future)
