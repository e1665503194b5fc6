"""Owns: writing a GGUF file of random weights under a real vocabulary, without numpy and in one pass over the disk.

The vocabulary is copied from a real file entry by entry, byte for byte. Weights come from one seed: the same call
writes the same bytes. Knows no architecture (generated_models.py does) and trusts the file it copies from.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from laya.memory import read_header
from laya.memory.ggml import GGML_TYPES

Value = bool | int | float | str | Sequence[int] | Sequence[bool]
ALIGNMENT = 32
PIECE_BYTES = 4 << 20
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_SIGN_AND_EXPONENT = bytes(byte & 0x80 | 0x3C for byte in range(256))  # of an f32 or bf16: 2^-7 to 2^-5, either sign
_HALF = bytes(byte & 0x83 | 0x24 for byte in range(256))  # of an f16: the same with an exponent of five bits


class Tensor(NamedTuple):
    """A row of the tensor table. `shape` in ggml's order: the row length first."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    fill: float | None = None  # None = random; else this number everywhere (F32 only)


# Type -> where the f16 scales of a block lie and their values; the rest of a block is random. Weights come out with a
# spread of about 0.04, so that a product with a normed row is neither lost nor overflows.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 2**-7),),
    "Q4_1": ((0, 2**-7), (2, -(2**-4))),
    "Q5_0": ((0, 2**-8),),
    "Q5_1": ((0, 2**-8), (2, -(2**-4))),
    "Q8_0": ((0, 2**-11),),
    "Q4_K": ((0, 2**-12), (2, 7.5 * 2**-12)),
    "Q6_K": ((208, 2**-15),),
}
WEIGHT_TYPES = ("F32", "F16", "BF16", *_SCALES)


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Sequence[Tensor], *, vocabulary: Path, seed: int
) -> None:
    """Write the file beside its name first, so that whoever sees it sees it whole.

    vocabulary: a GGUF file whose `tokenizer.*` entries are taken over. Raises BadModelFile when it is none.
    """
    copied = list(_vocabulary_entries(vocabulary))
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata) + len(copied)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        file.writelines(copied)
        offset = 0
        for tensor in tensors:
            kind = _TYPE_IDS[tensor.type_name]
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            file.write(_text(tensor.name) + shape + struct.pack("<IQ", kind, offset))
            offset += _padded(_n_bytes(tensor))
        _pad(file)
        for tensor in tensors:
            _write_tensor(file, tensor, random.Random(f"{seed}/{tensor.name}"))
            _pad(file)
    partial.replace(path)


# the header
_TYPE_IDS = {ggml_type.name: number for number, ggml_type in GGML_TYPES.items()}


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    """A typed metadata value; a whole number is unsigned, and so are those of an array."""
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    are_flags = all(isinstance(each, bool) for each in value)
    kind, code = (_BOOL, "B") if are_flags else (_U32, "I")
    return struct.pack(f"<IIQ{len(value)}{code}", _ARRAY, kind, len(value), *value)


def _vocabulary_entries(path: Path) -> Iterator[bytes]:
    """The `tokenizer.*` entries of a GGUF file as they stand in it."""
    header = read_header(path)  # what is wrong with the file is said here
    with path.open("rb") as file:
        raw = file.read(header.data_offset)
    (count,) = struct.unpack_from("<Q", raw, 16)
    position = 24
    for _ in range(count):
        start = position
        (length,) = struct.unpack_from("<Q", raw, position)
        key = raw[position + 8 : position + 8 + length]
        position += 8 + length
        (kind,) = struct.unpack_from("<I", raw, position)
        position = _after_value(raw, position + 4, kind)
        if key.startswith(b"tokenizer."):
            yield raw[start:position]


def _after_value(raw: bytes, position: int, kind: int) -> int:
    if kind == _STRING:
        (length,) = struct.unpack_from("<Q", raw, position)
        return int(position + 8 + length)
    if kind != _ARRAY:
        return position + _SCALAR_BYTES[kind]
    element, count = struct.unpack_from("<IQ", raw, position)
    position += 12
    if element != _STRING:
        return int(position + count * _SCALAR_BYTES[element])
    for _ in range(count):
        position = _after_value(raw, position, _STRING)
    return position


# the tensors
def _n_bytes(tensor: Tensor) -> int:
    rows = 1
    for size in tensor.shape[1:]:
        rows *= size
    return rows * GGML_TYPES[_TYPE_IDS[tensor.type_name]].row_bytes(tensor.shape[0])


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _write_tensor(file: BinaryIO, tensor: Tensor, source: random.Random) -> None:
    left = _n_bytes(tensor)
    if tensor.fill is not None:
        file.write(struct.pack("<f", tensor.fill) * (left // 4))
        return
    block_bytes = GGML_TYPES[_TYPE_IDS[tensor.type_name]].block_bytes
    piece_bytes = PIECE_BYTES // block_bytes * block_bytes
    while left:
        piece = bytearray(source.randbytes(min(piece_bytes, left)))
        _make_weights(piece, tensor.type_name, block_bytes)
        file.write(piece)
        left -= len(piece)


def _make_weights(piece: bytearray, type_name: str, block_bytes: int) -> None:
    """Turn random bytes into small numbers of the type."""
    if type_name == "F32":
        piece[3::4] = piece[3::4].translate(_SIGN_AND_EXPONENT)
    elif type_name == "BF16":
        piece[1::2] = piece[1::2].translate(_SIGN_AND_EXPONENT)
    elif type_name == "F16":
        piece[1::2] = piece[1::2].translate(_HALF)
    else:
        n_blocks = len(piece) // block_bytes
        for at, scale in _SCALES[type_name]:
            for index, byte in enumerate(struct.pack("<e", scale)):
                piece[at + index :: block_bytes] = bytes([byte]) * n_blocks
