"""Owns: reading the header of a GGUF file (versions 2 and 3, little endian) without trusting a single length in it.

What a plan needs is the metadata and the tensor table, so arrays are walked, not built: only small numeric ones are
kept (`head_count_kv` per layer), of the others the type, length and bytes. Reads go into a buffer that grows with the
header, so that of a file on a server no more is fetched. Knows no architecture.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from laya.errors import BadModelFile
from laya.memory.ggml import GGML_TYPES
from laya.memory.lookalike import what_it_looks_like
from laya.memory.source import ByteSource, opened

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
KEPT_ARRAY_LENGTH = 4096
# Far above any real file (the largest known vocabularies have under a million strings with their merges, the longest
# tensor tables about ten thousand rows); they bound the time a hostile header can cost.
MAX_HEADER_BYTES = 128 << 20
MAX_STRINGS = 2_000_000
MAX_METADATA = 65_536
MAX_TENSORS = 50_000
MAX_KEY_BYTES = 65_535
FIRST_READ_BYTES = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("B", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class ArrayInfo(msgspec.Struct, frozen=True):
    """An array that was skipped: its element type (GGUF's number), length, and bytes of the elements' own content."""

    element_type: int
    length: int
    content_bytes: int


class TensorInfo(msgspec.Struct, frozen=True):
    """One row of the tensor table. `shape` in ggml's order: the row length first."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # ggml's number
    type_name: str
    offset: int  # bytes from the start of the tensor data
    n_bytes: int


class GgufHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of one file; its tensor data is known to be there in full."""

    path: Path
    version: int
    metadata: dict[str, Any]  # str, int, float, bool, a tuple of numbers, or ArrayInfo
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int  # bytes from the start of the file to the tensor data
    file_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without the padding between them."""
        return sum(tensor.n_bytes for tensor in self.tensors)


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises BadModelFile, naming the file and what is wrong: missing, a folder, unreadable, empty, of another kind,
    big-endian, of another version, corrupt, or shorter than its header promises.
    """
    with opened(path) as source:
        return read_header_of(source)


def read_header_of(source: ByteSource) -> GgufHeader:
    """The header of a GGUF file wherever it lies; its `path` is the source's name. Raises as `read_header` does."""
    return _Reader(source).header()


class _Reader:
    """A cursor over the file. `_need` is the one gate: nothing is read, and nothing grows, past what it allows."""

    def __init__(self, source: ByteSource) -> None:
        self.path = Path(source.name)
        self.source = source
        self.position = 0
        self.buffer = bytearray()
        self.strings_left = MAX_STRINGS
        self.file_bytes = source.file_bytes

    def header(self) -> GgufHeader:
        version = self._version()
        n_tensors, n_metadata = self._u64(), self._u64()
        if n_tensors > MAX_TENSORS or n_metadata > MAX_METADATA:
            self._corrupt(f"it claims {n_tensors} tensors and {n_metadata} metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            key = self._text(MAX_KEY_BYTES, "a metadata key")
            if key in metadata:
                self._corrupt(f"the key {key!r} is there twice")
            metadata[key] = self._value(self._u32())
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            self._corrupt(f"general.alignment is {alignment!r}")
        rows = [self._tensor_row(alignment) for _ in range(n_tensors)]
        data_offset = -(-self.position // alignment) * alignment
        tensors = self._tensors(rows, data_offset)
        return GgufHeader(
            path=self.path,
            version=version,
            metadata=metadata,
            tensors=tensors,
            alignment=alignment,
            data_offset=data_offset,
            file_bytes=self.file_bytes,
        )

    def _version(self) -> int:
        if self.file_bytes == 0:
            self._fail("is empty (0 bytes); pull it again.")
        start = self.source.read(0, 512)
        if start[:4] != MAGIC:
            self._fail(f"is not a GGUF file; {what_it_looks_like(start)}.")
        self.position = 4
        version = self._u32()
        if version > 0xFFFF:
            self._fail("is a big-endian GGUF file; this machine and the engine need the little-endian one.")
        if version not in (2, 3):
            self._fail(f"is GGUF version {version}; versions 2 and 3 can be read.")
        return version

    # the cursor
    def _need(self, end: int) -> None:
        """Have the file's bytes up to `end` in the buffer."""
        if end <= len(self.buffer):
            return
        if end > self.file_bytes:
            self._cut_off("its header")
        if end > MAX_HEADER_BYTES:
            self._corrupt(f"its header goes on past {MAX_HEADER_BYTES >> 20} MiB")
        goal = min(max(end, 2 * len(self.buffer), FIRST_READ_BYTES), self.file_bytes)
        while len(self.buffer) < goal:
            piece = self.source.read(len(self.buffer), goal - len(self.buffer))
            if not piece:
                self._fail("became shorter while it was read.")
            self.buffer += piece

    def _u32(self) -> int:
        self._need(self.position + 4)
        (value,) = _U32.unpack_from(self.buffer, self.position)
        self.position += 4
        return int(value)

    def _u64(self) -> int:
        self._need(self.position + 8)
        (value,) = _U64.unpack_from(self.buffer, self.position)
        self.position += 8
        return int(value)

    def _text(self, longest: int, what: str) -> str:
        n_bytes = self._u64()
        if n_bytes > longest:
            self._corrupt(f"{what} claims {n_bytes} bytes")
        end = self.position + n_bytes
        self._need(end)
        raw = bytes(self.buffer[self.position : end])
        self.position = end
        return raw.decode("utf-8", "replace")

    # metadata
    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text(MAX_HEADER_BYTES, "a metadata text")
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            self._corrupt(f"a metadata entry has type {kind}")
        code, size = _SCALARS[kind]
        self._need(self.position + size)
        (value,) = struct.unpack_from("<" + code, self.buffer, self.position)
        self.position += size
        return bool(value) if kind == _BOOL else value

    def _array(self) -> Any:
        kind, length = self._u32(), self._u64()
        if kind == _STRING:
            return ArrayInfo(kind, length, self._skip_strings(length))
        if kind not in _SCALARS:
            self._corrupt(f"an array has elements of type {kind}")
        code, size = _SCALARS[kind]
        start, end = self.position, self.position + length * size
        if end > self.file_bytes:
            self._cut_off(f"an array of {length} elements")
        self._need(end)
        self.position = end
        if length > KEPT_ARRAY_LENGTH:
            return ArrayInfo(kind, length, length * size)
        values = struct.unpack_from(f"<{length}{code}", self.buffer, start)
        return tuple(map(bool, values)) if kind == _BOOL else values

    def _skip_strings(self, length: int) -> int:
        """Walk over `length` strings; their bytes without the length fields."""
        if length > self.strings_left:
            self._corrupt(f"an array claims {length} texts")
        if self.position + length * 8 > self.file_bytes:
            self._cut_off(f"an array of {length} texts")
        self.strings_left -= length
        unpack, buffer, position, available = _U64.unpack_from, self.buffer, self.position, len(self.buffer)
        start = position
        for _ in range(length):
            if position + 8 > available:
                self._need(position + 8)
                available = len(buffer)
            position += 8 + unpack(buffer, position)[0]
        self._need(position)
        self.position = position
        return position - start - 8 * length

    # tensors
    def _tensor_row(self, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text(MAX_KEY_BYTES, "a tensor name")
        n_dims = self._u32()
        if not 1 <= n_dims <= 4:
            self._corrupt(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(self._u64() for _ in range(n_dims))
        type_id, offset = self._u32(), self._u64()
        if offset % alignment:
            self._corrupt(f"tensor {name!r} starts at {offset}, no multiple of {alignment}")
        return name, shape, type_id, offset

    def _tensors(self, rows: list[tuple[str, tuple[int, ...], int, int]], data_offset: int) -> tuple[TensorInfo, ...]:
        data_bytes = self.file_bytes - data_offset
        if len({row[0] for row in rows}) != len(rows):
            self._corrupt("two tensors have one name")
        starts = [*sorted({row[3] for row in rows}), max(data_bytes, 0)]
        next_start = dict(pairwise(starts))
        tensors = tuple(self._tensor(row, next_start[row[3]]) for row in rows)
        end = max((tensor.offset + tensor.n_bytes for tensor in tensors), default=0)
        if end > data_bytes:
            self._fail(
                f"is cut off: {end - data_bytes} of {end} bytes of tensor data are missing. Pull it again.",
                missing_bytes=end - data_bytes,
            )
        return tensors

    def _tensor(self, row: tuple[str, tuple[int, ...], int, int], next_start: int) -> TensorInfo:
        name, shape, type_id, offset = row
        known = GGML_TYPES.get(type_id)
        if known is None:
            # A type newer than the table: what lies between it and the next tensor is all it can take.
            return TensorInfo(name, shape, type_id, f"type {type_id}", offset, max(0, next_start - offset))
        rows = 1
        for size in shape[1:]:
            rows *= size
        if shape[0] % known.block or not 0 < rows * shape[0] < 1 << 60:
            self._corrupt(f"tensor {name!r} of type {known.name} has shape {list(shape)}")
        return TensorInfo(name, shape, type_id, known.name, offset, rows * known.row_bytes(shape[0]))

    # faults
    def _fail(self, what: str, **details: Any) -> NoReturn:
        raise BadModelFile(f"{self.path} {what}", param="model", **details)

    def _cut_off(self, what: str) -> NoReturn:
        """A length that runs past the end of the file: bytes are missing, or the length is wrong."""
        self._fail(f"is cut off or corrupt: {what} goes on past the end of the file ({self.file_bytes} bytes).")

    def _corrupt(self, what: str) -> NoReturn:
        self._fail(f"is corrupt: {what}.")
