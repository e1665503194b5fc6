"""Owns: the progress bar of a download: on a terminal, from the first bytes on. Knows nothing of what is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class DownloadBar:
    """See the module."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._title = ""
        self._task: Any = None

    def begin(self, title: str) -> None:
        self._title = title

    def update(self, done: int, total: int | None) -> None:
        if self._task is None:
            self._task = self._bars.add_task(self._title, total=total)
            self._bars.start()
        self._bars.update(self._task, completed=done, total=total)


@contextmanager
def download_bar(console: Console) -> Iterator[DownloadBar]:
    """Shown until the block ends; nothing where there is no terminal."""
    columns = (TextColumn(" {task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    bars = Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    try:
        yield DownloadBar(bars)
    finally:
        bars.stop()
