"""Owns: the few functions of ggml, by ctypes, with which the engine's own kernels are timed.

The wheel of the built-in engine exports ggml's C interface. Tensors and graphs are opaque pointers here; the one struct
that is passed by value is `_InitParams`. ggml ends the process where a shape is wrong: use this in a child.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from laya.errors import EngineFailed
from laya.types import KIB

CPU_DEVICE = 0  # enum ggml_backend_dev_type
_HEADER_BYTES = 512  # of one tensor in a context; more than any build takes
_GRAPH_NODES = 2048
_P, _INT, _LONG, _FLOAT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "init": (_P, (_InitParams,)),
    "free": (None, (_P,)),
    "nbytes": (_SIZE, (_P,)),
    "new_tensor_2d": (_P, (_P, _INT, _LONG, _LONG)),
    "new_tensor_3d": (_P, (_P, _INT, _LONG, _LONG, _LONG)),
    "mul_mat": (_P, (_P, _P, _P)),
    "add": (_P, (_P, _P, _P)),
    "flash_attn_ext": (_P, (_P, _P, _P, _P, _P, _FLOAT, _FLOAT, _FLOAT)),
    "permute": (_P, (_P, _P, _INT, _INT, _INT, _INT)),
    "new_graph_custom": (_P, (_P, _SIZE, ctypes.c_bool)),
    "build_forward_expand": (None, (_P, _P)),
    "backend_cpu_init": (_P, ()),
    "backend_cpu_set_n_threads": (None, (_P, _INT)),
    "backend_cpu_buffer_type": (_P, ()),
    "backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "backend_buffer_clear": (None, (_P, ctypes.c_uint8)),
    "backend_buffer_free": (None, (_P,)),
    "backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)),
    "backend_graph_compute": (_INT, (_P, _P)),
    "backend_dev_by_type": (_P, (_INT,)),
    "backend_dev_backend_reg": (_P, (_P,)),
    "backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)),
}


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Name without `ggml_` -> function. Raises EngineFailed where the wheel does not export one."""
    spec = importlib.util.find_spec("xllamacpp")
    found = sorted(Path(spec.origin).parent.glob("*.so")) if spec and spec.origin else []
    if not found:
        raise EngineFailed("The built-in engine is not installed: its kernels cannot be timed.")
    library = ctypes.CDLL(str(found[0]))
    table = {}
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, f"ggml_{name}")
        except AttributeError:
            raise EngineFailed(f"This build of the engine does not export ggml_{name}: it cannot be timed.") from None
        function.restype, function.argtypes = result, arguments
        table[name] = function
    return table


@cache
def repack_buffer_type() -> int | None:
    """The CPU's buffer type that lays weights out anew, or None where this build has none."""
    ggml = functions()
    registry = ggml["backend_dev_backend_reg"](ggml["backend_dev_by_type"](CPU_DEVICE))
    address = ggml["backend_reg_get_proc_address"](registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(ggml["backend_dev_by_type"](CPU_DEVICE))
    return extra[0] if extra else None


class Tensors:
    """A context whose tensors share one buffer, freed with the `with` block."""

    def __init__(self, n_tensors: int, *, is_repacked: bool = False) -> None:
        self._ggml = functions()
        self._size = n_tensors * _HEADER_BYTES + _GRAPH_NODES * 64 + 64 * KIB
        self._is_repacked = is_repacked
        self._buffer: int | None = None

    def __enter__(self) -> Tensors:
        self.context = self._ggml["init"](_InitParams(self._size, None, True))
        return self

    def __exit__(self, *_: object) -> None:
        if self._buffer is not None:
            self._ggml["backend_buffer_free"](self._buffer)
        self._ggml["free"](self.context)

    def new(self, type_id: int, *shape: int) -> int:
        """A tensor of two or three dimensions, the row length first."""
        tensor: int = self._ggml[f"new_tensor_{len(shape)}d"](self.context, type_id, *shape)
        return tensor

    def heads_of(self, cache: int) -> int:
        """A cache as attention reads it: its second dimension, the heads, comes third."""
        view: int = self._ggml["permute"](self.context, cache, 0, 2, 1, 3)
        return view

    def allocate(self, weights: list[int] | None = None) -> None:
        """Give every tensor its bytes. `weights` are filled with bytes that no kernel trips over, the rest with 0."""
        kind = repack_buffer_type() if self._is_repacked else self._ggml["backend_cpu_buffer_type"]()
        self._buffer = self._ggml["backend_alloc_ctx_tensors_from_buft"](self.context, kind)
        if not self._buffer:
            raise EngineFailed("The kernels cannot be timed: there is no memory for a small model's weights.")
        if not self._is_repacked:
            self._ggml["backend_buffer_clear"](self._buffer, 0x11)
        for tensor in weights or []:
            n_bytes = self._ggml["nbytes"](tensor)
            self._ggml["backend_tensor_set"](tensor, b"\x11" * n_bytes, 0, n_bytes)


class Graph:
    """Operations in the order they are added, computed by `n_threads` threads."""

    def __init__(self, tensors: Tensors) -> None:
        self._ggml, self._tensors = functions(), tensors
        self._graph = self._ggml["new_graph_custom"](tensors.context, _GRAPH_NODES, False)

    def add(self, name: str, *arguments: Any) -> int:
        """One operation: `mul_mat`, `add` or `flash_attn_ext`."""
        result: int = self._ggml[name](self._tensors.context, *arguments)
        self._ggml["build_forward_expand"](self._graph, result)
        return result

    def compute(self, backend: int) -> None:
        self._ggml["backend_graph_compute"](backend, self._graph)


@cache
def backend(n_threads: int) -> int:
    """The CPU, with this many threads."""
    ggml = functions()
    made: int = ggml["backend_cpu_init"]()
    ggml["backend_cpu_set_n_threads"](made, n_threads)
    return made
