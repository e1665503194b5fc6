"""Owns: what `laya doctor` looks at in the machine: its processor, and the disk that models are kept on.

Every probe only reads, takes the root of the file system it reads, and changes nothing. Knows no server and no network.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from laya.cli.finding import Finding, must_fix, ok, warn
from laya.config import Config
from laya.engines.cpu import check_cpu, cpu_flags
from laya.errors import LayaError
from laya.memory import Machine, size_text
from laya.types import GIB, MIB

LITTLE_DISK_BYTES = 10 * GIB  # a 4-bit model of 8 B parameters takes half of it
NO_DISK_BYTES = 256 * MIB  # the default model and its download

CanWrite = Callable[[Path], bool]
FreeBytes = Callable[[Path], int]


def can_write(path: Path) -> bool:
    """Whether this process could write here; asked of the kernel, not tried."""
    return os.access(path, os.W_OK)


def cpu(root: Path, config: Config, machine: str | None = None) -> Finding:
    """The model, the cores engines may use, and the instructions the built-in engine is compiled with."""
    facts = Machine(root).facts()
    allowed = f"{facts.n_cores} of {facts.n_cpus} cores for engines"
    if facts.n_cores < facts.n_cpus:
        allowed += " (CPU affinity or quota)"
    seen = f"CPU {facts.cpu_model}, {allowed}"
    if config.for_model("").engine_path is not None:
        return ok("cpu", seen)
    try:
        check_cpu(root / "proc/cpuinfo", machine)
    except LayaError as error:
        is_virtual = "hypervisor" in cpu_flags(root / "proc/cpuinfo")
        cure = "this is a virtual machine: give it its host's CPU (QEMU: -cpu host), or " if is_virtual else ""
        return must_fix(
            "cpu", f"{seen}: {error.message}", f"{cure}set engine_path in config.yaml to a llama-server built here"
        )
    is_x86 = (machine or platform.machine()) in ("x86_64", "AMD64")
    return ok("cpu", f"{seen}{', AVX2' if is_x86 and facts.has_avx2 else ''}")


def free_bytes_of(folder: Path) -> int:
    """Bytes this user may still write on the disk that holds `folder`."""
    return shutil.disk_usage(folder).free


def disk(home: Path, free_bytes: FreeBytes = free_bytes_of, is_writable: CanWrite = can_write) -> Finding:
    """Room for models where Laya keeps them."""
    folder = home
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    elsewhere = "export LAYA_HOME=/a/folder/on/a/larger/disk"
    if not (folder.is_dir() and is_writable(folder)):
        return must_fix("disk", f"{home} cannot be written by this user", "export LAYA_HOME=/a/folder/of/yours")
    try:
        n_bytes = free_bytes(folder)
    except OSError as error:
        return must_fix("disk", f"{home} cannot be read: {error.strerror}", "export LAYA_HOME=/a/folder/of/yours")
    seen = f"disk {size_text(n_bytes)} free in {home}"
    if n_bytes < NO_DISK_BYTES:
        return must_fix("disk", f"{seen}: no model fits", elsewhere)
    if n_bytes < LITTLE_DISK_BYTES:
        return warn("disk", f"{seen}: small models only", elsewhere)
    return ok("disk", seen)


def kernel_text(path: Path) -> str:
    """A kernel file's text; "" where it is not there or not ours to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
