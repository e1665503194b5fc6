"""Owns: llama.cpp's library inside the built-in engine's wheel: finding it, binding its functions, what it logs."""

from __future__ import annotations

import ctypes
import importlib.util
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from laya.errors import EngineFailed

KEPT_LINES = 200
_ON_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_log: deque[str] = deque(maxlen=KEPT_LINES)
# One for the process, and as long as it: the library logs when a model is freed, whoever set its log.
_on_log = _ON_LOG(lambda _level, text, _data: _log.append(text.decode(errors="replace")))


@cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    found = sorted(Path(spec.origin).parent.glob("*.so")) if spec and spec.origin else []
    if not found:
        raise EngineFailed("The built-in engine is not installed, and with it llama.cpp's library.")
    library = ctypes.CDLL(str(found[0]))
    library.llama_log_set.restype, library.llama_log_set.argtypes = None, (_ON_LOG, ctypes.c_void_p)
    library.llama_log_set(_on_log, None)
    return library


def bound(signatures: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Callable[..., Any]]:
    """Name -> function, of (result type, argument types). Raises EngineFailed where the wheel does not export one."""
    table: dict[str, Callable[..., Any]] = {}
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(_library(), name)
        except AttributeError:
            raise EngineFailed(f"This build of the engine does not export {name}.") from None
        function.restype, function.argtypes = result, arguments
        table[name] = function
    return table


def last_logged() -> str:
    """Why the library could not do what it was asked: the last line of its log that has an error, else the last one."""
    lines = "".join(_log).strip().split("\n")
    return next((line for line in reversed(lines) if "error" in line), lines[-1])
