"""Owns: how long programs wait for memory, by the kernel's pressure stall information, and how much is swapped out.

The machine's figures and those of the control group (version 2) that holds us and our engines: a group at its limit
stands still while the machine is at ease, and a container may see its own group only. The worse of both counts. A
trigger wakes us within its window; where the kernel gives none (not built in, or not to this user) the running totals
are compared from reading to reading. Where there are no totals either, every share is 0 and free memory alone decides.
"""

from __future__ import annotations

import mmap
import re
import select
from collections.abc import Sequence
from pathlib import Path

import msgspec

PRESSURE = "proc/pressure/memory"
GROUP_PRESSURE = "memory.pressure"  # in the folder of a group
WINDOW_US = 2_000_000  # the one that a user without privileges may ask for
STALL_US = 150_000


class Strain(msgspec.Struct, frozen=True, kw_only=True):
    """Since the reading before."""

    stall_share: float
    full_stall_share: float
    swap_out_bytes_per_s: float


def pressure_files(groups: Sequence[Path] = (), root: Path = Path("/")) -> list[Path]:
    """The machine's file and that of each group's folder, as far as they are there."""
    files = (root / PRESSURE, *(group / GROUP_PRESSURE for group in groups))
    return [file for file in files if file.exists()]


class _Totals(msgspec.Struct, frozen=True):
    """Running totals of one pressure file."""

    some_us: int
    full_us: int


class PressureMeter:
    """Differences of the kernel's totals."""

    def __init__(self, root: Path = Path("/"), groups: Sequence[Path] = ()) -> None:
        """groups: folders of version 2 groups whose stalls count beside the machine's."""
        self._root = root
        self._groups = groups
        self._before: tuple[float, dict[Path, _Totals], int] | None = None

    def read(self, now_s: float) -> Strain:
        """`now_s`: monotonic. All zeros at the first call, which has nothing to compare with."""
        totals = {file: _totals(file) for file in pressure_files(self._groups, self._root)}
        swapped_bytes = self._swapped_out_bytes()
        before, self._before = self._before, (now_s, totals, swapped_bytes)
        if before is None or now_s <= before[0]:
            return Strain(stall_share=0.0, full_stall_share=0.0, swap_out_bytes_per_s=0.0)
        passed_s = now_s - before[0]
        stalls = [(now, before[1][file]) for file, now in totals.items() if file in before[1]]
        some_us = max((now.some_us - then.some_us for now, then in stalls), default=0)
        full_us = max((now.full_us - then.full_us for now, then in stalls), default=0)
        return Strain(
            stall_share=some_us / 1e6 / passed_s,
            full_stall_share=full_us / 1e6 / passed_s,
            swap_out_bytes_per_s=(swapped_bytes - before[2]) / passed_s,
        )

    def _swapped_out_bytes(self) -> int:
        match = re.search(r"^pswpout (\d+)$", _text(self._root / "proc/vmstat"), re.MULTILINE)
        return int(match[1]) * mmap.PAGESIZE if match is not None else 0


def _totals(file: Path) -> _Totals:
    totals = dict(re.findall(r"^(some|full) .*total=(\d+)$", _text(file), re.MULTILINE))
    return _Totals(int(totals.get("some", 0)), int(totals.get("full", 0)))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


class PressureTrigger:
    """Readable (`fileno`) as soon as the stalls within a window pass the threshold. Raises OSError without triggers.

    path: the machine's file or a group's.
    """

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
