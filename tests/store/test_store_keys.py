"""API keys in the store: digests only, one of a name, and a stamp that says when they changed."""

from __future__ import annotations

import sqlite3
from hashlib import sha256
from pathlib import Path

import pytest
from kept_turns import turn

from laya.errors import InvalidRequest, NotFound
from laya.store import Store
from laya.store.migrations import MIGRATIONS
from laya.types import KeyGrant


def grant(name: str, **fields: object) -> KeyGrant:
    return KeyGrant(name=name, sha256=sha256(name.encode()).hexdigest(), **fields)  # type: ignore[arg-type]


def test_a_key_is_kept_as_it_was_granted(tmp_path: Path) -> None:
    limits = {"max_concurrent": 2, "requests_per_minute": 3, "tokens_per_minute": 4, "expires_s": 5.5}
    limits |= {"priority": "bulk", "max_priority": "default"}
    with Store(tmp_path / "laya.db") as store:
        first = store.keep_key(grant("first", role="admin", models=("a", "b"), **limits))
        store.keep_key(grant("second"))
    with Store(tmp_path / "laya.db") as store:
        assert [key.name for key in store.api_keys()] == ["first", "second"]
        assert store.api_keys()[0] == first
        assert store.api_keys()[1].role == "user"


def test_a_name_is_of_one_key(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        store.keep_key(grant("laptop"))
        with pytest.raises(InvalidRequest, match="'laptop' already"):
            store.keep_key(grant("laptop", role="admin"))
        assert store.api_keys()[0].role == "user"


def test_a_secret_is_of_one_key(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        kept = store.keep_key(grant("laptop"))
        with pytest.raises(InvalidRequest, match="secret is that of the key 'laptop' already") as caught:
            store.keep_key(KeyGrant(name="phone", sha256=kept.sha256))
        assert caught.value.param == "key"
        assert [key.name for key in store.api_keys()] == ["laptop"]


def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        with pytest.raises(NotFound, match="There is none"):
            store.drop_key("laptop")
        store.keep_key(grant("laptop"))
        with pytest.raises(NotFound, match="Did you mean 'laptop'"):
            store.drop_key("labtop")


def test_every_change_moves_the_stamp(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    with Store(path) as store:
        assert not store.keys_stamp.exists()
        store.keep_key(grant("laptop"))
        made_ns = store.keys_stamp.stat().st_mtime_ns
        store.drop_key("laptop")
        assert store.keys_stamp.stat().st_mtime_ns > made_ns
        assert store.api_keys() == []


def test_a_key_made_anew_under_a_name_is_another(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        first = store.keep_key(grant("laptop"))
        store.drop_key("laptop")
        second = store.keep_key(grant("laptop"))
        assert first.owner != second.owner
        assert store.api_keys() == [second]


def test_keys_of_an_older_file_keep_what_is_theirs_and_get_nothing_of_a_former_key(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    with sqlite3.connect(path) as database:
        for statements in MIGRATIONS[:6]:
            for statement in statements:
                database.execute(statement)
        columns = "(name, sha256, role, created_s)"
        database.execute(f"INSERT INTO api_key {columns} VALUES ('ann', 'digest', 'user', 5.0)")
        for kept in (turn("old", owner="ann", at_s=1.0), turn("a", owner="ann", at_s=9.0), turn("b", owner="tests")):
            values = (kept.id, kept.owner, kept.root_id, kept.created_s, kept.document, kept.input)
            database.execute(
                "INSERT INTO response (id, owner, root_id, created_s, n_bytes, document, input) "
                "VALUES (?, ?, ?, ?, 0, ?, ?)",
                values,
            )
        database.execute("PRAGMA user_version = 6")
    database.close()
    with Store(path) as store:
        (ann,) = store.api_keys()
        assert ann.owner == "ann" and store.response("a", ann.owner).created_s == 9.0
        assert store.response("b", "tests").id == "b"  # of a key of the config
        with pytest.raises(NotFound):
            store.response("old", ann.owner)
        assert store.keep_key(grant("attic", role="peer")).role == "peer"  # which that file's own form did not know
