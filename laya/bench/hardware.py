"""Owns: the sentence that every figure needs: on what it was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

import laya
from laya.routing import NATIVE
from laya.types import GIB


def hardware() -> dict[str, Any]:
    """CPU, cores, memory, kernel and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "laya": laya.__version__,
        "native_core": NATIVE,
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
