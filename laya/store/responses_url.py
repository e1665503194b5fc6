"""Owns: which database keeps responses: the SQLite file of everything else, another one, or a PostgreSQL by its URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import peewee

from laya.errors import StoreError
from laya.store.migrations import RESPONSES
from laya.store.responses import KeptTurn, ResponseTables
from laya.store.store import Store

_LOCK = 0x6C617961  # of PostgreSQL's advisory locks: two servers that make the tables at once take turns


class Responses(Protocol):
    """What every database of responses can do; see ResponseTables."""

    def keep_response(self, turn: KeptTurn) -> None: ...
    def response(self, response_id: str, owner: str) -> KeptTurn: ...
    def turns_until(self, response_id: str, owner: str, most_bytes: int) -> list[KeptTurn]: ...
    def drop_response(self, response_id: str, owner: str) -> None: ...
    def prune_responses(self, *, before_s: float | None, most_bytes: int | None) -> int: ...
    def close(self) -> None: ...


def open_responses(url: str | None, path: Path) -> Responses:
    """The database that `store.url` names; `path` where it names none. Raises StoreError."""
    if url is None:
        return Store(path)
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return Store(Path(unquote(parts.path[1:])))
    return PostgresResponses(url)


class PostgresResponses(ResponseTables):
    """Responses in a PostgreSQL database; its tables are made by the first who opens it. Needs the package psycopg."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._name = f"{parts.hostname or 'localhost'}{parts.path}"  # never the user's password
        self._database: Any = peewee.PostgresqlDatabase(url, autoconnect=True)
        with self._faults(), self._database.atomic():
            self._database.execute_sql("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))  # type: ignore[no-untyped-call]
            if not self._database.table_exists("response"):
                for statement in RESPONSES:
                    self._database.execute_sql(statement)  # type: ignore[no-untyped-call]

    def _writing(self) -> Any:
        return self._database.atomic()

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """PostgreSQL's faults as StoreError; a connection that broke is opened anew by the next call."""
        try:
            yield
        except (peewee.ImproperlyConfigured, ImportError) as error:
            raise StoreError(f"store.url: PostgreSQL needs psycopg: pip install 'psycopg[binary]' ({error})") from error
        except (peewee.DatabaseError, peewee.InterfaceError) as error:
            self._database.close()
            raise StoreError(f"{self._name}: {str(error).strip()}") from error

    def close(self) -> None:
        self._database.close()
