"""Owns: finished turns of the Responses API, each with what was said to it. Knows no model and no form of an item.

A turn names the one it goes on from; turns that go back to the same first one share its id as `root_id`, and are
forgotten together, since a turn without those before it means something else.
"""

from __future__ import annotations

from typing import Any

import msgspec
import peewee

from laya.errors import NotFound, PayloadTooLarge, PreviousResponseNotFound
from laya.store.database import Tables

MOST_TURNS = 10_000  # of one conversation


class KeptTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One finished response."""

    id: str
    owner: str  # `KeyGrant.owner` of the key that made it; "" where the server has none
    previous_id: str | None
    root_id: str
    created_s: float  # seconds since 1970
    document: str  # the response as JSON
    input: str  # the items of its request, a JSON list

    @property
    def n_bytes(self) -> int:
        return len(self.document.encode()) + len(self.input.encode())


class _TurnRow(peewee.Model):
    id = peewee.TextField(primary_key=True)
    owner = peewee.TextField()
    previous_id = peewee.TextField(null=True)
    root_id = peewee.TextField()
    created_s = peewee.DoubleField()
    n_bytes = peewee.BigIntegerField()
    document = peewee.TextField()
    input = peewee.TextField()

    class Meta:
        table_name = "response"


_CHAIN = """
    WITH RECURSIVE chain (id, previous_id, depth) AS (
        SELECT id, previous_id, 0 FROM response WHERE id = {0} AND owner = {0}
        UNION ALL
        SELECT response.id, response.previous_id, chain.depth + 1 FROM response
        JOIN chain ON response.id = chain.previous_id AND response.owner = {0}
        WHERE chain.depth < {0}
    )
    SELECT chain.id, chain.previous_id, response.n_bytes FROM chain JOIN response ON response.id = chain.id
    ORDER BY chain.depth
"""


class ResponseTables(Tables):
    """Responses; every method is one transaction."""

    def keep_response(self, turn: KeptTurn) -> None:
        """Keep a finished turn; on disk when this returns."""
        row = msgspec.to_builtins(turn) | {"n_bytes": turn.n_bytes}
        with self._faults():
            _TurnRow.insert(row).execute(self._database)

    def response(self, response_id: str, owner: str) -> KeptTurn:
        """One turn of this owner. Raises NotFound, for another's too."""
        with self._faults():
            for row in _TurnRow.select().where(_mine(response_id, owner)).execute(self._database):
                return _turn(row)
        raise NotFound(f"Response with id '{response_id}' not found.", param="response_id")

    def turns_until(self, response_id: str, owner: str, most_bytes: int) -> list[KeptTurn]:
        """A conversation from its first turn to this one. Raises PreviousResponseNotFound, also where a turn before it
        is gone, and PayloadTooLarge where it has more than `most_bytes`."""
        with self._faults(), self._database.atomic():
            query, values = _CHAIN.format(self._database.param), (response_id, owner, owner, MOST_TURNS)
            cursor = self._database.execute_sql(query, values)  # type: ignore[no-untyped-call]
            chain: list[tuple[str, str | None, int]] = list(cursor.fetchall())
            missing = chain[-1][1] if chain else response_id
            if missing is not None:
                raise PreviousResponseNotFound(missing, response_id)
            n_bytes = sum(n for _, _, n in chain)
            if n_bytes > most_bytes:
                raise PayloadTooLarge(
                    f"The conversation before this request has {n_bytes} bytes; the limit is {most_bytes} "
                    f"(server.max_body_bytes).",
                    limit_bytes=most_bytes,
                )
            return [self._one(turn_id) for turn_id, _, _ in reversed(chain)]

    def _one(self, response_id: str) -> KeptTurn:
        return _turn(_TurnRow.select().where(_TurnRow.id == response_id).execute(self._database)[0])

    def drop_response(self, response_id: str, owner: str) -> None:
        """Forget one turn. Raises NotFound."""
        with self._faults():
            if not _TurnRow.delete().where(_mine(response_id, owner)).execute(self._database):
                raise NotFound(f"Response with id '{response_id}' not found.", param="response_id")

    def prune_responses(self, *, before_s: float | None, most_bytes: int | None) -> int:
        """Forget conversations whose last turn is older than `before_s`, then those unused longest until all the rest
        have at most `most_bytes`; gives how many."""
        total = peewee.fn.SUM(_TurnRow.n_bytes)
        last_s = peewee.fn.MAX(_TurnRow.created_s)
        query = _TurnRow.select(_TurnRow.root_id, last_s, total).group_by(_TurnRow.root_id).order_by(last_s.desc())
        with self._faults(), self._writing():
            held_bytes, gone = 0, []
            for root_id, used_s, n_bytes in query.tuples().execute(self._database):
                held_bytes += int(n_bytes)
                is_old = before_s is not None and used_s < before_s
                if is_old or (most_bytes is not None and held_bytes > most_bytes):
                    gone.append(root_id)
            for root_id in gone:
                _TurnRow.delete().where(_TurnRow.root_id == root_id).execute(self._database)
        return len(gone)


def _mine(response_id: str, owner: str) -> Any:
    return (_TurnRow.id == response_id) & (_TurnRow.owner == owner)


def _turn(row: Any) -> KeptTurn:
    return KeptTurn(**{name: getattr(row, name) for name in KeptTurn.__struct_fields__})
