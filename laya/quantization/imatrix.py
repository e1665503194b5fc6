"""Owns: reading importance matrices in llama.cpp's formats (GGUF, and the older .dat), and what one says of a tensor.

An importance is the mean square of what a matrix's column is multiplied with. An expert that no token of the
calibration text reached has none: its columns count alike (1.0), and it is named. Knows no model.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from laya.errors import BadModelFile
from laya.memory.gguf import GgufHeader, read_header

MAGIC = b"GGUF"
WINDOW_TOKENS = 512  # of a calibration text, read at once
SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNK_COUNT, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MAX_ENTRIES, _MAX_NAME_BYTES, _MAX_VALUES = 100_000, 1024, 1 << 28


class Importance(NamedTuple):
    """Of one tensor: a value for each column, of each expert one after another."""

    values: array[float]
    unseen_experts: tuple[int, ...] = ()

    def address(self, matrix: int, n_columns: int) -> int:
        """Where the values of one matrix lie in memory, for as long as this lives."""
        return self.values.buffer_info()[0] + 4 * matrix * n_columns


class ImportanceMatrix(NamedTuple):
    """n_chunks: of the calibration text; 0: the file does not say."""

    tensors: Mapping[str, Importance]
    n_chunks: int = 0

    @property
    def n_bytes(self) -> int:
        return sum(4 * len(importance.values) for importance in self.tensors.values())


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Raises BadModelFile for a file that is missing, no importance matrix, or holds what is no number."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == MAGIC
            file.seek(0)
            matrix = _of_gguf(read_header(path), file) if is_gguf else _of_dat(path, file)
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read ({error.strerror}).") from None
    for name, importance in matrix.tensors.items():
        if not all(map(math.isfinite, importance.values)):
            raise BadModelFile(f"{path}: the importance of {name} holds what is no finite number.")
    if not matrix.tensors:
        raise BadModelFile(f"{path}: an importance matrix without entries.")
    return matrix


def _of_gguf(header: GgufHeader, file: BinaryIO) -> ImportanceMatrix:
    places = {tensor.name: tensor for tensor in header.tensors}

    def floats(name: str) -> array[float]:
        tensor = places.get(name)
        if tensor is None or tensor.type_name != "F32":
            raise BadModelFile(f"{header.path}: no importance matrix: it has no {name} of F32.")
        file.seek(header.data_offset + tensor.offset)
        return _floats(file, tensor.n_bytes // 4, header.path)

    tensors = {}
    for name in places:
        if name.endswith(SUMS):
            own = name[: -len(SUMS)]
            tensors[own] = means(floats(name), floats(own + COUNTS), header.path)
    if not tensors:
        raise BadModelFile(f"{header.path}: no importance matrix: it has no tensor that ends in {SUMS}.")
    n_chunks = header.metadata.get(CHUNK_COUNT, 0)
    return ImportanceMatrix(tensors, n_chunks if isinstance(n_chunks, int) else 0)


def means(sums: array[float], counts: array[float], path: Path) -> Importance:
    """sums: of squares. counts: one for each matrix."""
    if not counts or len(sums) % len(counts):
        raise BadModelFile(f"{path}: {len(sums)} sums for {len(counts)} matrices.")
    n_columns, values, unseen = len(sums) // len(counts), array("f"), []
    for index, count in enumerate(counts):
        own = sums[index * n_columns : (index + 1) * n_columns]
        if count > 0:
            values.extend(array("f", (value / count for value in own)))
        else:
            values.extend(array("f", [1.0]) * n_columns)
            unseen.append(index)
    return Importance(values, tuple(unseen))


def _of_dat(path: Path, file: BinaryIO) -> ImportanceMatrix:
    """Entries of name, number of calls and sums, as llama.cpp wrote them before 2025."""
    n_entries = _int(file, path, 1, _MAX_ENTRIES)
    tensors: dict[str, Importance] = {}
    for _ in range(n_entries):
        name = _exactly(file, _int(file, path, 1, _MAX_NAME_BYTES), path).decode("utf-8", "replace")
        n_calls = _int(file, path, 0, 1 << 30)
        values = _floats(file, _int(file, path, 1, _MAX_VALUES), path)
        if n_calls:
            values = array("f", (value / n_calls for value in values))
        tensors[name] = Importance(values)
    rest = file.read(4)
    return ImportanceMatrix(tensors, struct.unpack("<i", rest)[0] if len(rest) == 4 else 0)


def _int(file: BinaryIO, path: Path, least: int, most: int) -> int:
    value: int = struct.unpack("<i", _exactly(file, 4, path))[0]
    if not least <= value <= most:
        raise BadModelFile(f"{path}: no importance matrix of llama.cpp, neither GGUF nor .dat.")
    return value


def _exactly(file: BinaryIO, n_bytes: int, path: Path) -> bytes:
    raw = file.read(n_bytes)
    if len(raw) != n_bytes:
        raise BadModelFile(f"{path}: ends in the middle of an importance matrix.")
    return raw


def _floats(file: BinaryIO, count: int, path: Path) -> array[float]:
    values = array("f")
    values.frombytes(_exactly(file, 4 * count, path))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def unseen_experts(matrix: ImportanceMatrix) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors with experts that the calibration text did not reach, and which."""
    return ((name, own.unseen_experts) for name, own in matrix.tensors.items() if own.unseen_experts)
