"""Owns: how long programs wait for memory, by the kernel's pressure stall information, and how much is swapped out.

A trigger wakes us within its window; where the kernel gives none (not built in, or not to this user) the running totals
are compared from reading to reading. Where there are no totals either, every share is 0 and free memory alone decides.
"""

from __future__ import annotations

import mmap
import re
import select
from pathlib import Path

import msgspec

PRESSURE = "proc/pressure/memory"
WINDOW_US = 2_000_000  # the one that a user without privileges may ask for
STALL_US = 150_000


class Strain(msgspec.Struct, frozen=True, kw_only=True):
    """Since the reading before."""

    stall_share: float
    full_stall_share: float
    swap_out_bytes_per_s: float


class PressureMeter:
    """Differences of the kernel's totals."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before: tuple[float, int, int, int] | None = None

    def read(self, now_s: float) -> Strain:
        """`now_s`: monotonic. All zeros at the first call, which has nothing to compare with."""
        some_us, full_us = self._stalls_us()
        now = (now_s, some_us, full_us, self._swapped_out_bytes())
        before, self._before = self._before, now
        if before is None or now_s <= before[0]:
            return Strain(stall_share=0.0, full_stall_share=0.0, swap_out_bytes_per_s=0.0)
        passed_s = now_s - before[0]
        return Strain(
            stall_share=(now[1] - before[1]) / 1e6 / passed_s,
            full_stall_share=(now[2] - before[2]) / 1e6 / passed_s,
            swap_out_bytes_per_s=(now[3] - before[3]) / passed_s,
        )

    def _stalls_us(self) -> tuple[int, int]:
        totals = dict(re.findall(r"^(some|full) .*total=(\d+)$", self._text(PRESSURE), re.MULTILINE))
        return int(totals.get("some", 0)), int(totals.get("full", 0))

    def _swapped_out_bytes(self) -> int:
        match = re.search(r"^pswpout (\d+)$", self._text("proc/vmstat"), re.MULTILINE)
        return int(match[1]) * mmap.PAGESIZE if match is not None else 0

    def _text(self, path: str) -> str:
        try:
            return (self._root / path).read_text()
        except OSError:
            return ""


class PressureTrigger:
    """Readable (`fileno`) as soon as the stalls within a window pass the threshold. Raises OSError without triggers."""

    def __init__(self, path: Path = Path("/") / PRESSURE) -> None:
        self._file = path.open("r+b", buffering=0)
        try:
            self._file.write(f"some {STALL_US} {WINDOW_US}\0".encode())
            # An event loop waits for readability only; a pressure file signals by priority, an epoll of it by both.
            self._epoll = select.epoll()
            self._epoll.register(self._file.fileno(), select.EPOLLPRI)
        except OSError:
            self._file.close()
            raise

    def fileno(self) -> int:
        return self._epoll.fileno()

    def take(self) -> bool:
        """Whether it fired since the last call."""
        return bool(self._epoll.poll(0))

    def close(self) -> None:
        self._epoll.close()
        self._file.close()
