"""Owns: what a quantization will do, before it does it: each tensor's type, the file's exact size, the memory it takes.

Reads headers alone. What gains nothing is refused here, and what the user should know is said here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from laya.errors import BadModelFile, ConfigError
from laya.memory.ggml import GgmlType
from laya.memory.gguf import GgufHeader, read_header
from laya.models import size_text
from laya.models.files import shard_paths
from laya.quantization.ggml_api import QUANTIZATION_VERSION, GgufOutput, can_read
from laya.quantization.imatrix import ImportanceMatrix
from laya.quantization.kinds import FULL_TYPES, file_kind
from laya.quantization.recipe import Target, sizes_of, targets

CHUNK_ELEMENTS = 1 << 20
_BUFFER_BYTES = 3 * 4 * CHUNK_ELEMENTS  # of one thread: raw rows, F32, result
_READ_BACK_BYTES = 4 << 20  # of checking the result and its checksum
_THREAD_BYTES = 1 << 20


class Wish(NamedTuple):
    """What the user asked for. imatrix_note: what the file says of it, of its origin."""

    kind: str
    embeddings: GgmlType | None = None
    head: GgmlType | None = None
    requantizes: bool = False
    imatrix: ImportanceMatrix | None = None
    imatrix_note: str = ""
    chat_template: str | None = None  # in place of the source's own
    is_exported: bool = False  # the source is a file made of a folder a moment ago: to have it as it is, is something


class Piece(NamedTuple):
    """One tensor of the result. offset and padded_bytes: in the result; source_offset: in `source`."""

    target: Target
    source: Path
    source_offset: int
    offset: int
    padded_bytes: int


class Job(NamedTuple):
    """See the module."""

    name: str
    kind: str
    sources: tuple[Path, ...]
    source_bytes: int
    header: bytes
    pieces: tuple[Piece, ...]
    imatrix: ImportanceMatrix | None
    is_requantized: bool
    source_type: str
    warnings: tuple[str, ...]

    @property
    def file_bytes(self) -> int:
        return len(self.header) + sum(piece.padded_bytes for piece in self.pieces)

    @property
    def targets(self) -> list[Target]:
        return [piece.target for piece in self.pieces]

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(target.n_bytes for target in self.targets) / sum(map(_n_elements, self.targets))

    @property
    def quantized_share_of_f16(self) -> float | None:
        """Bytes of the quantized tensors over what they would take in F16."""
        quantized = [target for target in self.targets if target.type.name not in FULL_TYPES and target.why != "kept"]
        f16_bytes = sum(2 * _n_elements(target) for target in quantized)
        return sum(target.n_bytes for target in quantized) / f16_bytes if f16_bytes else None

    def peak_bytes(self, held_bytes: int, n_threads: int) -> int:
        """The most memory that it takes. held_bytes: by this process now, its importance matrix included."""
        return held_bytes + n_threads * (_BUFFER_BYTES + _THREAD_BYTES) + _READ_BACK_BYTES + 2 * len(self.header)


def job_of(path: Path, name: str, wish: Wish) -> Job:
    """Raises BadModelFile for what is no model, ConfigError for what gains nothing or is there already."""
    kind, file = file_kind(wish.kind)
    paths = tuple(shard_paths(path))
    headers = [read_header(shard) for shard in paths]
    _check_whole(headers)
    tensors = {tensor.name: (header, tensor) for header in headers for tensor in header.tensors}
    found = targets(
        [tensor for _, tensor in tensors.values()],
        sizes_of(headers[0].metadata, path),
        kind,
        embeddings=wish.embeddings,
        head=wish.head,
        has_imatrix=wish.imatrix is not None,
    )
    source_type = _main_type(found)
    if not wish.is_exported and all(target.type == target.own_type for target in found):
        raise ConfigError(f"'{name}' is {kind} already: there is nothing to do.", param="to")
    is_requantized = _check_gain(name, kind, found, source_type, wish.requantizes)
    for target in found:
        if target.type != target.own_type and not can_read(target.own_type):
            raise BadModelFile(f"{path}: {target.tensor.name} is {target.own_type.name}, which cannot be converted.")
    output = GgufOutput(list(paths))
    try:
        output.put({"general.quantization_version": QUANTIZATION_VERSION, "general.file_type": file.file_type})
        if wish.chat_template is not None:
            output.put({"tokenizer.chat_template": wish.chat_template})
        if wish.imatrix is not None:
            output.put({"quantize.imatrix.file": wish.imatrix_note})
            output.put({"quantize.imatrix.entries_count": len(wish.imatrix.tensors)})
            output.put({"quantize.imatrix.chunks_count": wish.imatrix.n_chunks})
        for target in found:
            output.add(target.tensor.name, target.type)
        header = output.header()
        pieces = []
        for target in found:
            source, tensor = tensors[target.tensor.name]
            offset, n_bytes, padded = output.place(tensor.name)
            if n_bytes != target.n_bytes:
                raise BadModelFile(f"{path}: llama.cpp gives {tensor.name} {n_bytes} bytes, not {target.n_bytes}.")
            start = source.data_offset + tensor.offset
            pieces.append(Piece(target, source.path, start, len(header) + offset, padded))
    finally:
        output.close()
    return Job(
        name=name,
        kind=kind,
        sources=paths,
        source_bytes=sum(header.file_bytes for header in headers),
        header=header,
        pieces=tuple(pieces),
        imatrix=wish.imatrix,
        is_requantized=is_requantized,
        source_type=source_type,
        warnings=tuple(_warnings(name, kind, found, is_requantized, source_type, wish.imatrix)),
    )


def _check_whole(headers: Sequence[GgufHeader]) -> None:
    """All shards of a split model, and each of it."""
    first = headers[0]
    count = first.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1 and count != len(headers):
        raise BadModelFile(
            f"{first.path}: one of {count} parts of a split model, of which {len(headers)} are named as llama.cpp "
            f"names them (NAME-00001-of-{count:05d}.gguf)."
        )
    if len(headers) > 1:
        names = [tensor.name for header in headers for tensor in header.tensors]
        if any(header.metadata.get("split.no") != number for number, header in enumerate(headers)) or (
            len(names) != len(set(names)) or first.metadata.get("split.tensors.count", len(names)) != len(names)
        ):
            raise BadModelFile(f"{first.path}: its {len(headers)} parts are not those of one model, in their order.")
    if first.metadata.get("general.type", "model") != "model" or not any(header.tensors for header in headers):
        raise BadModelFile(f"{first.path}: a GGUF file, but of no model: general.type is {_type_of(first)!r}.")


def _type_of(header: GgufHeader) -> object:
    return header.metadata.get("general.type", "model")


def _n_elements(target: Target) -> int:
    return target.own_type.block * (target.tensor.n_bytes // target.own_type.block_bytes)


def _main_type(found: Sequence[Target]) -> str:
    """The type that most bytes of the source's matrices are in."""
    sizes: Counter[str] = Counter()
    for target in found:
        sizes[target.own_type.name] += 0 if target.is_protected else target.tensor.n_bytes
    return sizes.most_common(1)[0][0]


