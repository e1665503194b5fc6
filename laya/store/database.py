"""Owns: opening the SQLite file, its file mode, its form, and faults as sentences. Knows no table.

WAL lets a reader and a writer work at once. Every commit is synced: the machine that freezes and is reset is the very
case in which a conversation must not be lost, and one sync per message costs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peewee

from laya.errors import StoreError
from laya.store.migrations import MIGRATIONS

BUSY_TIMEOUT_S = 5
NO_DATABASE = "put a copy of it back, or move it away, and a new one begins without what it held (keys, usage, chats)"
_PRAGMAS = {"journal_mode": "wal", "foreign_keys": 1, "synchronous": "full", "secure_delete": 1}


class Tables:
    """What every group of tables builds on: the open database, and its faults named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._faults():
            _make_private(path)
            self._database = peewee.SqliteDatabase(str(path), pragmas=_PRAGMAS, timeout=BUSY_TIMEOUT_S)
            try:
                self._migrate()
            except BaseException:
                self._database.close()
                raise

    def _migrate(self) -> None:
        """Bring the file to the newest form. Two processes that open it at once take turns."""
        with self._writing():
            version = self._database.user_version
            if version > len(MIGRATIONS):
                raise StoreError(
                    f"{self.path}: written by a newer Laya (form {version}, this one knows {len(MIGRATIONS)}); "
                    f"upgrade Laya, or move the file away"
                )
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    self._database.execute_sql(statement)  # type: ignore[no-untyped-call]
            self._database.user_version = len(MIGRATIONS)

    def _writing(self) -> Any:
        """A transaction that writes: it waits for its turn before it reads, since it could not afterwards."""
        return self._database.atomic("IMMEDIATE")

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """SQLite's and the file system's faults as StoreError, with the file's name."""
        try:
            yield
        except peewee.DatabaseError as error:
            hint = f": {NO_DATABASE}" if "not a database" in str(error) or "malformed" in str(error) else ""
            raise StoreError(f"{self.path}: {error}{hint}") from error
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}") from error


def _make_private(path: Path) -> None:
    """An existing or new file that only its owner can read; SQLite gives its WAL the same mode.

    A file that is there is never opened here: closing it would drop the locks that this process's connections hold on
    it, and another process, seeing none, would clear away the WAL under them.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
        if mode & 0o077:
            path.chmod(0o600)
