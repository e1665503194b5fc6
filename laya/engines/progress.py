"""Owns: how far a load has come, in percent of the bytes of the model's files, by what the kernel says of the child.

Of files that are mapped it is what of them is in the child's memory; of files that are read, what it has read since it
opened one of them. So it is the same for every engine, and where the kernel says nothing nothing is claimed. Warming up
comes after the last byte, so 100 is never reached here: that is said by the engine's first answer. Whether a load still
goes on at all is asked of the kernel too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from laya.engines.cpu_time import family_cpu_s, is_runnable
from laya.engines.held_memory import family
from laya.types import KIB

LOOK_EVERY_S = 0.25
STILL_S = 30.0  # a load that reads nothing and hardly computes, or wants to, for so long is stuck
STILL_LOOK_EVERY_S = 1.0
STILL_CPU_SHARE = 0.01  # of one core; what waits may look now and then whether it still has to
MOST_SHARE_OF_TIME = 0.05  # spent looking: to count the pages of a very large file takes the kernel a while
_ALMOST = 99
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


class LoadProgress:
    """Of one child. `percent` only rises; None: not known, or not begun."""

    def __init__(self, files: Iterable[Path], *, are_mapped: bool) -> None:
        self.percent: int | None = None
        self._files = {os.path.realpath(part) for file in files for part in _parts(file)}
        self._look = _mapped_bytes if are_mapped else self._read_bytes
        self._read_before_bytes: int | None = None

    async def follow(self, pid: int) -> None:
        """Look again and again, beside the loop, until cancelled."""
        if not self._files:
            return
        try:
            all_bytes = sum(os.path.getsize(file) for file in self._files)
        except OSError:  # a file is gone; its engine says so
            return
        while True:
            began_s = time.monotonic()
            n_bytes = await asyncio.to_thread(self._look, pid, self._files)
            if n_bytes is not None:
                self.percent = max(self.percent or 0, min(_ALMOST, 100 * n_bytes // all_bytes))
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(LOOK_EVERY_S, took_s / MOST_SHARE_OF_TIME))

    def _read_bytes(self, pid: int, files: set[str]) -> int | None:
        """Bytes that the child has read since it was first seen with one of the files open."""
        n_bytes = _all_read_bytes(pid)
        if n_bytes is None or (self._read_before_bytes is None and not _has_open(pid, files)):
            return None
        if self._read_before_bytes is None:
            self._read_before_bytes = n_bytes
        return n_bytes - self._read_before_bytes


async def until_still(pid: int) -> float:
    """Return when a child that should load does nothing any more: for how many seconds, of those in which this process
    itself ran. One that would compute and gets no core, as engines step back for all else, is not still."""
    step_s = min(STILL_LOOK_EVERY_S, STILL_S / 4)
    still_s, cpu_s = 0.0, 0.0
    read: tuple[int, ...] | None = None
    while still_s < STILL_S:
        await asyncio.sleep(step_s)
        still_s += step_s
        now_cpu_s, now_read = family_cpu_s(pid) or 0.0, _reads(pid)
        is_computing = now_cpu_s - cpu_s > STILL_CPU_SHARE * STILL_S or is_runnable(pid)
        if now_read is None or now_read != read or is_computing:
            still_s, cpu_s, read = 0.0, now_cpu_s, now_read
    return still_s


def _reads(pid: int) -> tuple[int, ...] | None:
    """What a child and all it started have read: bytes of calls, bytes that came from the disk, and pages of mapped
    files that were waited for. None: not told."""
    total = (0, 0, 0)
    for each in family(pid):
        try:
            counts = dict(re.findall(r"^(\w+): (\d+)$", Path(f"/proc/{each}/io").read_text(), re.MULTILINE))
            faults = Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()[9]
        except OSError:
            return None
        total = (total[0] + int(counts["rchar"]), total[1] + int(counts["read_bytes"]), total[2] + int(faults))
    return total


def _mapped_bytes(pid: int, files: set[str]) -> int | None:
    """Bytes of these files that are in the child's memory; None where it has mapped none of them."""
    wanted = [[file] for file in files]
    n_bytes, is_ours = None, False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", errors="surrogateescape") as lines:
        for line in lines:
            if _MAPPING.match(line):  # address, rights, offset, device, inode, path
                is_ours = line.rstrip("\n").split(maxsplit=5)[5:] in wanted
            elif is_ours and line.startswith("Rss:"):
                n_bytes = (n_bytes or 0) + int(line.split()[1]) * KIB
    return n_bytes


def _all_read_bytes(pid: int) -> int | None:
    """Bytes that came of every read call, from the disk or from the page cache."""
    with contextlib.suppress(OSError):
        found = re.search(r"^rchar: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
        return int(found[1]) if found else None
    return None


def _has_open(pid: int, files: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) in files:
                    return True
    return False


def _parts(file: Path) -> list[Path]:
    """All files of a split model, of which one is named."""
    found = _PART.search(file.name)
    if found is None:
        return [file]
    stem = file.name[: found.start()]
    parts = [file.with_name(f"{stem}-{n:05}-of-{found[1]}.gguf") for n in range(1, int(found[1]) + 1)]
    return [part for part in parts if part.exists()]