def _check_gain(name: str, kind: str, found: Sequence[Target], source_type: str, is_wanted: bool) -> bool:
    """Whether tensors are quantized a second time. Raises ConfigError where that was not asked for."""
    again = [
        target
        for target in found
        if target.own_type.name not in FULL_TYPES and target.type != target.own_type and not target.is_protected
    ]
    if not again or is_wanted:
        return bool(again)
    before, after = (sum(sizes) for sizes in zip(*((t.tensor.n_bytes, t.n_bytes) for t in found), strict=True))
    if after >= before:
        raise ConfigError(
            f"'{name}' is {source_type} already: {kind} gains nothing from it. The file grows from {size_text(before)} "
            f"to {size_text(after)}, and what {source_type} lost stays lost; quantize its F16 or F32 instead. "
            "--requantize does it all the same.",
            param="to",
        )
    raise ConfigError(
        f"'{name}' is {source_type} already: the losses of {source_type} and of {kind} would add up; quantize its F16 "
        "or F32 instead. --requantize does it all the same.",
        param="to",
    )


def _warnings(
    name: str,
    kind: str,
    found: Sequence[Target],
    is_requantized: bool,
    source_type: str,
    imatrix: ImportanceMatrix | None,
) -> list[str]:
    said = []
    if is_requantized:
        said.append(f"'{name}' was {source_type} already: the losses of both add up.")
    for target in found:
        if target.is_protected and target.own_type != target.type:
            said.append(
                f"{target.tensor.name} is {target.own_type.name} in the source: it is kept at F32, but what it lost "
                "before stays lost."
            )
    fallbacks = Counter(
        (target.wanted.name, target.type.name, target.tensor.shape[0]) for target in found if target.why == "fallback"
    )
    for (wanted, got, n_columns), count in sorted(fallbacks.items()):
        said.append(f"{count} tensors are {got}, not {wanted}: rows of {n_columns} are no whole number of its blocks.")
    if imatrix is not None:
        said += _imatrix_warnings(found, imatrix)
    return said


def _imatrix_warnings(found: Sequence[Target], imatrix: ImportanceMatrix) -> list[str]:
    unseen: dict[tuple[str, tuple[int, ...]], None] = {}
    missing = []
    for target in found:
        importance = imatrix.tensors.get(target.tensor.name)
        if target.type.name in FULL_TYPES or target.is_protected:
            continue
        if importance is None:
            if target.tensor_class not in ("embeddings", "head"):
                missing.append(target.tensor.name)
            continue
        n_matrices = target.tensor.shape[2] if len(target.tensor.shape) > 2 else 1
        if len(importance.values) != target.tensor.shape[0] * n_matrices:
            raise ConfigError(
                f"The importance matrix is of another model: it has {len(importance.values)} values for "
                f"{target.tensor.name}, which takes {target.tensor.shape[0] * n_matrices}."
            )
        if importance.unseen_experts:
            layer = re.match(r"blk\.\d+", target.tensor.name)
            unseen[(layer[0] if layer else target.tensor.name, importance.unseen_experts)] = None
    said = [
        f"{layer}: the calibration text reached no token of {'expert' if len(experts) == 1 else 'experts'} "
        f"{', '.join(map(str, experts))}: their columns count alike."
        for layer, experts in unseen
    ]
    if others := sorted(set(imatrix.tensors) - {target.tensor.name for target in found}):
        said.append(
            f"The importance matrix has {len(others)} tensors that the model has not, such as {others[0]}: "
            "is it of this model?"
        )
    if missing:
        said.append(f"The importance matrix has nothing on {len(missing)} tensors: {', '.join(missing[:5])}.")
    return said
