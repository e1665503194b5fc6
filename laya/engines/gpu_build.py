"""Owns: whether a build of llama.cpp can compute on NVIDIA's GPUs, as the build itself tells.

It is asked once, in a process of its own: the CUDA libraries of a build that has them are large, and stay in memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from laya.engines.llamacpp import environment

TIMEOUT_S = 30
HOW = "`laya engines list` tells of others"
_OF_THE_WHEEL = "import xllamacpp\nfor each in xllamacpp.get_device_info(): print(f'  {each[\"name\"]}: ')"
_DEVICE = re.compile(r"^\s+([A-Za-z]+)\d*: ", re.MULTILINE)
_CUDA = "CUDA"


def why_no_gpu(engine_path: Path | None, packages: Path | None = None) -> str | None:
    """Why no layer of a model can lie on a GPU that is here; None: it can. engine_path: None: the built-in engine, out
    of `packages` where a build of it is installed beside Laya."""
    if engine_path is None:
        kinds = _kinds_of((sys.executable, "-c", _OF_THE_WHEEL), 0, packages)
        what = "the engine that comes with Laya" if packages is None else f"the build {packages.name}"
    else:
        try:
            changed_ns = engine_path.stat().st_mtime_ns
        except OSError:
            return None  # who starts it says what is wrong
        kinds, what = _kinds_of((str(engine_path), "--list-devices"), changed_ns), str(engine_path)
    if _CUDA in kinds:
        return None
    others = sorted(kinds - {"CPU"})
    is_for = f"is a build for {', '.join(others)}, whose memory is not planned" if others else "is a build for CPUs"
    if packages is not None and not others:
        is_for = "finds no GPU (`laya doctor`)"
    return f"{what} {is_for}; {HOW}"


@lru_cache(maxsize=32)
def _kinds_of(command: tuple[str, ...], changed_ns: int, packages: Path | None = None) -> frozenset[str]:
    """The kinds of devices that it names: CUDA, Vulkan, CPU; none where it does not answer. changed_ns: of the file."""
    path = {} if packages is None else {"PYTHONPATH": str(packages)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment() | path,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(_DEVICE.findall(done.stdout + done.stderr)) if done.returncode == 0 else frozenset()
