"""Owns: what kind of GPUs a build of llama.cpp computes on, as the build itself tells.

It is asked once, in a process of its own: the libraries of a build for GPUs are large, and stay in memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from laya.engines.llamacpp import environment

TIMEOUT_S = 30
HOW = "`laya engines list` tells of others"
_OF_THE_WHEEL = "import xllamacpp\nfor each in xllamacpp.get_device_info(): print(f'  {each[\"name\"]}: ')"
_DEVICE = re.compile(r"^\s+([A-Za-z]+)(?:\d+)?: ", re.MULTILINE)
VULKAN = "Vulkan"
KINDS = ("CUDA", "ROCm", VULKAN)


class GpuBuild(NamedTuple):
    """What a build tells of itself: the kind of its GPUs, or why no layer can lie on one."""

    kind: str | None
    why_not: str | None


def why_no_gpu(engine_path: Path | None, packages: Path | None = None, n_cards: int | None = None) -> str | None:
    """Why no layer of a model can lie on a GPU that is here; None: it can. See `gpu_build`."""
    return gpu_build(engine_path, packages, n_cards).why_not


def gpu_build(engine_path: Path | None, packages: Path | None = None, n_cards: int | None = None) -> GpuBuild:
    """engine_path: None: the built-in engine, out of `packages` where a build of it is installed beside Laya. n_cards:
    whose memory is known; Vulkan numbers its devices as it likes, so it has to see as many."""
    if engine_path is None:
        devices = _devices_of((sys.executable, "-c", _OF_THE_WHEEL), 0, packages)
        what = "the engine that comes with Laya" if packages is None else f"the build {packages.name}"
    else:
        try:
            changed_ns = engine_path.stat().st_mtime_ns
        except OSError:
            return GpuBuild(None, None)  # who starts it says what is wrong
        devices, what = _devices_of((str(engine_path), "--list-devices"), changed_ns), str(engine_path)
    kind = next((each for each in KINDS if each in devices), None)
    n_seen = devices.count(VULKAN)
    if kind == VULKAN and n_cards not in (None, n_seen):
        return GpuBuild(None, f"{what} sees {n_seen} GPUs by Vulkan, and the memory of {n_cards} is known; {HOW}")
    if kind is not None:
        return GpuBuild(kind, None)
    others = sorted(set(devices) - {"CPU"})
    is_for = f"is a build for {', '.join(others)}, whose memory is not planned" if others else "is a build for CPUs"
    if packages is not None and not others:
        is_for = "finds no GPU (`laya doctor`)"
    return GpuBuild(None, f"{what} {is_for}; {HOW}")


@lru_cache(maxsize=32)
def _devices_of(command: tuple[str, ...], changed_ns: int, packages: Path | None = None) -> tuple[str, ...]:
    """The kind of each device that it names; none where it does not answer. changed_ns: of the file."""
    path = {} if packages is None else {"PYTHONPATH": str(packages)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment() | path,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(_DEVICE.findall(done.stdout + done.stderr)) if done.returncode == 0 else ()
