"""Owns: whether there is room for a quantization, on the disk and in memory, and what this process holds."""

from __future__ import annotations

import re
from pathlib import Path

from laya.errors import InsufficientDisk, InsufficientMemory
from laya.memory import Budget
from laya.models.pulling import disk_free_bytes, size_text


def check_disk(folder: Path, need_bytes: int) -> None:
    free = disk_free_bytes(folder)
    if need_bytes > free:
        raise InsufficientDisk(
            f"The file takes {size_text(need_bytes)} of disk ({need_bytes} bytes), {size_text(free)} are free where it "
            "is made. --out FILE writes it elsewhere.",
            need_bytes=need_bytes,
            available_bytes=free,
        )


def check_memory(need_bytes: int, budget: Budget, what: str) -> None:
    if need_bytes > budget.bytes:
        raise InsufficientMemory(
            f"{what} takes {size_text(need_bytes)} of memory ({need_bytes} bytes), {size_text(budget.bytes)} may be "
            f"used ({budget.limit}).",
            need_bytes=need_bytes,
            available_bytes=budget.bytes,
            limit=budget.limit,
            suggestions=["--threads 1"],
        )


def status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
