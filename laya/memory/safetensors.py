"""Owns: reading the headers of safetensors files, without a tensor and without trusting a length in them.

A header is 8 bytes of length (little endian) and a JSON object: tensor name -> dtype, shape, first and last byte. A
model of 100 files and 200 000 tensors is read file by file and handed on tensor by tensor, so that never more than one
file's table is held. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import NamedTuple, NoReturn

import msgspec

from laya.errors import BadModelFile, nearest
from laya.memory.lookalike import what_it_looks_like
from laya.memory.source import ByteSource

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 2_000_000  # of one model; the largest known has a tenth
FIRST_READ_BYTES = 1 << 17
READERS = 8  # files read at once: over a network each is a wait of its own
SINGLE_FILE = "model.safetensors"

# Bits of one element. F4 and F6 come in packed pairs and triples, so a row's bytes are rounded up.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class SafeTensor(NamedTuple):
    """One tensor of the table. `shape` as PyTorch says it: rows first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


class _Row(msgspec.Struct, gc=False):
    """A tensor as the header has it; of `__metadata__`, which is texts by name, nothing is read."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Index(msgspec.Struct):
    """What is read of model.safetensors.index.json."""

    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(dict[str, _Row])


def model_files(name: str, files: Mapping[str, ByteSource], index: bytes | None) -> list[ByteSource]:
    """The files that hold the model: those the index names, else model.safetensors, else all there are.

    A folder may hold the same weights a second time under another name (consolidated.safetensors), which an index
    leaves out. Raises BadModelFile naming shards that are missing.
    """
    if index is None:
        single = files.get(SINGLE_FILE)
        return [single] if single is not None else [files[file] for file in sorted(files)]
    try:
        named = sorted(set(msgspec.json.decode(index, type=_Index).weight_map.values()))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadModelFile(f"{name}: its model.safetensors.index.json is no index ({error}).", param="model") from None
    missing = [file for file in named if file not in files]
    if missing:
        close = nearest(missing[0], files)
        hint = f" There is {close}." if close else ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadModelFile(
            f"{name}: {missing[0]}{more} of the {len(named)} files its index names is missing.{hint} Pull it again.",
            param="model",
            missing=missing[:100],
        )
    return [files[file] for file in named]


def read_tensors(sources: list[ByteSource]) -> Iterator[SafeTensor]:
    """Every tensor of the files, in their order. Raises BadModelFile naming the file and what is wrong."""
    n_tensors = 0
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        # A window of files, not all at once: their headers are dropped as they are used.
        for start in range(0, len(sources), READERS):
            window = sources[start : start + READERS]
            for source, text in zip(window, pool.map(_header_text, window), strict=True):
                for tensor in _tensors(source, text):
                    n_tensors += 1
                    if n_tensors > MAX_TENSORS:
                        raise _fault(source, f"is corrupt: the model claims more than {MAX_TENSORS} tensors")
                    yield tensor


def _header_text(source: ByteSource) -> bytes:
    """The JSON of a file's header, in full and within the file."""
    if source.file_bytes == 0:
        raise _fault(source, "is empty (0 bytes); pull it again")
    start = source.read(0, FIRST_READ_BYTES)
    if len(start) < 10 or start[8:9] != b"{":
        raise _fault(source, f"is not a safetensors file; {what_it_looks_like(start)}")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise _fault(source, f"is corrupt: its header claims {length} bytes; the format allows {MAX_HEADER_BYTES}")
    if 8 + length > source.file_bytes:
        raise _fault(
            source,
            f"is cut off or corrupt: its header claims {length} bytes, and the file has {source.file_bytes} in all; "
            f"pull it again",
        )
    text = start[8 : 8 + length]
    if len(text) < length:
        text += source.read(8 + len(text), length - len(text))
    if len(text) < length:
        raise _fault(source, "became shorter while it was read")
    return text


def _tensors(source: ByteSource, text: bytes) -> Iterator[SafeTensor]:
    data_bytes = source.file_bytes - 8 - len(text)
    try:
        rows = _HEADER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _fault(source, f"is corrupt: its header is no table of tensors ({error})") from None
    for name, row in rows.items():
        if name != "__metadata__":
            yield SafeTensor(name, row.dtype, row.shape, _checked_bytes(source, name, row, data_bytes))


def _checked_bytes(source: ByteSource, name: str, row: _Row, data_bytes: int) -> int:
    """Bytes of a tensor, which its shape, its offsets and the file must agree on."""
    first, last = row.data_offsets
    n_bytes = last - first
    if first < 0 or n_bytes < 0 or any(size < 0 for size in row.shape):
        _corrupt(source, f"tensor {name!r} lies at {first} to {last} with shape {list(row.shape)}")
    bits = DTYPE_BITS.get(row.dtype)
    if bits is not None and -(-prod(row.shape) * bits // 8) != n_bytes:
        _corrupt(source, f"tensor {name!r} of {row.dtype} {list(row.shape)} has {n_bytes} bytes")
    if last > data_bytes:
        raise _fault(source, f"is cut off: {last - data_bytes} bytes of tensor {name!r} are missing; pull it again")
    return n_bytes


def _corrupt(source: ByteSource, what: str) -> NoReturn:
    raise _fault(source, f"is corrupt: {what}")


def _fault(source: ByteSource, what: str) -> BadModelFile:
    return BadModelFile(f"{source.name} {what}.", param="model")
