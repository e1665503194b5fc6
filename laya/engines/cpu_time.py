"""Owns: how long a process and all that it started have computed, and whether they do, by what the kernel says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from laya.engines.held_memory import family

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TIMES = slice(11, 15)  # behind the name in /proc/<pid>/stat: utime, stime, and both of children that are gone


def family_cpu_s(pid: int) -> float | None:
    """Seconds of all their threads; None when it is gone."""
    ticks = None
    for each in family(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks = (ticks or 0) + sum(map(int, fields[_TIMES]))
    return ticks / _TICKS_PER_S if ticks is not None else None


def is_runnable(pid: int) -> bool:
    """Whether a thread of theirs computes at this moment, or would if others had left it a core."""
    for each in family(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in os.listdir(f"/proc/{each}/task"):
                with contextlib.suppress(OSError):
                    state = Path(f"/proc/{each}/task/{thread}/stat").read_text(errors="replace").rpartition(")")[2]
                    if state.split()[0] == "R":
                        return True
    return False
