"""Owns: what the kernel says of the memory of a process, and of all that it started."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec

from laya.types import KIB

MOST_PROCESSES = 4096  # of one family that are looked at


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """What is held, in bytes."""

    peak_bytes: int  # VmHWM: the most that was ever resident
    resident_bytes: int  # VmRSS: anonymous memory and the mapped pages of the model file
    anonymous_bytes: int  # RssAnon: what cannot be dropped


def read_memory(pid: int) -> MemoryReading | None:
    """What the kernel says of a process; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kib = dict(re.findall(r"^(VmHWM|VmRSS|RssAnon):\s+(\d+) kB$", status, re.MULTILINE))
    if len(kib) < 3:  # a zombie has no memory lines
        return None
    return MemoryReading(
        peak_bytes=int(kib["VmHWM"]) * KIB,
        resident_bytes=int(kib["VmRSS"]) * KIB,
        anonymous_bytes=int(kib["RssAnon"]) * KIB,
    )


def read_family(pid: int) -> MemoryReading | None:
    """Of a process and all it started, added up: what they share counts for each, so it is never too little.

    The peak is that of the sum at this moment; who wants the most of a life looks again and again.
    """
    readings = [reading for each in family(pid) if (reading := read_memory(each)) is not None]
    if not readings:
        return None
    resident_bytes = sum(reading.resident_bytes for reading in readings)
    return MemoryReading(
        peak_bytes=max(resident_bytes, readings[0].peak_bytes),
        resident_bytes=resident_bytes,
        anonymous_bytes=sum(reading.anonymous_bytes for reading in readings),
    )


def family(pid: int) -> list[int]:
    """The process and what it started, and so on; itself alone where the kernel tells no children."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += map(int, (thread / "children").read_text().split())
        if len(found) > MOST_PROCESSES:
            break
    return found
