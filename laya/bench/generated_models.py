"""Owns: models of any shape for benches and tests, made when they are needed.

    path = generate(folder / "moe.gguf", SHAPES["moe"], vocabulary=smollm2_path)

The engine loads them like any other: they have a real vocabulary and chat template, and weights that mean nothing.
They stand for real models of their shape in memory and in speed, never in what they say. About 100 MB of weights are
written in a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from laya.bench.generated_families import FAMILIES, GeneratedShape, layer_rows, metadata
from laya.bench.random_gguf import WEIGHT_TYPES, Tensor, write_gguf
from laya.errors import BadModelFile, ConfigError, nearest
from laya.memory import read_header
from laya.memory.gguf import ArrayInfo

FORM = 2  # raised when the same shape would be written differently

# Few active parameters and a cache that outweighs what a process takes anyway: long contexts are driven in seconds.
SHAPES = {
    "dense": GeneratedShape(n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_ff=1536, weights="Q4_0"),
    "moe": GeneratedShape(
        architecture="qwen3moe", n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_expert=32, n_expert_used=4,
        n_ff_expert=256,
    ),
    "window": GeneratedShape(
        architecture="gemma3", n_layer=12, n_embd=512, n_head=4, n_head_kv=4, n_ff=1024, sliding_window=512
    ),
    "oss": GeneratedShape(
        architecture="gpt-oss", n_layer=8, n_embd=512, n_head=8, n_head_kv=2, n_expert=16, n_expert_used=4,
        n_ff_expert=256, sliding_window=128, output_weights="Q8_0",
    ),
    "latent": GeneratedShape(
        architecture="deepseek2", n_layer=6, n_embd=512, n_head=4, head_dim=128, n_ff=1024, n_expert=16,
        n_expert_used=2, n_ff_expert=256, kv_lora_rank=256, q_lora_rank=256, rope_dim=64,
    ),
    "delta": GeneratedShape(
        architecture="qwen35", n_layer=8, n_embd=512, n_head=4, n_head_kv=2, head_dim=128, n_ff=1536, state_size=64,
        n_state_head=8, n_state_group=4,
    ),
    "long": GeneratedShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=512),
}  # fmt: skip


def generate(path: Path, shape: GeneratedShape, *, vocabulary: Path, seed: int = 0) -> Path:
    """Write a GGUF model of this shape to `path` and return it; the same arguments write the same bytes.

    vocabulary: a GGUF file whose tokenizer and chat template it gets. Raises ConfigError for an architecture or
    weight type it cannot write, BadModelFile for a vocabulary it cannot read.
    """
    for value, known in ((shape.architecture, FAMILIES), (shape.weights, WEIGHT_TYPES)):
        if value not in known:
            close = nearest(value, known) or ", ".join(known)
            raise ConfigError(f"No model of {value!r} can be generated; the nearest is {close}.", param="shape")
    tokens = read_header(vocabulary).metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, ArrayInfo):
        raise BadModelFile(f"{vocabulary} holds no vocabulary.", param="vocabulary")
    write_gguf(path, metadata(shape), list(_tensors(shape, tokens.length)), vocabulary=vocabulary, seed=seed)
    return path


def generated(name: str, *, vocabulary: Path, folder: Path | None = None) -> Path:
    """The model SHAPES[name], made once and kept in `folder`, by default the user's cache."""
    folder = folder or platformdirs.user_cache_path("laya", appauthor=False) / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    source = f"{FORM} {shape} {vocabulary.stat().st_size}"
    path = folder / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:12]}.gguf"
    return path if path.exists() else generate(path, shape, vocabulary=vocabulary)


def _tensors(shape: GeneratedShape, n_vocab: int) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (shape.n_embd, n_vocab), shape.weights)
    if shape.output_weights is not None:
        yield Tensor("output.weight", (shape.n_embd, n_vocab), shape.output_weights)
    yield Tensor("output_norm.weight", (shape.n_embd,), "F32", 1.0)
    for layer in range(shape.n_layer):
        for row in layer_rows(shape, layer):
            kind = row.type_name or ("F32" if len(row.shape) == 1 else shape.weights)
            yield Tensor(f"blk.{layer}.{row.name}", row.shape, kind, 1.0 if row.is_norm else None)
