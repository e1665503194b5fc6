"""Owns: the figures of a model that decide its memory, read from GGUF metadata with the defaults llama.cpp uses.

One table says how each kind of attention is recognised and what this planner may claim for it: exact, or a named upper
bound. Knows no bytes and no settings. Sources of the keys: llama.cpp's loaders; see docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from laya.errors import BadModelFile
from laya.memory.ggml import FILE_TYPES
from laya.memory.gguf import ArrayInfo

N = TypeVar("N", int, float)

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 24  # elements of one row; also bounds every product below
# Architectures whose graph was measured: one kind of attention, dense or with experts.
_MEASURED = """
arcee baichuan bert command-r exaone falcon gemma glm4 gpt2 gptneox granite granitemoe internlm2 llama minicpm mistral3
nemotron olmo2 olmoe orion phi2 phi3 qwen2 qwen2moe qwen3 qwen3moe smollm3 stablelm starcoder2 xverse
"""
MEASURED = frozenset(_MEASURED.split())
POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}


class RecurrentShape(msgspec.Struct, frozen=True, kw_only=True):
    """The widths recurrent state is made of, 0 where a family has none."""

    conv_kernel: int = 0
    inner: int = 0
    state: int = 0
    groups: int = 0
    head_size: int = 0  # RWKV
    token_shift: int = 0  # RWKV
    l_cache: int = 0  # LFM2
    kda_head_dim: int = 0  # Kimi Linear


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs of an architecture. Counts; lengths in elements, context in tokens."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]  # per layer
    n_head_kv: tuple[int, ...]  # per layer; 0 = the layer keeps no attention cache
    head_dim_k: int
    head_dim_v: int
    n_ff: int  # of the widest layer
    n_vocab: int
    n_ctx_train: int
    has_rope_scaling: bool = False
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    recurrent: RecurrentShape = RecurrentShape()
    bound: str | None = None  # why the figures are an upper bound; None = they were measured
    is_causal: bool = True  # False: an encoder; it keeps no tokens and has no logits
    pooling: str | None = None
    chat_template: str | None = None
    file_type: str = "unknown"
    name: str | None = None

    @property
    def kv_elements(self) -> tuple[tuple[int, int], ...]:
        """Per layer, the elements one token takes in the K and in the V cache."""
        if not self.is_causal:
            return ()
        return tuple((heads * self.head_dim_k, heads * self.head_dim_v) for heads in self.n_head_kv)


class _Keys:
    """Metadata with its architecture prefix; every fault names the file and the key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            self.fail("has no general.architecture: it is no language model, or its metadata is lost")
        self.architecture: str = architecture

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def has(self, *keys: str) -> bool:
        return any(self.get(key) is not None for key in keys)

    def number(self, key: str, default: N | None = None, *, most: int = MAX_WIDTH) -> int | N:
        """A count from the metadata, the largest where it is one per layer."""
        value = self.get(key)
        if isinstance(value, tuple):
            value = max(value, default=None)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            said = "is missing" if value is None else f"is {value!r}"
            self.fail(f"is corrupt: {self.architecture}.{key} {said}")
        return value

    def per_layer(self, key: str, n_layer: int, default: tuple[int, ...]) -> tuple[int, ...]:
        """One count for each layer, from one number for all or an array."""
        value = self.get(key)
        if value is None:
            return default
        values = value if isinstance(value, tuple) else (value,) * n_layer
        if len(values) < n_layer or not all(type(each) is int and 0 <= each <= MAX_WIDTH for each in values):
            self.fail(f"is corrupt: {self.architecture}.{key} is not a count for each of {n_layer} layers")
        return tuple(values[:n_layer])

    def fail(self, what: str) -> NoReturn:
        raise BadModelFile(f"{self.path} {what}.", param="model")


def read_shape(path: Path, metadata: Mapping[str, Any]) -> ModelShape:
    """The shape a GGUF header describes. Raises BadModelFile naming a key that is missing or impossible."""
    keys = _Keys(path, metadata)
    if keys.architecture in ("clip", "mmproj"):
        keys.fail("is a projector, not a language model; it goes with one as mmproj")
    n_layer = keys.number("block_count", most=MAX_LAYERS)
    n_head = keys.per_layer("attention.head_count", n_layer, (1,) * n_layer)
    n_embd = keys.number("embedding_length")
    head_dim = n_embd // max(1, *n_head) if n_head else n_embd
    n_ff = keys.number("feed_forward_length", 0)
    pooling = keys.get("pooling_type")
    return ModelShape(
        architecture=keys.architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=keys.per_layer("attention.head_count_kv", n_layer, n_head),
        head_dim_k=keys.number("attention.key_length", head_dim),
        head_dim_v=keys.number("attention.value_length", head_dim),
        n_ff=n_ff,
        n_vocab=_vocabulary(keys),
        n_ctx_train=keys.number("context_length", most=1 << 40),
        has_rope_scaling=_has_rope_scaling(keys),
        n_expert=keys.number("expert_count", 0),
        n_expert_used=keys.number("expert_used_count", 0),
        n_ff_expert=keys.number("expert_feed_forward_length", n_ff if keys.has("expert_count") else 0),
        n_ff_shared=keys.number("expert_shared_feed_forward_length", 0),
        recurrent=_recurrent(keys),
        bound=_bound(keys),
        is_causal=keys.get("attention.causal") is not False,
        pooling=POOLING.get(pooling) if isinstance(pooling, int) else None,
        chat_template=_text(metadata.get("tokenizer.chat_template")),
        file_type=FILE_TYPES.get(metadata.get("general.file_type", -1), "unknown"),
        name=_text(metadata.get("general.name")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _vocabulary(keys: _Keys) -> int:
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayInfo):
        return tokens.length
    return keys.number("vocab_size", 0)


def _has_rope_scaling(keys: _Keys) -> bool:
    """Whether the file itself stretches positions past what it was trained on."""
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor")
    return (isinstance(kind, str) and kind != "none") or (isinstance(factor, float) and factor > 1)


def _recurrent(keys: _Keys) -> RecurrentShape:
    return RecurrentShape(
        conv_kernel=keys.number("ssm.conv_kernel", 0),
        inner=keys.number("ssm.inner_size", 0),
        state=keys.number("ssm.state_size", 0),
        groups=keys.number("ssm.group_count", 0),
        head_size=keys.number("wkv.head_size", 0),
        token_shift=keys.number("token_shift_count", 2) if keys.has("wkv.head_size") else 0,
        l_cache=keys.number("shortconv.l_cache", 0),
        kda_head_dim=keys.number("kda.head_dim", 0),
    )


# What makes a model more than dense attention, in the order it is looked for, and what the plan then says.
_BOUNDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim"),
     "recurrent layers: state and cache are counted for every layer"),
    (("attention.kv_lora_rank",), "latent attention: the cache is counted for keys and values"),
    (("attention.sliding_window",), "sliding-window attention: every layer is counted at full context"),
    (("attention.shared_kv_layers",), "layers that share a cache are counted as if each had its own"),
)  # fmt: skip
_IGNORES_WINDOW = frozenset({"llama", "phi3", "qwen2"})  # llama.cpp runs these at full context, whatever the key says


def _bound(keys: _Keys) -> str | None:
    for names, words in _BOUNDS:
        if names[0] == "attention.sliding_window" and keys.architecture in _IGNORES_WINDOW:
            continue
        if any(keys.get(name) not in (None, 0) for name in names):
            return words
    if keys.architecture not in MEASURED:
        return f"architecture {keys.architecture!r}: its graph was not measured, its buffers are counted twice"
    return None
