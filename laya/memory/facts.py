"""Owns: what a plan needs of a model: its shape, and the sums over its tensor table and vocabulary.

Made from the headers of all files of a model, or, before a download, from a shape and a size. Knows no settings.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from laya.errors import BadModelFile
from laya.memory.gguf import ArrayInfo, GgufHeader, TensorInfo, read_header
from laya.memory.gguf_shape import read_shape
from laya.memory.shape import ModelShape
from laya.memory.sizing import even_groups, matrix_bytes_of_size
from laya.memory.weights import INPUT_LAYER, WeightGroup
from laya.memory.work import Matrices, matrices_of

REPACK_ROWS = 8  # llama.cpp repacks a matrix whose rows divide into groups of this many
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
# Read row by row from host memory, whatever lies on a GPU; of the rest without a layer, the output is one of its own.
_INPUT = re.compile(r"token_embd|token_types|position_embd|per_layer_token_embd|ple_|altup_")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(r"\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a plan. Bytes unless the name says otherwise."""

    shape: ModelShape
    weights_bytes: int  # all tensors
    matrix_bytes: dict[str, int]  # type -> what matrix products read and an engine may therefore copy
    tied_output: tuple[str, int] | None  # type and bytes of an embedding that is the output matrix too
    groups: tuple[WeightGroup, ...] = ()  # the same bytes as `weights_bytes`, by layer
    n_ff_matrices: int  # of a dense feed-forward layer: 3 with a gate, 2 without, 0 where there is none
    n_tensors: int
    n_tokens: int
    n_merges: int
    vocabulary_bytes: int  # text of the tokens
    matrices: tuple[Matrices, ...] = ()  # what a token is multiplied with; () = not known in detail


def read_facts(path: Path) -> ModelFacts:
    """The facts of the model at `path`, the first file of a split one. Raises BadModelFile."""
    first = read_header(path)
    return facts_of([first, *(read_header(other) for other in _other_shards(first))])


def _other_shards(first: GgufHeader) -> list[Path]:
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return []
    named = _SHARD.fullmatch(first.path.name)
    if named is None or int(named[3]) != count:
        raise BadModelFile(
            f"{first.path} is one of {count} files; their names must end in -00001-of-{count:05d}.gguf.", param="model"
        )
    if int(named[2]) != 1:
        raise BadModelFile(f"{first.path} is not the first of its {count} files; name that one.", param="model")
    return [first.path.with_name(f"{named[1]}-{number:05d}-of-{named[3]}.gguf") for number in range(2, count + 1)]


def facts_of(headers: Sequence[GgufHeader]) -> ModelFacts:
    """The facts of a model from the headers of its files, the first one with the metadata."""
    first = headers[0]
    tensors = [tensor for header in headers for tensor in header.tensors]
    if not tensors:
        raise BadModelFile(f"{first.path} holds no tensors: it is a vocabulary, not a model.", param="model")
    embedding = next((tensor for tensor in tensors if tensor.name == _EMBEDDING), None)
    is_tied = embedding is not None and all(tensor.name != _OUTPUT for tensor in tensors)
    matrix_bytes: dict[str, int] = {}
    for tensor in tensors:
        if is_matrix(tensor) and (tensor.name != _EMBEDDING or is_tied):
            matrix_bytes[tensor.type_name] = matrix_bytes.get(tensor.type_name, 0) + tensor.n_bytes
    shape = read_shape(first.path, first.metadata)
    tokens = first.metadata.get("tokenizer.ggml.tokens")
    merges = first.metadata.get("tokenizer.ggml.merges")
    return ModelFacts(
        shape=shape,
        weights_bytes=sum(tensor.n_bytes for tensor in tensors),
        matrix_bytes=matrix_bytes,
        tied_output=(embedding.type_name, embedding.n_bytes) if embedding is not None and is_tied else None,
        groups=_groups(tensors, shape.n_layer),
        n_ff_matrices=_n_ff_matrices(tensors),
        n_tensors=len(tensors),
        n_tokens=tokens.length if isinstance(tokens, ArrayInfo) else 0,
        n_merges=merges.length if isinstance(merges, ArrayInfo) else 0,
        vocabulary_bytes=tokens.content_bytes if isinstance(tokens, ArrayInfo) else 0,
        matrices=matrices_of(tensors),
    )


def _groups(tensors: Iterable[TensorInfo], n_layer: int) -> tuple[WeightGroup, ...]:
    sizes: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        layer = int(block[1]) if block else INPUT_LAYER if _INPUT.match(tensor.name) else n_layer
        sizes[layer, bool(_EXPERT.search(tensor.name))].append(tensor.n_bytes)
    return tuple(WeightGroup(*key, sum(group), max(group)) for key, group in sorted(sizes.items()))


def _n_ff_matrices(tensors: Sequence[TensorInfo]) -> int:
    """3 with a gate (also where gate and up are one matrix, twice as wide as down), 2 without, 0 with experts only."""
    shapes = {tensor.name: tensor.shape for tensor in tensors if "ffn_" in tensor.name and len(tensor.shape) == 2}
    if any(name.endswith("ffn_gate.weight") for name in shapes):
        return 3
    ups = [name for name in shapes if name.endswith("ffn_up.weight")]
    downs = [shapes.get(name.replace("ffn_up", "ffn_down")) for name in ups]
    fused = any(down is not None and shapes[up][1] == 2 * down[0] for up, down in zip(ups, downs, strict=True))
    return 3 if fused else 2 if ups else 0


def is_matrix(tensor: TensorInfo) -> bool:
    """Whether an engine may repack this tensor: two dimensions or more, rows in whole groups."""
    return len(tensor.shape) > 1 and tensor.shape[1] % REPACK_ROWS == 0


def facts_before_download(shape: ModelShape, file_bytes: int, weights_type: str) -> ModelFacts:
    """Facts of a file that is not here yet: an upper bound where only its header would tell.

    weights_type: what most weights are in, e.g. "Q4_K"; how many of them are, the file's size tells.
    """
    return ModelFacts(
        shape=shape,
        weights_bytes=file_bytes,
        matrix_bytes={weights_type: matrix_bytes_of_size(shape, file_bytes, weights_type)},
        tied_output=None,
        groups=even_groups(shape, file_bytes),
        n_ff_matrices=3,
        n_tensors=14 * shape.n_layer + 3,
        n_tokens=shape.n_vocab,
        n_merges=2 * shape.n_vocab,
        vocabulary_bytes=10 * shape.n_vocab,
    )
