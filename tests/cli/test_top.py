"""`laya top` against a real server, in a real pseudo-terminal of 80 columns, and into a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from laya.cli.client import ServerClient
from laya.cli.top import _Screen
from laya.cli.top_frame import Selectable, View
from laya.errors import EngineFailed, LayaError
from tests.conftest import PROGRAM, ROOT

DEADLINE_S = 60.0
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DOWN = "\x1b[B"


@pytest.fixture(scope="module")
def nano(start_server: Callable[..., Any]) -> Iterator[Any]:
    """The model that ships, one sequence at a time: a second request waits."""
    server = start_server("laya-nano", "--max-num-seqs", "1", "--n-threads", "1")
    yield server
    assert server.stop() == 0


def environment(url: str, **more: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in ("LAYA_API_KEY", "COLUMNS", "LINES")}
    return known | {"LAYA_URL": url, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"} | more


class Top:
    """`laya top` in a terminal; `until` waits for what it shows."""

    def __init__(self, url: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [*PROGRAM, "top", "--every", "0.2"],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=environment(url, TERM="xterm-256color"),
        )  # fmt: skip
        self.slave = slave
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, words: str) -> str:
        """What was shown up to and with these words, without colours; it is forgotten."""
        deadline_s = time.monotonic() + DEADLINE_S
        while words not in (plain := ESCAPE.sub("", self.shown)):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"never showed {words!r}, but: {plain[-2000:]!r}"
            self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
        self.shown = ""
        return plain

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
def top(nano: Any) -> Iterator[Top]:
    started = Top(nano.url)
    yield started
    started.end()


@pytest.mark.engine
def test_keys_act_on_the_server_and_the_terminal_is_given_back(top: Top, nano: Any) -> None:
    frame = top.until("q quit")
    assert "laya-nano" in frame and "promised" in frame
    assert all(len(line) <= 80 for line in frame.splitlines())
    top.type("u")
    top.until("select a model first")
    top.type(DOWN + "u")
    top.until("laya-nano: unloaded")
    top.type("l")
    top.until("laya-nano: ready")
    top.type("p")
    top.until("PAUSED")
    assert nano.state()["is_paused"]
    top.type("p")
    top.until("are served again")
    top.type("q")
    assert top.process.wait(DEADLINE_S) == 0
    assert termios.tcgetattr(top.slave) == top.before


@pytest.mark.engine
def test_a_request_that_waits_is_shown_and_cancelled(top: Top, nano: Any) -> None:
    """All is paused, so that it is there as long as the test looks at it."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"model": "laya-nano", "prompt": "Once", "max_tokens": 1}
        answers.append(httpx.post(f"{nano.url}/v1/completions", json=body, timeout=120, trust_env=False))

    httpx.post(f"{nano.url}/admin/pause?on=true", trust_env=False).raise_for_status()
    asking = threading.Thread(target=ask)
    try:
        asking.start()
        top.until("REQUEST")
        top.type(DOWN * 5 + "c")
        top.until(": cancelled")
    finally:
        httpx.post(f"{nano.url}/admin/pause?on=false", trust_env=False).raise_for_status()
    asking.join(DEADLINE_S)
    assert answers[0].json()["error"]["code"] == "request_cancelled"


@pytest.mark.engine
def test_into_a_pipe_it_is_one_frame_without_colours(nano: Any) -> None:
    done = subprocess.run([*PROGRAM, "top"], capture_output=True, text=True, env=environment(nano.url), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "laya-nano" in done.stdout and "q quit" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_a_server_it_says_so_and_ends_with_4() -> None:
    done = subprocess.run(
        [*PROGRAM, "top"], capture_output=True, text=True, env=environment("http://127.0.0.1:9"), timeout=60
    )
    assert (done.returncode, done.stdout) == (4, "") and "No server at" in done.stderr


def test_server_that_comes_back_is_seen_from_its_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"models": [], "devices": []}
    runs = [[{"id": 7, "text": "before"}], EngineFailed("No server there"), [{"id": 1, "text": "anew"}]]

    def get(path: str, query: dict[str, str] | None = None) -> Any:
        run = runs[0]
        if isinstance(run, LayaError):
            raise run
        if path == "/admin/events":
            return {"events": [each for each in run if each["id"] > int((query or {})["after"])]}
        return state if path == "/admin/state" else {"data": []}

    client = ServerClient("http://127.0.0.1:9")
    monkeypatch.setattr(client, "get", get)
    screen = _Screen(client)
    seen = []
    while runs:
        screen.look_again()
        seen.append((screen.view.message, [each["text"] for each in screen.view.events]))
        del runs[0]
    assert seen == [("", ["before"]), ("No server there", []), ("", ["anew"])]


def test_selection_stays_inside_and_survives_rows_that_went() -> None:
    state: dict[str, Any] = {"models": [{"id": "b", "state": "unloaded"}, {"id": "a", "state": "ready"}]}
    view = View("http://h", state, [{"id": "r"}], [])
    assert view.moved(1) == Selectable("model", "a")
    view.selected = Selectable("request", "r")
    assert view.moved(1) == view.selected and view.moved(-1) == Selectable("model", "b")
    view.selected = Selectable("request", "gone")
    assert view.moved(1) == Selectable("model", "a")
