"""Owns: how far a long command is: a bar on a terminal; elsewhere a plain line now and then, as a log can keep it.

All of it goes to stderr. Knows nothing of what is done.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_FIRST_S, _LATER_S = 10.0, 60.0  # between plain lines: of the first two minutes, and after them
_FIRST_LASTS_S = 120.0


class _State(NamedTuple):
    """What is told. total: None where nobody knows it. unit: of the counts; "" where only their share says much."""

    name: str
    done: int
    total: int | None
    unit: str
    note: str
    first: int
    began_s: float

    @property
    def counts(self) -> str:
        if not self.total:
            return ""
        share = f"{self.done / self.total:.0%}"
        return f"{self.done} of {self.total} {self.unit}, {share}" if self.unit else share

    def line(self, now_s: float) -> str:
        parts = [part for part in (self.counts, self.note) if part]
        spent_s, n_done = now_s - self.began_s, self.done - self.first
        if self.total and n_done > 0 and self.done < self.total:
            parts.append(f"{_time(spent_s * (self.total - self.done) / n_done)} left")
        else:
            parts.append(f"{_time(spent_s)} so far")
        return f"{self.name}: {', '.join(parts)}"


class Progressing:
    """See the module; a context manager. One thing is done at a time: `stage` begins the next."""

    def __init__(self, console: Console, *, is_silent: bool = False, every_s: float | None = None) -> None:
        """is_silent: no plain lines either, as for a program that reads the result. every_s: for tests."""
        self._console = console
        self._every_s = every_s
        self._is_plain = not console.is_terminal and not is_silent
        columns = (TextColumn(" {task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
        self._bars = Progress(
            *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True
        )
        self._task: Any = None
        self._state: _State | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> Progressing:
        if self._is_plain:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        self._ended.set()
        if self._is_plain:
            self._thread.join()

    def stage(self, name: str, total: int | None = None, done: int = 0, unit: str = "") -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._state = _State(name, done, total, unit, "", done, time.monotonic())
        self._task = self._bars.add_task(escape(name), total=total, completed=done, counts=self._state.counts)
        self._bars.start()

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        assert self._state is not None
        self._state = self._state._replace(done=done, total=total or self._state.total, note=note)
        counts = "  ".join(part for part in (self._state.counts, escape(note)) if part)
        self._bars.update(self._task, completed=done, total=self._state.total, counts=counts)

    def say(self, line: str) -> None:
        """A line that stays, above the bar where there is one."""
        self._console.print(line, style="dim", markup=False, soft_wrap=True)

    def _tell(self) -> None:
        began_s = time.monotonic()
        while not self._ended.wait(self._pause_s(time.monotonic() - began_s)):
            if (state := self._state) is not None:
                self.say(f" {state.line(time.monotonic())}")

    def _pause_s(self, spent_s: float) -> float:
        return self._every_s or (_FIRST_S if spent_s < _FIRST_LASTS_S else _LATER_S)


def _time(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
