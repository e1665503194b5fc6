"""Owns: how much text one engine is given at a time to count or split, beside the requests that it runs.

Splitting a text takes an engine up to `COST_BYTES` for each of its bytes, which no plan counts: what is read at once
stays within half of what the engine's ceiling leaves above the plan. Texts that are larger are refused, others wait
for their turn, whoever asks. Knows no tokens and no API; what is asked and how it gets there is given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from laya.errors import InvalidRequest
from laya.memory import ceiling_bytes
from laya.types import KIB, Plan

COST_BYTES = 160  # measured: 55 of prose, 72 of short words, 146 of blanks, 157 of digits
MARGIN_SHARE = 0.5  # of what the ceiling leaves above the plan; the rest is for prompts of requests that run
LEAST_BYTES = 128 * KIB  # so a coding agent's first request is counted, however small the window
WINDOW_BYTES = 6  # for each token of the window: what may fit is counted, whatever the margin
SMALL_BYTES = 16 * KIB  # does not wait: the pool lets in few at once, and that is little

Fetch = Callable[[str, str, bytes], Awaitable[tuple[int, bytes]]]


def counted_bytes_most(plan: Plan, memory_limit_bytes: int | None = None) -> int:
    """Of text that an engine of this plan is given at a time."""
    held_bytes = sum(device.total_bytes for device in plan.devices if device.device == "cpu")
    margin_bytes = ceiling_bytes(plan, memory_limit_bytes) - held_bytes if held_bytes else 0
    window_bytes = plan.settings.max_seq_len * WINDOW_BYTES
    return max(LEAST_BYTES, window_bytes, int(margin_bytes * MARGIN_SHARE) // COST_BYTES)


class Counting:
    """Of one engine, from its start to its end."""

    def __init__(self, fetch: Fetch) -> None:
        self.most_bytes = LEAST_BYTES
        self._fetch = fetch
        self._reading_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._tasks: set[asyncio.Task[tuple[int, bytes]]] = set()
        self._has_broken = False

    @property
    def may_have_killed(self) -> bool:
        """Whether the engine's end came upon a large text that it was reading for nobody's answer."""
        return self._has_broken or self._reading_bytes > 0

    def check(self, n_bytes: int, what: str, *, param: str | None = None, share: int = 1) -> None:
        """Raise InvalidRequest for a text that is not counted. share: of the most that is, what this may be."""
        most_bytes = self.most_bytes // share
        if n_bytes > most_bytes:
            raise InvalidRequest(
                f"{what} has {n_bytes} bytes; this model's engine splits at most {most_bytes} of one request "
                "into tokens, since more would take memory that is not planned.",
                param=param,
                bytes=n_bytes,
                max_bytes=most_bytes,
            )

    async def ask(self, path: str, body: bytes, n_bytes: int) -> tuple[int, bytes]:
        """(status, answer) of the engine to a body of so much text. Raises OSError when it can't be reached.

        A client that leaves meanwhile does not make room: the engine reads on.
        """
        n_bytes = 0 if n_bytes <= SMALL_BYTES else min(n_bytes, self.most_bytes)
        await self._enter(n_bytes)
        task = asyncio.get_running_loop().create_task(self._read(path, body, n_bytes))
        self._tasks.add(task)
        task.add_done_callback(self._read_ended)
        return await asyncio.shield(task)

    async def _read(self, path: str, body: bytes, n_bytes: int) -> tuple[int, bytes]:
        try:
            return await self._fetch("POST", path, body)
        except ConnectionError:
            self._has_broken |= n_bytes > 0
            raise
        finally:
            self._leave(n_bytes)

    def _read_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to who asked, if it is still there

    async def _enter(self, n_bytes: int) -> None:
        if n_bytes == 0 or (not self._waiting and self._reading_bytes + n_bytes <= self.most_bytes):
            self._reading_bytes += n_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((n_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came just now
                self._leave(n_bytes)
            raise

    def _leave(self, n_bytes: int) -> None:
        self._reading_bytes -= n_bytes
        while self._waiting and self._reading_bytes + self._waiting[0][0] <= self.most_bytes:
            next_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._reading_bytes += next_bytes
                turn.set_result(None)
