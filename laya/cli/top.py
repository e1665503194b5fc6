"""Owns: `laya top`, the page in a terminal: the looks, the keys, what they do. What it shows is top_frame.py's.

rich draws it, which every other verb does already: a frame of text and six keys need no library of widgets.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from laya.cli.client import ServerClient
from laya.cli.output import knows_unicode
from laya.cli.top_frame import Selectable, View, frame
from laya.errors import LayaError

KEPT_EVENTS = 100
_ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}
_KEY = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)  # what a terminal sends for one key


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end, as into a pipe.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = 1.0,
) -> None:
    """Watch the server in a terminal: memory, models, requests, events; load, unload, cancel, pause."""
    screen = _Screen(ServerClient())
    screen.look()  # no server there ends it before the screen is taken
    console = Console(highlight=False)
    if once or not (console.is_terminal and sys.stdin.isatty()):
        console.print(screen.drawn(console, is_live=False))
        return
    with _keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while screen.is_open:
            live.update(screen.drawn(console, is_live=True), refresh=True)
            for key in keys(every):
                screen.press(key)
            screen.look_again()


class _Screen:
    """What is known of the server, what is selected, and what was asked of it."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self.view = View(client.url, {"models": [], "devices": []}, [], [])
        self._told: SimpleQueue[str] = SimpleQueue()
        self._fault = ""  # why the last look saw nothing
        self.is_open = True

    def look(self) -> None:
        """Ask the server for all that is shown. Raises LayaError."""
        state = self._client.get("/admin/state")
        requests = self._client.get("/v1/requests")["data"]
        last_id = self.view.events[-1]["id"] if self.view.events else 0
        events = self.view.events + self._client.get("/admin/events", {"after": str(last_id)})["events"]
        old = self.view
        self.view = View(old.url, state, requests, events[-KEPT_EVENTS:], old.selected, old.message)

    def look_again(self) -> None:
        """The same while the screen is up: a server that is away is waited for. One that comes back may be another,
        whose events begin anew."""
        with suppress(Empty):
            self.view.message = self._told.get_nowait()
        try:
            self.look()
        except LayaError as error:
            self.view.message = self._fault = error.message
            self.view.events = []
            return
        if self._fault and self.view.message == self._fault:
            self.view.message = ""
        self._fault = ""

    def drawn(self, console: Console, *, is_live: bool) -> Any:
        height = console.height if is_live else None
        return frame(self.view, console.width, height, is_unicode=knows_unicode(console), has_keys=is_live)

    def press(self, key: str) -> None:
        """Do what a key stands for."""
        chosen = self.view.selected
        if key == "q":
            self.is_open = False
        elif key in ("up", "k", "down", "j"):
            self.view.selected = self.view.moved(-1 if key in ("up", "k") else 1)
        elif key == "p":
            self._act(self._pause, not self.view.state.get("is_paused"))
        elif key in ("l", "u", "c"):
            if chosen is None or chosen not in self.view.rows or (chosen.kind == "request") != (key == "c"):
                self.view.message = f"select a {'request' if key == 'c' else 'model'} first: up and down"
            elif key == "c":
                self._act(self._cancel, chosen)
            else:
                self._act(self._load if key == "l" else self._unload, chosen)

    def _act(self, act: Callable[..., str], *args: Any) -> None:
        """A load takes as long as it takes; the screen goes on meanwhile, and its end does not wait for it."""

        def work() -> None:
            try:
                self._told.put(act(*args))
            except LayaError as error:
                self._told.put(error.message)

        self.view.message = ""
        Thread(target=work, daemon=True).start()

    def _load(self, model: Selectable) -> str:
        status = self._client.post(f"/admin/models/{model.id}/load", timeout_s=None)
        return f"{status['id']}: {status['state']}"

    def _unload(self, model: Selectable) -> str:
        status = self._client.post(f"/admin/models/{model.id}/unload", timeout_s=None)
        return f"{status['id']}: {status['state']}"

    def _cancel(self, request: Selectable) -> str:
        self._client.delete(f"/v1/requests/{request.id}")
        return f"{request.id}: cancelled"

    def _pause(self, on: bool) -> str:
        paused = self._client.post("/admin/pause", params={"on": str(on).lower()})["is_paused"]
        return "paused: new requests wait until p is pressed again" if paused else "new requests are served again"


@contextmanager
def _keyboard() -> Iterator[Any]:
    """`keys(timeout_s)`: the keys pressed until then, at once when there are some. At the end all is as it was."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    on_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lines below run then too

    def keys(timeout_s: float) -> list[str]:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        pressed = os.read(descriptor, 1024) if ready else None
        if pressed == b"":  # the terminal is gone
            return ["q"]
        return [_ARROWS.get(key, key.decode("latin-1")) for key in _KEY.findall(pressed or b"")]

    try:
        tty.setcbreak(descriptor)
        yield keys
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, on_term)
