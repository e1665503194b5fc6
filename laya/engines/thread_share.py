"""Owns: how many threads an engine may compute with now: a number in memory that gateway and engine share.

llama.cpp fixes its threads at load, and collapses when the threads of all engines outnumber the cores. With the native
library the number is followed at each graph: a busy neighbour takes threads at once and gives them back at once.
Knows no cores and no other engine.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import struct

import laya


def _library() -> str:
    """Where the build put the native library: beside the native core, which an editable install keeps elsewhere."""
    core = importlib.util.find_spec("laya._core")
    beside = core.origin if core is not None and core.origin else laya.__file__
    # An engine imports this, and what it imports is in its plan: no pathlib.
    return os.path.join(os.path.dirname(beside), "_threads.so")


LIBRARY = _library()
CELL = struct.Struct("=I")
_kept: list[object] = []  # mappings that native code points into


class ThreadShare:
    """The gateway's end. `path` can be opened by our children as long as this is open."""

    def __init__(self) -> None:
        self._file = os.memfd_create("laya-threads")
        os.ftruncate(self._file, CELL.size)
        self._cell = mmap.mmap(self._file, CELL.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def set(self, n_threads: int) -> None:
        """From the next graph on; 0: as many as the engine was started with."""
        CELL.pack_into(self._cell, 0, n_threads)

    def close(self) -> None:
        self._cell.close()
        os.close(self._file)


def can_follow() -> bool:
    """Whether the built-in engine can change its threads while it runs."""
    return os.path.exists(LIBRARY)


def follow(path: str) -> None:
    """The engine's end, before llama.cpp is loaded into this process. Raises OSError."""
    library = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    with open(path, "r+b") as file:
        cell = mmap.mmap(file.fileno(), CELL.size)
    shared = ctypes.c_uint32.from_buffer(cell)
    _kept.append(shared)
    library.laya_follow_threads(ctypes.byref(shared))
