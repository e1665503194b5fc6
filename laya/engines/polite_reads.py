"""Owns: how a process that loads gigabytes steps back behind everybody else who reads the disk. Knows no engine."""

from __future__ import annotations

import contextlib

import psutil


def read_politely(pid: int) -> None:
    """The disk serves others first: the lowest class that still moves when everybody reads."""
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(pid).ionice(psutil.IOPRIO_CLASS_BE, value=7)
