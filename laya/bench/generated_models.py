"""Owns: models of any shape for benches and tests: the metadata and tensor names of a few architectures.

    path = generate(folder / "moe.gguf", SHAPES["moe"], vocabulary=smollm2_path)

The engine loads them like any other: they have a real vocabulary and chat template, and weights that mean nothing.
They stand for real models of their shape in memory and in speed, never in what they say. Not committed, made when
needed: about 200 MB of weights a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import platformdirs

from laya.bench.random_gguf import WEIGHT_TYPES, Tensor, Value, write_gguf
from laya.errors import BadModelFile, ConfigError, nearest
from laya.memory import read_header
from laya.memory.gguf import ArrayInfo

FORM = 1  # raised when the same shape would be written differently
ARCHITECTURES = ("llama", "qwen3", "qwen3moe", "gemma3")


class GeneratedShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model. Widths in elements, lengths in tokens; a row must divide by the block of its type."""

    architecture: str = "llama"  # one of ARCHITECTURES
    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 768  # of a dense layer; qwen3moe has none
    n_expert: int = 0  # qwen3moe only
    n_expert_used: int = 0
    n_ff_expert: int = 0
    sliding_window: int = 0  # gemma3 only: five layers of six see this many tokens
    n_ctx_train: int = 32768
    weights: str = "Q8_0"  # one of random_gguf.WEIGHT_TYPES; norms and gates are F32
    output_weights: str | None = None  # type of an output matrix of its own; None = the embedding is the output too


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
    "long": GeneratedShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=512),
}  # fmt: skip


def generate(path: Path, shape: GeneratedShape, *, vocabulary: Path, seed: int = 0) -> Path:
    """Write a GGUF model of this shape to `path` and return it; the same arguments write the same bytes.

    vocabulary: a GGUF file whose tokenizer and chat template it gets. Raises ConfigError for an architecture or
    weight type it cannot write, BadModelFile for a vocabulary it cannot read.
    """
    for value, known in ((shape.architecture, ARCHITECTURES), (shape.weights, WEIGHT_TYPES)):
        if value not in known:
            close = nearest(value, known) or ", ".join(known)
            raise ConfigError(f"No model of {value!r} can be generated; the nearest is {close}.", param="shape")
    tokens = read_header(vocabulary).metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, ArrayInfo):
        raise BadModelFile(f"{vocabulary} holds no vocabulary.", param="vocabulary")
    write_gguf(path, _metadata(shape), list(_tensors(shape, tokens.length)), vocabulary=vocabulary, seed=seed)
    return path


def generated(name: str, *, vocabulary: Path, folder: Path | None = None) -> Path:
    """The model SHAPES[name], made once and kept in `folder`, by default the user's cache."""
    folder = folder or platformdirs.user_cache_path("laya", appauthor=False) / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    source = f"{FORM} {shape} {vocabulary.stat().st_size}"
    path = folder / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:12]}.gguf"
    return path if path.exists() else generate(path, shape, vocabulary=vocabulary)


def _metadata(shape: GeneratedShape) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 10000.0,
    }
    if shape.n_expert:
        keys |= {
            "expert_count": shape.n_expert,
            "expert_used_count": shape.n_expert_used,
            "expert_feed_forward_length": shape.n_ff_expert,
        }
    if shape.sliding_window:
        keys["attention.sliding_window"] = shape.sliding_window
    general: dict[str, Value] = {"general.architecture": shape.architecture, "general.name": "generated"}
    return general | {f"{shape.architecture}.{key}": value for key, value in keys.items()}


def _tensors(shape: GeneratedShape, n_vocab: int) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (shape.n_embd, n_vocab), shape.weights)
    if shape.output_weights is not None:
        yield Tensor("output.weight", (shape.n_embd, n_vocab), shape.output_weights)
    yield Tensor("output_norm.weight", (shape.n_embd,), "F32", 1.0)
    for layer in range(shape.n_layer):
        for name, table in _layer(shape):
            is_vector, is_gate = len(table) == 1, name == "ffn_gate_inp"
            kind = "F32" if is_vector or is_gate else shape.weights
            yield Tensor(f"blk.{layer}.{name}.weight", table, kind, 1.0 if is_vector else None)


def _layer(shape: GeneratedShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's tensors; one dimension is a norm."""
    n_embd, q, kv = shape.n_embd, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    yield from (("attn_norm", (n_embd,)), ("ffn_norm", (n_embd,)))
    yield from (
        ("attn_q", (n_embd, q)),
        ("attn_k", (n_embd, kv)),
        ("attn_v", (n_embd, kv)),
        ("attn_output", (q, n_embd)),
    )
    if shape.architecture != "llama":
        yield from (("attn_q_norm", (shape.head_dim,)), ("attn_k_norm", (shape.head_dim,)))
    if shape.architecture == "gemma3":
        yield from (("post_attention_norm", (n_embd,)), ("post_ffw_norm", (n_embd,)))
    if shape.architecture == "qwen3moe":
        experts = (n_embd, shape.n_ff_expert, shape.n_expert)
        yield from (("ffn_gate_inp", (n_embd, shape.n_expert)), ("ffn_gate_exps", experts), ("ffn_up_exps", experts))
        yield "ffn_down_exps", (shape.n_ff_expert, n_embd, shape.n_expert)
    else:
        yield from (
            ("ffn_gate", (n_embd, shape.n_ff)),
            ("ffn_up", (n_embd, shape.n_ff)),
            ("ffn_down", (shape.n_ff, n_embd)),
        )
