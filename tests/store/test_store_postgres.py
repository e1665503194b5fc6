"""Responses in a PostgreSQL that `store.url` names: a real one, where its programs and psycopg are installed."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_turns import MOST, turn

from laya.errors import NotFound, PreviousResponseNotFound, StoreError
from laya.store import Responses, open_responses

_BIN = shutil.which("initdb") or next(iter(glob.glob("/usr/lib/postgresql/*/bin/initdb")), None)
needs_postgres = pytest.mark.skipif(
    _BIN is None or importlib.util.find_spec("psycopg") is None, reason="needs PostgreSQL's programs and psycopg"
)


class Postgres:
    """A server of its own, on loopback, with its data in a new folder."""

    def __init__(self, folder: Path) -> None:
        assert _BIN is not None
        bin_dir = os.path.dirname(os.path.realpath(_BIN))
        self._as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if not os.getuid() else []
        if self._as_user:
            shutil.chown(folder, "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        data = str(folder / "data")
        init = [f"{bin_dir}/initdb", "-D", data, "-U", "laya", "-A", "trust", "--no-sync"]
        subprocess.run([*self._as_user, *init], check=True, capture_output=True, cwd="/")
        self._start = [
            *self._as_user, f"{bin_dir}/postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", "",
        ]  # fmt: skip
        self.url = f"postgresql://laya@127.0.0.1:{port}/postgres"
        self._port = port
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        deadline_s = time.monotonic() + 30
        while True:
            try:
                open_responses(self.url, Path()).close()
                return
            except StoreError:
                assert time.monotonic() < deadline_s and self._process.poll() is None
                time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # without waiting for its clients
        self._process.wait(30)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())  # one that another user may enter
    server = Postgres(folder)
    yield server
    server.stop()
    shutil.rmtree(folder)


@needs_postgres
def test_turns_are_kept_found_and_forgotten(postgres: Postgres) -> None:
    store: Responses = open_responses(postgres.url, Path())
    for each in (turn("a"), turn("b", "a"), turn("c", "b", at_s=9), turn("z", root="z", at_s=2)):
        store.keep_response(each)
    assert store.response("a", "ann") == turn("a")
    assert [each.id for each in store.turns_until("c", "ann", MOST)] == ["a", "b", "c"]
    with pytest.raises(NotFound):
        store.response("a", "bob")
    assert store.prune_responses(before_s=4, most_bytes=None) == 1
    store.drop_response("b", "ann")
    with pytest.raises(PreviousResponseNotFound, match="'b' not found, which 'c' goes on from"):
        store.turns_until("c", "ann", MOST)
    store.close()


@needs_postgres
def test_database_that_went_away_and_came_back_is_used_again(postgres: Postgres) -> None:
    store: Responses = open_responses(postgres.url, Path())
    store.keep_response(turn("q", root="q"))
    postgres.stop()
    with pytest.raises(StoreError, match=r"127\.0\.0\.1/postgres: "):
        store.response("q", "ann")
    postgres.start()
    assert store.response("q", "ann").id == "q"
    store.close()


def test_another_sqlite_file_by_its_url(tmp_path: Path) -> None:
    store = open_responses(f"sqlite:///{tmp_path}/other.db", tmp_path / "laya.db")
    store.keep_response(turn("a"))
    store.close()
    assert (tmp_path / "other.db").exists() and not (tmp_path / "laya.db").exists()
    assert open_responses(None, tmp_path / "other.db").response("a", "ann").id == "a"


def test_postgres_without_its_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peewee.psycopg", None)
    monkeypatch.setattr("peewee.psycopg2", None)
    with pytest.raises(StoreError, match="needs psycopg: pip install"):
        open_responses("postgresql://ann:secret@localhost/x", Path())
