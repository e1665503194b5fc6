"""Owns: what the kernel says of the memory of a process, and of all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections import defaultdict
from pathlib import Path

import msgspec

from laya.types import KIB

MOST_PROCESSES = 4096  # of one family that are looked at
_NAMES = ("VmHWM", "RssAnon", "RssFile", "RssShmem")
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())  # the number of the call; libc has no name for it
_KCMP_VM = 1
_LINE = re.compile(rf"^({'|'.join(_NAMES)}):\s+(\d+) kB$", re.MULTILINE)


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """What is held, in bytes."""

    peak_bytes: int  # VmHWM: the most that was ever resident
    resident_bytes: int  # VmRSS: anonymous and shared memory, and what is mapped of files
    anonymous_bytes: int  # RssAnon: what cannot be dropped
    shared_bytes: int = 0  # RssShmem, which cannot either

    @property
    def file_bytes(self) -> int:
        """What is mapped of files; the kernel drops it before it stops anybody."""
        return self.resident_bytes - self.anonymous_bytes - self.shared_bytes


def read_memory(pid: int) -> MemoryReading | None:
    """What the kernel says of a process; None when it is gone."""
    kept = _read(pid)
    if kept is None:
        return None
    return MemoryReading(
        peak_bytes=kept["VmHWM"],
        resident_bytes=kept["RssAnon"] + kept["RssShmem"] + kept["RssFile"],
        anonymous_bytes=kept["RssAnon"],
        shared_bytes=kept["RssShmem"],
    )


def read_family(pid: int) -> MemoryReading | None:
    """Of a process and all it started, added up, but files: what processes of one program map of them counts once.

    They map the same libraries: three of PyTorch would be taken for 400 MiB more than they hold. Shared memory, which
    no kernel drops, counts for each. One that is being started, and until then has the memory of who starts it, is left
    out: beside busy programs that takes long enough to be seen. The peak is that of this moment, or of the process
    alone; who wants the most of a life looks again and again.
    """
    file_bytes: defaultdict[str, int] = defaultdict(int)  # by program
    readings = {each: kept for each in family(pid) if (kept := _read(each)) is not None}
    if not readings:
        return None
    pids_of: defaultdict[str, list[int]] = defaultdict(list)
    for each, kept in list(readings.items()):
        program = _program(each)
        if any(_is_one_memory(each, other) for other in pids_of[program]):
            del readings[each]
            continue
        pids_of[program].append(each)
        file_bytes[program] = max(file_bytes[program], kept["RssFile"])
    anonymous_bytes = sum(kept["RssAnon"] for kept in readings.values())
    shared_bytes = sum(kept["RssShmem"] for kept in readings.values())
    resident_bytes = anonymous_bytes + shared_bytes + sum(file_bytes.values())
    own_peak_bytes = readings[pid]["VmHWM"] if pid in readings else 0
    return MemoryReading(
        peak_bytes=max(resident_bytes, own_peak_bytes),
        resident_bytes=resident_bytes,
        anonymous_bytes=anonymous_bytes,
        shared_bytes=shared_bytes,
    )


def _is_one_memory(pid: int, other: int) -> bool:
    """Whether two processes have the very same memory, as after vfork; False where the kernel does not tell."""
    if _KCMP is None:
        return False
    return int(ctypes.CDLL(None).syscall(_KCMP, pid, other, _KCMP_VM, 0, 0)) == 0


def _read(pid: int) -> dict[str, int] | None:
    """In bytes, by the kernel's names."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = {name: int(value) * KIB for name, value in _LINE.findall(status)}
    return found if len(found) == len(_NAMES) else None  # a zombie has no memory lines


def _program(pid: int) -> str:
    """The file that it runs; where the kernel does not tell, it counts as one of its own."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return str(pid)


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
