"""Owns: the check that this CPU has the instructions the built-in engine was compiled for.

Without it a CPU that lacks one ends the child with SIGILL, which tells a user nothing. An engine of the user's own
(`engine_path`) was built for its machine and is not checked.
"""

from __future__ import annotations

import platform
from pathlib import Path

from laya.errors import EngineFailed

CPUINFO = Path("/proc/cpuinfo")
# What xllamacpp's x86 wheels are compiled with (its get_system_info()).
REQUIRED_X86_FLAGS = ("avx", "avx2", "bmi2", "f16c", "fma")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The feature flags of the first CPU; empty when the kernel does not tell."""
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                return frozenset(value.split())
    except OSError:
        return frozenset()
    return frozenset()


def check_cpu(cpuinfo: Path = CPUINFO, machine: str | None = None) -> None:
    """Raise EngineFailed when an x86 CPU lacks what the built-in engine needs."""
    flags = cpu_flags(cpuinfo)
    if (machine or platform.machine()) not in ("x86_64", "AMD64") or not flags:
        return
    missing = [flag for flag in REQUIRED_X86_FLAGS if flag not in flags]
    if missing:
        raise EngineFailed(
            f"This CPU has no {', '.join(missing).upper()}, which the built-in llama.cpp engine needs. "
            "Build llama-server on this machine and name it with engine_path."
        )
