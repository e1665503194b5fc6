"""Owns: API keys that were made while servers ran or not: their digests and what they may do. Never a key itself."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import peewee

from laya.errors import Conflict, NotFound, nearest
from laya.store.database import Tables
from laya.types import KeyGrant


class _KeyRow(peewee.Model):
    name = peewee.TextField(primary_key=True)
    sha256 = peewee.TextField()
    role = peewee.TextField()
    models = peewee.TextField()  # a JSON list
    expires_s = peewee.DoubleField(null=True)
    max_concurrent = peewee.IntegerField(null=True)
    requests_per_minute = peewee.IntegerField(null=True)
    tokens_per_minute = peewee.IntegerField(null=True)
    created_s = peewee.DoubleField()
    id = peewee.TextField()
    priority = peewee.TextField(null=True)
    max_priority = peewee.TextField(null=True)

    class Meta:
        table_name = "api_key"


class KeyTables(Tables):
    """API keys; every method is one transaction. A change touches the stamp, which servers watch."""

    @property
    def keys_stamp(self) -> Path:
        """The file whose time says when keys changed last."""
        return stamp_of(self.path)

    def api_keys(self) -> list[KeyGrant]:
        """Every key, the oldest first."""
        query = _KeyRow.select().order_by(_KeyRow.created_s, _KeyRow.name)
        with self._faults():
            return [_grant(row) for row in query.execute(self._database)]

    def keep_key(self, grant: KeyGrant) -> KeyGrant:
        """Keep a new key; gives it with the time it was made and an id. Raises Conflict for a name or secret taken."""
        grant = msgspec.structs.replace(grant, created_s=time.time(), id=f"key_{secrets.token_hex(12)}")
        row = msgspec.to_builtins(grant) | {"models": json.dumps(grant.models)}
        with self._faults():
            try:
                _KeyRow.insert(row).execute(self._database)
            except peewee.IntegrityError:
                raise self._taken(grant) from None
            self._stamp()
        return grant

    def _taken(self, grant: KeyGrant) -> Conflict:
        """Which of the two that are of one key alone is another's."""
        same_secret = _KeyRow.select(_KeyRow.name).where(_KeyRow.sha256 == grant.sha256)
        names = [row.name for row in same_secret.execute(self._database)]
        return name_taken(grant.name) if not names or grant.name in names else secret_taken(names[0])

    def drop_key(self, name: str) -> KeyGrant:
        """Forget a key; gives what it was. Raises NotFound that names the nearest."""
        with self._faults(), self._writing():
            found = list(_KeyRow.select().where(_KeyRow.name == name).execute(self._database))
            if not found:
                names = [row.name for row in _KeyRow.select(_KeyRow.name).execute(self._database)]
                raise no_key(name, names)
            _KeyRow.delete().where(_KeyRow.name == name).execute(self._database)
        with self._faults():
            self._stamp()
        return _grant(found[0])

    def _stamp(self) -> None:
        self.keys_stamp.touch(mode=0o600)
        now_ns = time.time_ns()  # the file system's own clock is too coarse to tell two changes apart
        os.utime(self.keys_stamp, ns=(now_ns, now_ns))


def stamp_of(path: Path) -> Path:
    """Beside the database at `path`: the file whose time says when its keys changed last."""
    return path.with_name(path.name + "-keys")


def name_taken(name: str) -> Conflict:
    return Conflict(f"There is a key named '{name}' already; `laya key revoke {name}` ends it.", param="name")


def secret_taken(name: str) -> Conflict:
    return Conflict(f"This secret is that of the key '{name}' already; every key has one of its own.", param="key")


def no_key(name: str, names: list[str]) -> NotFound:
    close = nearest(name, names)
    hint = f" Did you mean '{close}'?" if close else f" There are: {', '.join(names)}." if names else " There is none."
    return NotFound(f"There is no key named '{name}'.{hint}", param="name")


def _grant(row: Any) -> KeyGrant:
    values = {name: getattr(row, name) for name in KeyGrant.__struct_fields__}
    return KeyGrant(**values | {"models": tuple(json.loads(row.models))})
