"""Owns: the part of llama.cpp's C interface by which tensors are converted and GGUF files are written.

The wheel of the built-in engine exports it. No parameter struct that differs between builds is touched. Rows are
converted one chunk at a time, which gives the same bytes as a whole tensor does: no type looks beyond a row. ctypes
releases Python's lock for as long as a chunk takes. Knows no recipe.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from laya.errors import BadModelFile
from laya.memory.ggml import GgmlType
from laya.quantization.library import bound, last_logged

_P, _I64, _SIZE, _TEXT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p
QUANTIZATION_VERSION = 2  # general.quantization_version: of the block layouts


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(_P)))


_DEQUANTIZED = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "iq2_xxs",
    "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "mxfp4",
)  # fmt: skip
_TO_F32 = {name.upper(): f"dequantize_row_{name}" for name in _DEQUANTIZED}
_TO_F32 |= {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_version": (_TEXT, ()),
    "ggml_quantize_init": (None, (ctypes.c_int,)),
    "ggml_quantize_chunk": (_SIZE, (ctypes.c_int, _P, _P, _I64, _I64, _I64, _P)),
    "ggml_validate_row_data": (ctypes.c_bool, (ctypes.c_int, _P, _SIZE)),
    "ggml_get_tensor": (_P, (_P, _TEXT)),
    "ggml_free": (None, (_P,)),
    "gguf_init_from_file": (_P, (_TEXT, _InitParams)),
    "gguf_init_empty": (_P, ()),
    "gguf_free": (None, (_P,)),
    "gguf_set_kv": (None, (_P, _P)),
    "gguf_remove_key": (_I64, (_P, _TEXT)),
    "gguf_set_val_u32": (None, (_P, _TEXT, ctypes.c_uint32)),
    "gguf_set_val_str": (None, (_P, _TEXT, _TEXT)),
    "gguf_add_tensor": (None, (_P, _P)),
    "gguf_set_tensor_type": (None, (_P, _TEXT, ctypes.c_int)),
    "gguf_find_tensor": (_I64, (_P, _TEXT)),
    "gguf_get_tensor_offset": (_SIZE, (_P, _I64)),
    "gguf_get_tensor_size": (_SIZE, (_P, _I64)),
    "gguf_get_alignment": (_SIZE, (_P,)),
    "gguf_get_meta_size": (_SIZE, (_P,)),
    "gguf_get_meta_data": (None, (_P, _P)),
} | dict.fromkeys(_TO_F32.values(), (None, (_P, _P, _I64)))


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Name -> function. Raises EngineFailed where the wheel does not export one."""
    return bound(_SIGNATURES)


def ggml_version() -> str:
    version: bytes = functions()["ggml_version"]()
    return version.decode()


def can_read(kind: GgmlType) -> bool:
    """Whether values of this type can be had as F32."""
    return kind.name == "F32" or kind.name in _TO_F32


class Converter:
    """Rows of one tensor from its type to another; one for each thread, as it has buffers.

    source: its buffer for raw rows, to be filled before `convert`.
    """

    def __init__(self, n_elements: int) -> None:
        """n_elements: the most of one chunk."""
        self._api = functions()
        self.source = (ctypes.c_uint8 * (4 * n_elements))()
        self._values = (ctypes.c_float * n_elements)()
        self._result = (ctypes.c_uint8 * (4 * n_elements))()

    def convert(
        self, from_type: GgmlType, to_type: GgmlType, n_rows: int, n_columns: int, weights: int | None
    ) -> memoryview:
        """The rows in `source` as `to_type`, valid until the next call. weights: address of a row's importance.

        Raises ValueError for values that are no numbers (NaN, infinite).
        """
        api, n_elements = self._api, n_rows * n_columns
        n_source = n_rows * from_type.row_bytes(n_columns)
        if not api["ggml_validate_row_data"](from_type.id, self.source, n_source):
            raise ValueError("it holds values that are no numbers (NaN or infinite)")
        if from_type == to_type:
            return memoryview(self.source)[:n_source]
        values: Any = self.source
        if from_type.name != "F32":
            values = self._values
            api[_TO_F32[from_type.name]](self.source, values, n_elements)
        n_bytes: int = api["ggml_quantize_chunk"](to_type.id, values, self._result, 0, n_rows, n_columns, weights)
        if n_bytes != n_rows * to_type.row_bytes(n_columns) or not api["ggml_validate_row_data"](
            to_type.id, self._result, n_bytes
        ):
            raise ValueError(f"what became of it in {to_type.name} is not sound")
        return memoryview(self._result)[:n_bytes]


class GgufOutput:
    """The header of a file to be: a source's metadata and tensors, and where each tensor's bytes go."""

    def __init__(self, sources: list[Path]) -> None:
        """sources: a GGUF file, or all shards of one, the first one first. Raises BadModelFile for what is none."""
        self._api = api = functions()
        self._context = api["gguf_init_empty"]()
        self._tensors: list[tuple[int, int]] = []  # (gguf, ggml) contexts of the sources
        for index, path in enumerate(sources):
            tensors = _P()
            found = api["gguf_init_from_file"](os.fsencode(path), _InitParams(True, ctypes.pointer(tensors)))
            if not found:
                raise BadModelFile(f"{path}: llama.cpp cannot read it: {last_logged()}")
            self._tensors.append((found, tensors.value or 0))
            if index == 0:
                api["gguf_set_kv"](self._context, found)
        for key in ("split.no", "split.count", "split.tensors.count", "general.alignment"):
            api["gguf_remove_key"](self._context, key.encode())

    def put(self, values: Mapping[str, int | str]) -> None:
        """Metadata, in place of what was there."""
        for key, value in values.items():
            if isinstance(value, int):
                self._api["gguf_set_val_u32"](self._context, key.encode(), value)
            else:
                self._api["gguf_set_val_str"](self._context, key.encode(), value.encode())

    def add(self, name: str, kind: GgmlType) -> None:
        """A tensor of the sources, in the type it will have; tensors lie in the order of their adding."""
        raw = name.encode()
        tensor = next(filter(None, (self._api["ggml_get_tensor"](tensors, raw) for _, tensors in self._tensors)), None)
        if tensor is None:
            raise BadModelFile(f"llama.cpp does not find the tensor {name}.")
        self._api["gguf_add_tensor"](self._context, tensor)
        self._api["gguf_set_tensor_type"](self._context, raw, kind.id)

    def header(self) -> bytes:
        """What the file begins with, padded to where the first tensor begins."""
        raw = (ctypes.c_uint8 * self._api["gguf_get_meta_size"](self._context))()
        self._api["gguf_get_meta_data"](self._context, raw)
        return bytes(raw)

    def place(self, name: str) -> tuple[int, int, int]:
        """(offset, bytes, bytes with padding) of a tensor, the offset from the header's end."""
        index = self._api["gguf_find_tensor"](self._context, name.encode())
        n_bytes: int = self._api["gguf_get_tensor_size"](self._context, index)
        alignment: int = self._api["gguf_get_alignment"](self._context)
        return self._api["gguf_get_tensor_offset"](self._context, index), n_bytes, -(-n_bytes // alignment) * alignment

    def close(self) -> None:
        for source, tensors in self._tensors:
            self._api["gguf_free"](source)
            self._api["ggml_free"](tensors)
        self._api["gguf_free"](self._context)


def prepare(kind: GgmlType) -> None:
    """Build the tables that some types need, before threads ask for them."""
    functions()["ggml_quantize_init"](kind.id)
