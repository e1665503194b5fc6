"""The SQLite store: real files, real processes, real signals."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from laya.errors import NotFound, StoreError
from laya.store import Store
from laya.store.migrations import MIGRATIONS

WRITER = """
import sys
from pathlib import Path
from laya.store import Store
store = Store(Path(sys.argv[1]))
conversation_id = store.create_conversation("m", "t")
for n in range(10_000):
    print(store.append_message(conversation_id, "user", f"message {n}"), flush=True)
"""
OPENER = "import sys; from pathlib import Path; from laya.store import Store; Store(Path(sys.argv[1])).latest()"
READER = (
    "import sys; from pathlib import Path; from laya.store import Store\n"
    "for each in Store(Path(sys.argv[1])).conversations(): print(each.title)"
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_store_keeps_a_conversation_over_a_reopen(tmp_path: Path) -> None:
    path = tmp_path / "new" / "laya.db"
    with Store(path) as store:
        conversation_id = store.create_conversation("smollm2", "Hello")
        store.append_message(conversation_id, "user", "Hi \N{GRINNING FACE} ' \" \x00")
        usage = {"usage": {"completion_tokens": 3}}
        store.append_message(conversation_id, "assistant", "Hello!", finish_reason="stop", details=usage)
    with Store(path) as store:
        latest = store.latest()
        assert latest is not None
        assert (latest.id, latest.model, latest.title) == (conversation_id, "smollm2", "Hello")
        first, second = store.messages(conversation_id)
        assert (first.role, first.content, first.finish_reason) == ("user", "Hi \N{GRINNING FACE} ' \" \x00", None)
        assert (second.role, second.finish_reason, second.details) == ("assistant", "stop", usage)


def test_conversations_are_ordered_by_the_last_word(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        assert store.latest() is None
        ids = [store.create_conversation("m", f"title {n}") for n in range(3)]
        store.append_message(ids[0], "user", "again")
        store.change_conversation(ids[1], model="other")
        assert [found.id for found in store.conversations()] == [ids[0], ids[2], ids[1]]
        assert [found.id for found in store.conversations(limit=1)] == [ids[0]]
        assert store.conversation(ids[1]).model == "other"


def test_delete_takes_the_messages_along(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    with Store(path) as store:
        conversation_id = store.create_conversation("m", "t")
        store.append_message(conversation_id, "user", "secret words")
        store.delete(conversation_id)
        assert store.conversations() == []
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM message").fetchone() == (0,)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    assert b"secret words" not in path.read_bytes()


def test_an_unknown_conversation_is_named(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        for act in (
            lambda: store.append_message(7, "user", "x"),
            lambda: store.messages(7),
            lambda: store.delete(7),
            lambda: store.change_conversation(7, model="m"),
        ):
            with pytest.raises(NotFound, match="no conversation 7"):
                act()


def test_store_is_private_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    path.touch(mode=0o644)
    store = Store(path)
    store.create_conversation("m", "t")
    assert {mode(file) for file in tmp_path.iterdir()} == {0o600}
    assert (tmp_path / "laya.db-wal").exists()
    store.close()


def test_store_survives_kill_between_messages(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    said = [writer.stdout.readline() for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    said += writer.stdout.readlines()
    writer.wait()
    writer.stdout.close()
    with Store(path) as store:
        latest = store.latest()
        assert latest is not None
        kept = [message.content for message in store.messages(latest.id)]
        assert len(kept) >= len([line for line in said if line.endswith("\n")])
        assert kept == [f"message {n}" for n in range(len(kept))]
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_store_serves_threads_and_processes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    openers = [subprocess.Popen([sys.executable, "-c", OPENER, str(path)]) for _ in range(4)]
    assert [opener.wait() for opener in openers] == [0, 0, 0, 0]
    store = Store(path)
    conversation_id = store.create_conversation("m", "t")

    def write() -> None:
        for n in range(25):
            store.append_message(conversation_id, "user", str(n))
        store.close()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.messages(conversation_id)) == 100
    store.close()


def test_store_brings_an_older_file_to_the_newest_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "laya.db"
    with Store(path) as store:
        store.create_conversation("m", "t")
    later = (*MIGRATIONS, ("ALTER TABLE conversation ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",))
    monkeypatch.setattr("laya.store.database.MIGRATIONS", later)
    with Store(path) as store:
        assert [found.title for found in store.conversations()] == ["t"]
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (len(later),)
        assert database.execute("SELECT pinned FROM conversation").fetchall() == [(0,)]
    database.close()


def test_a_failed_migration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "laya.db"
    Store(path).close()
    broken = (*MIGRATIONS, ("CREATE TABLE half (id INTEGER)", "CREATE NONSENSE"))
    monkeypatch.setattr("laya.store.database.MIGRATIONS", broken)
    with pytest.raises(StoreError, match=r"laya\.db"):
        Store(path)
    monkeypatch.undo()
    with Store(path) as store:
        assert store.latest() is None
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []
    database.close()


def test_a_newer_file_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match=r"laya\.db: written by a newer Laya \(form 99"):
        Store(path)


def test_faults_name_the_file(tmp_path: Path) -> None:
    junk = tmp_path / "junk.db"
    junk.write_bytes(b"this is no database " * 100)
    with pytest.raises(StoreError, match=r"junk\.db: file is not a database: put a copy"):
        Store(junk)
    with pytest.raises(StoreError, match="Is a directory"):
        Store(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        Store(tmp_path / "file" / "laya.db")


def test_store_takes_text_with_halves_of_characters(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        conversation_id = store.create_conversation("m\udcff", "t\ud83d")
        store.append_message(conversation_id, "user", "\udcff\udcfe caf\u00e9")
        store.change_conversation(conversation_id, model="n\udcff")
        kept = store.conversation(conversation_id)
        assert (kept.model, kept.title) == ("n\ufffd", "t\ufffd")
        assert store.messages(conversation_id)[0].content == "\ufffd\ufffd caf\u00e9"


def test_store_opened_twice_in_a_process_loses_nothing_to_another(tmp_path: Path) -> None:
    """Closing any descriptor of a file drops all locks that its process holds on it: no other may think it is alone."""
    path = tmp_path / "laya.db"
    with Store(path) as held:
        held.create_conversation("m", "first")
        with Store(path):
            pass
        for title in ("second", "third"):
            subprocess.run([sys.executable, "-c", OPENER, str(path)], check=True)
            held.create_conversation("m", title)
        seen = subprocess.run([sys.executable, "-c", READER, str(path)], check=True, capture_output=True, text=True)
        assert seen.stdout.split() == ["third", "second", "first"]
