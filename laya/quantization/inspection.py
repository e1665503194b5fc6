"""Owns: what a GGUF file says of itself before anything is computed: types of its tensors, and what is wrong with them.

Weights are compared with the reference's, tensor by tensor and expert by expert. Large tensors are compared on rows
spread over them. What is found is a `Flag` that names the tensor; whether the model still speaks is for others to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from laya.memory import read_header
from laya.memory.ggml import FILE_TYPES, GGML_TYPES
from laya.memory.gguf import GgufHeader, TensorInfo
from laya.models.files import shard_paths

ROUTERS = re.compile(r"ffn_gate_inp(_shexp)?\.weight$|ffn_gate_inp\.bias$|exp_probs_b(\.bias)?$")
_NORMS = re.compile(r"norm\.weight$")
_EXPERTS = re.compile(r"_exps\.(weight|bias)$")
_BLOCK_MATRICES = re.compile(r"^blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down)(_exps)?)\.weight$")
_PACKED_BITS = 4
_WIDE = frozenset({"F32", "F16", "BF16", "F64"})
ROWS_COMPARED = 256  # of a tensor, or of one expert of it
_MOST_SHOWN = 6  # flags of one kind; the rest is counted


class _UnreadType(Exception):
    """A type of tensor by its name."""


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """Something a user should know of a variant. is_broken: it computes what it should not."""

    what: str
    is_broken: bool = True


class FileFacts(msgspec.Struct, kw_only=True):
    """What a file is made of. bits: of a weight on average, in the tensors of two and more dimensions."""

    path: Path
    file_bytes: int
    architecture: str
    file_type: str
    types: dict[str, int]  # name -> bytes of all such tensors
    bits: float
    tensor_bytes: int
    matrix_f16_bytes: int  # what its matrices would take in 16 bits
    n_experts: int
    n_ctx_train: int
    n_vocab: int
    chat_template: bool
    packed_as: str | None = None  # a folder's layout, where the file is the unpacked weights of one

    @property
    def main_type(self) -> str:
        """Of most bytes."""
        return max(self.types, key=lambda name: self.types[name])

    @property
    def main_bits(self) -> float:
        if self.packed_as is not None:
            return self.bits
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.main_type]]
        return 8 * block_bytes / block


def file_facts(path: Path) -> FileFacts:
    """Raises BadModelFile where the header is none."""
    headers = [read_header(shard) for shard in shard_paths(path)]
    metadata = headers[0].metadata
    architecture = str(metadata.get("general.architecture", ""))
    types: dict[str, int] = {}
    matrix_bytes = matrix_elements = 0
    for tensor in (each for header in headers for each in header.tensors):
        types[tensor.type_name] = types.get(tensor.type_name, 0) + tensor.n_bytes
        if len(tensor.shape) > 1:
            matrix_bytes += tensor.n_bytes
            matrix_elements += int(np.prod(tensor.shape))
    tokens = metadata.get("tokenizer.ggml.tokens")
    return FileFacts(
        path=path,
        file_bytes=sum(header.file_bytes for header in headers),
        architecture=architecture,
        file_type=FILE_TYPES.get(int(metadata.get("general.file_type", -1)), "not said"),
        types=dict(sorted(types.items(), key=lambda item: -item[1])),
        bits=8 * matrix_bytes / max(1, matrix_elements),
        tensor_bytes=sum(header.tensor_bytes for header in headers),
        matrix_f16_bytes=2 * matrix_elements,
        n_experts=int(metadata.get(f"{architecture}.expert_count", 0)),
        n_ctx_train=int(metadata.get(f"{architecture}.context_length", 0)),
        n_vocab=int(getattr(tokens, "length", 0)),
        chat_template="tokenizer.chat_template" in metadata,
    )


def inspect(path: Path, reference: Path | None = None, *, is_unpacked: bool = False) -> list[Flag]:
    """Flags of one file; its weights are held to the reference's where one is given.

    is_unpacked: the matrices of its blocks are what a folder's 4-bit weights stand for, in a type that is wider.
    """
    theirs = dict(_tensors(reference)) if reference is not None and reference != path else {}
    flags: list[Flag] = []
    off: list[Flag] = []
    unread: dict[str, int] = {}
    for name, (header, tensor) in _tensors(path):
        kind = tensor.type_name
        if ROUTERS.search(name) and kind not in _WIDE:
            flags.append(Flag(what=f"the router {name} is {kind}: routers stay at 16 bits or more"))
        if _NORMS.search(name) and kind not in _WIDE:
            flags.append(Flag(what=f"{name} is {kind}: norms stay at 16 bits or more"))
        if len(tensor.shape) > 1 or kind in _WIDE:
            try:
                was_packed = is_unpacked and _BLOCK_MATRICES.match(name) is not None
                most = _most_error_of(_PACKED_BITS) if was_packed else most_error(kind)
                off += _weights_off(name, header, tensor, theirs.get(name), most)
            except _UnreadType as error:
                unread[str(error)] = unread.get(str(error), 0) + 1
    flags += _split_experts(path)
    if theirs and (missing := sorted(set(theirs) - {name for name, _ in _tensors(path)})):
        flags.append(Flag(what=f"{len(missing)} tensors of the reference are not there, such as {missing[0]}"))
    flags += off[:_MOST_SHOWN]
    if len(off) > _MOST_SHOWN:
        flags.append(Flag(what=f"{len(off) - _MOST_SHOWN} more tensors or experts like that"))
    for kind, count in unread.items():
        flags.append(Flag(what=f"{count} tensors were not compared: {kind} cannot be read here", is_broken=False))
    return flags


def most_error(kind: str) -> float:
    """How far weights of a type may be from the reference's, by root mean square over the reference's own.

    Half a step of a block's grid, with room for an importance matrix, which spends error where it matters less.
    """
    ggml_type = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    if kind in _WIDE:
        return 0.01
    return _most_error_of(int(8 * block_bytes / block))


def _most_error_of(n_bits: int) -> float:
    return float(2.0 ** (1.6 - n_bits))


def _tensors(path: Path) -> Iterator[tuple[str, tuple[GgufHeader, TensorInfo]]]:
    for shard in shard_paths(path):
        header = read_header(shard)
        for tensor in header.tensors:
            yield tensor.name, (header, tensor)


def _weights_off(
    name: str, header: GgufHeader, tensor: TensorInfo, reference: tuple[GgufHeader, TensorInfo] | None, most: float
) -> list[Flag]:
    is_experts = _EXPERTS.search(name) is not None and len(tensor.shape) > 1
    n_parts = tensor.shape[-1] if is_experts else 1
    if reference is not None and reference[1].shape != tensor.shape:
        return [Flag(what=f"{name} has the shape {tensor.shape}, the reference's {reference[1].shape}")]
    found = []
    for part in range(n_parts):
        where = f"{name}, expert {part}" if is_experts else name
        ours = _rows(header, tensor, part, n_parts)
        if not np.isfinite(ours).all():
            found.append(Flag(what=f"{where} holds NaN or infinity"))
            continue
        theirs = _rows(*reference, part, n_parts) if reference is not None else None
        is_zero = not ours.any()
        if is_zero and len(tensor.shape) > 1 and (theirs is None or theirs.any()):
            found.append(Flag(what=f"{where} is all zero"))
        elif theirs is not None and (size := float(np.sqrt(np.mean(theirs**2)))) > 0:
            error = float(np.sqrt(np.mean((ours - theirs) ** 2))) / size
            if error > most:
                told = f"{where} ({tensor.type_name}) is {error:.1%} off the reference; at most {most:.1%} is usual"
                found.append(Flag(what=told))
    return found


def _rows(header: GgufHeader, tensor: TensorInfo, part: int, n_parts: int) -> Any:
    """Rows spread over one of the equal parts of a tensor, as float32. Raises _UnreadType."""
    row_bytes = GGML_TYPES[tensor.type_id].row_bytes(tensor.shape[0])
    n_rows = int(np.prod(tensor.shape[1:])) // n_parts
    raw = np.memmap(header.path, np.uint8, "r", header.data_offset + tensor.offset, (n_parts, n_rows, row_bytes))
    picked = np.unique(np.linspace(0, n_rows - 1, min(n_rows, ROWS_COMPARED)).astype(int))
    kind = gguf.GGMLQuantizationType(tensor.type_id)
    rows = np.ascontiguousarray(raw[part][picked])
    if tensor.type_name in ("F32", "F16", "F64"):
        return rows.view({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[tensor.type_name]).astype(np.float32)
    try:
        return gguf.dequantize(rows, kind)
    except NotImplementedError:
        raise _UnreadType(tensor.type_name) from None


def _split_experts(path: Path) -> Iterator[Flag]:
    """Experts of one layer that are stored one by one, in types that differ: engines fuse them into one tensor."""
    kinds: dict[str, set[str]] = {}
    for name, (_, tensor) in _tensors(path):
        if match := re.fullmatch(r"(blk\.\d+\.ffn_(?:gate|up|down))\.\d+\.weight", name):
            kinds.setdefault(match[1], set()).add(tensor.type_name)
    for name, found in kinds.items():
        if len(found) > 1:
            yield Flag(what=f"the experts of {name} have types that differ: {', '.join(sorted(found))}")
