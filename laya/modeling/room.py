"""Owns: the refusal of what memory or disk has no room for, in the programs of the lab.

It does not know what a program needs: who asks works that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laya.errors import InsufficientDisk, InsufficientMemory
from laya.memory import Machine
from laya.memory.sizes import size_text
from laya.models.pulling import disk_free_bytes


def check_memory(need: int, what: str, suggestions: Sequence[str] = ()) -> None:
    """Raises InsufficientMemory with the figures. what: the beginning of its sentence."""
    budget = Machine().budget()
    if need > budget.bytes:
        raise InsufficientMemory(
            f"{what} takes {size_text(need)}; {size_text(budget.bytes)} may be used ({budget.limit}).",
            need_bytes=need,
            available_bytes=budget.bytes,
            limit=budget.limit,
            suggestions=list(suggestions),
        )


def check_disk(need: int, folder: Path, what: str) -> None:
    """Raises InsufficientDisk with the figures. folder: where it is written, or will be made."""
    free = disk_free_bytes(folder)
    if need > free:
        raise InsufficientDisk(
            f"{what} takes {size_text(need)} of disk; {folder} has {size_text(free)} free.",
            need_bytes=need,
            available_bytes=free,
        )
