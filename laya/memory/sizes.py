"""Owns: how this room writes bytes in sentences. Knows nothing else."""

from __future__ import annotations

from laya.types import GIB, MIB


def size_text(n_bytes: int) -> str:
    """`537 MiB`, `17.4 GiB`: three figures or so, in the unit people compare memory in."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


def flag_text(n_bytes: int) -> str:
    """`100MiB`: bytes as a flag's value; bytes alone where they are no whole number of MiB."""
    return str(n_bytes) if n_bytes % MIB else f"{n_bytes // MIB}MiB"
