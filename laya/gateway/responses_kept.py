"""Owns: finished turns as the gateway reaches them: off the event loop, one at a time, pruned in the background.

One thread writes: SQLite has one writer, and a commit that waits for the disk must not make a stream wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from laya.config import StoreConfig
from laya.errors import LayaError
from laya.store import KeptTurn, Responses, open_responses

if TYPE_CHECKING:
    from laya.gateway.account import Key

logger = logging.getLogger(__name__)
PRUNE_EVERY_S = 600.0
_T = TypeVar("_T")


def owner_of(key: Key | None) -> str:
    """Whose a turn is that came with this key."""
    return "" if key is None else key.grant.owner


class KeptResponses:
    """The store of `store.url`; opened by the first who asks for something."""

    def __init__(self, config: StoreConfig, path: Path, most_bytes: int) -> None:
        """path: the database where the config names no other. most_bytes: of a conversation that is gone on with."""
        self._config = config
        self.path = path
        self._most_bytes = most_bytes
        self._store: Responses | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    async def keep(self, turn: KeptTurn) -> None:
        """On disk when this returns. Raises StoreError."""
        await self._do(lambda store: store.keep_response(turn))

    async def find(self, response_id: str, owner: str) -> KeptTurn:
        """Raises NotFound, StoreError."""
        return await self._do(lambda store: store.response(response_id, owner))

    async def until(self, response_id: str, owner: str) -> list[KeptTurn]:
        """The conversation up to this turn. Raises PreviousResponseNotFound, PayloadTooLarge, StoreError."""
        return await self._do(lambda store: store.turns_until(response_id, owner, self._most_bytes))

    async def drop(self, response_id: str, owner: str) -> None:
        """Raises NotFound, StoreError."""
        await self._do(lambda store: store.drop_response(response_id, owner))

    async def keep_pruned(self) -> None:
        """Forget what is older or more than the config says, now and then, for as long as the server runs."""
        while True:
            try:
                if self._config.url is not None or self.path.exists():
                    await self._do(self._prune)
            except LayaError as error:
                logger.warning("old conversations could not be forgotten: %s", error.message)
            await asyncio.sleep(PRUNE_EVERY_S)

    def _prune(self, store: Responses) -> None:
        keep_s = self._config.keep
        before_s = None if keep_s is None or keep_s < 0 else time.time() - keep_s
        store.prune_responses(before_s=before_s, most_bytes=self._config.max_bytes)

    async def _do(self, work: Callable[[Responses], _T]) -> _T:
        def on_thread() -> _T:
            if self._store is None:
                self._store = open_responses(self._config.url, self.path)
            return work(self._store)

        return await asyncio.get_running_loop().run_in_executor(self._thread, on_thread)
