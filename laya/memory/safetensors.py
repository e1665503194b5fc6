"""Owns: reading the headers of safetensors files, without a tensor and without trusting a length in them.

A header is 8 bytes of length (little endian) and a JSON object: tensor name -> dtype, shape, first and last byte. A
model of 100 files and 200 000 tensors is read and handed on file by file, so that never more than a few tables are
held. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Annotated

import msgspec

from laya.errors import BadModelFile, nearest
from laya.memory.lookalike import what_it_looks_like
from laya.memory.source import ByteSource

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 1_000_000  # of one model; the largest known has a fifth
FIRST_READ_BYTES = 1 << 17
READERS = 8  # files read at once: over a network each is a wait of its own
SINGLE_FILE = "model.safetensors"

# Bits of one element. F4 and F6 come in packed pairs and triples, so a row's bytes are rounded up.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


_Size = Annotated[int, msgspec.Meta(ge=0)]


class SafeTensor(msgspec.Struct, gc=False):
    """One tensor as a header has it. `shape` as PyTorch says it: rows first.

    `__metadata__`, which is texts by name, reads as one without bytes.
    """

    dtype: str = ""
    shape: tuple[_Size, ...] = ()
    data_offsets: tuple[_Size, _Size] = (0, 0)  # of its first byte and after its last


class _Index(msgspec.Struct):
    """What is read of model.safetensors.index.json."""

    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(dict[str, SafeTensor])


def model_files(name: str, files: Mapping[str, ByteSource], index: bytes | None) -> list[ByteSource]:
    """The files that hold the model: those the index names, else model.safetensors, else all there are.

    A folder may hold the same weights a second time under another name (consolidated.safetensors), which an index
    leaves out. Raises BadModelFile naming shards that are missing.
    """
    if index is None:
        single = files.get(SINGLE_FILE)
        return [single] if single is not None else [files[file] for file in sorted(files)]
    if index.count(b":") > MAX_TENSORS:
        raise BadModelFile(f"{name}: its model.safetensors.index.json has more than {MAX_TENSORS} rows.", param="model")
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


def read_tables(sources: list[ByteSource]) -> Iterator[dict[str, SafeTensor]]:
    """The tensors of each file, by name. Raises BadModelFile naming the file and what is wrong."""
    n_tensors = 0
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        # A window of files, not all at once: their headers are dropped as they are used.
        for start in range(0, len(sources), READERS):
            window = sources[start : start + READERS]
            for source, text in zip(window, pool.map(_header_text, window), strict=True):
                tensors = _tensors(source, text)
                n_tensors += len(tensors)
                if n_tensors > MAX_TENSORS:
                    raise _fault(source, f"is corrupt: the model claims more than {MAX_TENSORS} tensors")
                yield tensors


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


def _tensors(source: ByteSource, text: bytes) -> dict[str, SafeTensor]:
    data_bytes = source.file_bytes - 8 - len(text)
    if text.count(b"{") > MAX_TENSORS:  # before anything is built of them
        raise _fault(source, f"is corrupt: its header claims more than {MAX_TENSORS} tensors")
    try:
        tensors = _HEADER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _fault(source, f"is corrupt: its header is no table of tensors ({error})") from None
    tensors.pop("__metadata__", None)
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, tensor in tensors.items():
        first, last = tensor.data_offsets
        key = (tensor.dtype, tensor.shape)
        n_bytes = sizes.get(key)
        if n_bytes is None:
            # Of a type newer than the table the offsets alone tell.
            bits = DTYPE_BITS.get(tensor.dtype)
            n_bytes = sizes[key] = -(-prod(tensor.shape) * bits // 8) if bits else last - first
        if last - first != n_bytes or not first <= last <= data_bytes:
            raise _disagreement(source, name, tensor, data_bytes)
    return tensors


def _disagreement(source: ByteSource, name: str, tensor: SafeTensor, data_bytes: int) -> BadModelFile:
    first, last = tensor.data_offsets
    if first <= last and last > data_bytes:
        what = f"is cut off or corrupt: {last - data_bytes} bytes of tensor {name!r} lie past its end; pull it again"
    else:
        shape = "x".join(map(str, tensor.shape))
        what = f"is corrupt: tensor {name!r} of {tensor.dtype} {shape} lies at {first} to {last}"
    return _fault(source, what)


def _fault(source: ByteSource, what: str) -> BadModelFile:
    return BadModelFile(f"{source.name} {what}.", param="model")
