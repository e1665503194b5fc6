"""Owns: the store as the rooms above see it: one object with every group of tables."""

from __future__ import annotations

from types import TracebackType

from laya.store.conversations import ConversationTables
from laya.store.corrections import CorrectionTables
from laya.store.keys import KeyTables
from laya.store.rates import RatesTables
from laya.store.responses import ResponseTables
from laya.store.usage import UsageTables


class Store(ConversationTables, CorrectionTables, RatesTables, KeyTables, ResponseTables, UsageTables):
    """`Store(path)` opens or makes the file (mode 0600). Raises StoreError naming the file.

    Threads may share a store; each has its own connection, and `close` closes the caller's.
    """

    def close(self) -> None:
        """Close this thread's connection; the next call opens it again."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
