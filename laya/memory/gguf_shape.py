"""Owns: reading a model's shape from GGUF metadata, with the defaults llama.cpp uses.

Every fault names the file and the key. Knows no bytes and no settings. Sources of the keys: llama.cpp's loaders; see
docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from laya.memory import families
from laya.memory.families import RECURRENT, WINDOWS
from laya.memory.ggml import FILE_TYPES
from laya.memory.gguf import ArrayInfo
from laya.memory.gguf_checks import check_counts
from laya.memory.keys import MAX_LAYERS, Keys
from laya.memory.layers import LayerShape, RecurrentShape, attention_layers, pattern, windowed, with_recurrent
from laya.memory.shape import ModelShape

POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}


def read_shape(path: Path, metadata: Mapping[str, Any]) -> ModelShape:
    """The shape a GGUF header describes. Raises BadModelFile naming a key that is missing or impossible."""
    keys = Keys(path, metadata)
    if keys.architecture in ("clip", "mmproj"):
        keys.fail("is a projector, not a language model; it goes with one as mmproj")
    figures = _figures(keys)
    check_counts(keys, figures)
    pooling = keys.get("pooling_type")
    return msgspec.structs.replace(
        figures,
        layers=_with_state(keys, _attention(keys, figures), figures),
        has_rope_scaling=_has_rope_scaling(keys),
        bound=_bound(keys),
        is_causal=_is_causal(keys),
        pooling=POOLING.get(pooling) if isinstance(pooling, int) else None,
        chat_template=_text(metadata.get("tokenizer.chat_template")),
        file_type=FILE_TYPES.get(metadata.get("general.file_type", -1), "unknown"),
        name=_text(metadata.get("general.name")),
    )


def _figures(keys: Keys) -> ModelShape:
    """The counts and widths of the graph, with the defaults of llama.cpp."""
    n_all = keys.number("block_count", least=1, most=MAX_LAYERS)
    n_nextn = keys.number("nextn_predict_layers", 0, most=max(n_all - 1, 0))
    n_layer = n_all - n_nextn
    n_head = keys.per_layer("attention.head_count", n_layer, (1,) * n_layer)
    n_embd = keys.number("embedding_length", least=1)
    head_dim = n_embd // max(1, *n_head) if n_head else n_embd
    n_ff = keys.number("feed_forward_length", 0)
    n_ff_expert = keys.number("expert_feed_forward_length", n_ff if keys.has("expert_count") else 0)
    n_ff_shared = n_ff_expert * keys.number("expert_shared_count", 0)
    head_dim_k = keys.number("attention.key_length", head_dim)
    return ModelShape(
        architecture=keys.architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=keys.per_layer("attention.head_count_kv", n_layer, n_head),
        head_dim_k=head_dim_k,
        head_dim_v=keys.number("attention.value_length", head_dim),
        n_ff=n_ff,
        n_vocab=_vocabulary(keys),
        n_ctx_train=keys.number("context_length", least=1, most=1 << 40),
        n_expert=keys.number("expert_count", 0),
        n_expert_used=keys.number("expert_used_count", 0),
        n_ff_expert=n_ff_expert,
        n_ff_shared=keys.number("expert_shared_feed_forward_length", n_ff_shared, most=1 << 32),
        n_embd_per_layer=keys.number("embedding_length_per_layer_input", 0),
        kv_lora_rank=keys.number("attention.kv_lora_rank", 0),
        head_dim_k_mla=keys.number("attention.key_length_mla", 0),
        head_dim_v_mla=keys.number("attention.value_length_mla", 0),
        n_index_head=keys.number("attention.indexer.head_count", 0),
        n_layer_nextn=n_nextn,
        recurrent=_recurrent(keys, head_dim_k),
    )


def _attention(keys: Keys, figures: ModelShape) -> tuple[LayerShape, ...]:
    """What each layer's attention keeps, as if every layer had attention."""
    # Stored compressed, the values are the first part of the keys; expanded, there are keys and values of all heads.
    is_latent = keys.architecture in families.LATENT and keys.has("attention.key_length_mla")
    layers = attention_layers(figures.n_head_kv, figures.head_dim_k, 0 if is_latent else figures.head_dim_v)
    layers = _with_windows(keys, layers)
    if keys.architecture in families.INDEXED:
        layers = _with_index(keys, layers)
    n_own = figures.n_layer - keys.number("attention.shared_kv_layers", 0, most=figures.n_layer - 1)
    n_cached = families.CACHED_LAYERS.get(keys.architecture, n_own)
    return tuple(layer if il < n_cached else LayerShape() for il, layer in enumerate(layers))


def _with_windows(keys: Keys, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    rule, n_layer = WINDOWS.get(keys.architecture), len(layers)
    if rule is None or (rule.only_n_layer is not None and n_layer != rule.only_n_layer):
        return layers
    window = keys.number("attention.sliding_window", rule.default)
    if not window:
        return layers
    told = keys.get("attention.sliding_window_pattern")
    if isinstance(told, tuple):
        marks = tuple(bool(told[il % len(told)]) for il in range(n_layer)) if told else (False,) * n_layer
    else:
        period = keys.number("attention.sliding_window_pattern", rule.period)
        marks = pattern(n_layer, period, dense_first=rule.dense_first)
    return windowed(
        layers,
        marks,
        rule.tokens or window,
        head_k=keys.optional("attention.key_length_swa"),
        head_v=keys.optional("attention.value_length_swa"),
        is_chunked=rule.is_chunked,
    )


def _with_index(keys: Keys, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """A row of the indexer's cache in each layer that has an indexer; the others reuse what an earlier one chose."""
    n_layer = len(layers)
    marks: tuple[int, ...] = (1,) * n_layer
    if keys.architecture == "glm-dsa" and keys.number("context_length", most=1 << 40) >= families.GLM_LONG_CONTEXT:
        marks = tuple(int(il < 2 or il % 4 == 2) for il in range(n_layer))
    marks = keys.per_layer("attention.indexer.types", n_layer, marks)
    width = keys.number("attention.indexer.key_length", 0)
    return tuple(layer.with_index(width) if mark else layer for layer, mark in zip(layers, marks, strict=True))


def _with_state(keys: Keys, layers: tuple[LayerShape, ...], figures: ModelShape) -> tuple[LayerShape, ...]:
    """The layers with recurrent state, in place of attention or beside it, as the architecture has it."""
    row = figures.recurrent.layer(figures.n_embd, max(figures.n_head, default=0))
    if not (row.conv or row.state):
        return layers
    n_layer, rule = len(layers), RECURRENT.get(keys.architecture)
    if rule in ("all", "beside"):
        return with_recurrent(layers, (True,) * n_layer, row, keeps_attention=rule == "beside")
    told = keys.get("attention.recurrent_layers")
    if isinstance(told, tuple) and len(told) >= n_layer:
        marks = tuple(bool(mark) for mark in told[:n_layer])
    elif rule == "interval":
        default = families.DEFAULT_INTERVAL.get(keys.architecture, families.FULL_ATTENTION_INTERVAL)
        interval = keys.number("full_attention_interval", default, least=1, most=max(n_layer, default))
        marks = tuple((il + 1) % interval != 0 for il in range(n_layer))
    elif rule == "ff":
        n_ff = keys.per_layer("feed_forward_length", n_layer, (0,) * n_layer)
        marks = tuple(not heads and not ff for heads, ff in zip(figures.n_head_kv, n_ff, strict=True))
    elif keys.architecture in families.HYBRID:
        marks = tuple(not heads for heads in figures.n_head_kv)
    else:
        return with_recurrent(layers, (True,) * n_layer, row, keeps_attention=True)
    return with_recurrent(layers, marks, row)


def _recurrent(keys: Keys, head_dim: int) -> RecurrentShape:
    return RecurrentShape(
        conv_kernel=keys.number("ssm.conv_kernel", 0),
        inner=keys.number("ssm.inner_size", 0),
        state=keys.number("ssm.state_size", 0),
        groups=0 if keys.architecture in families.UNGROUPED else keys.number("ssm.group_count", 0),
        head_size=keys.number("wkv.head_size", 0),
        token_shift=keys.number("token_shift_count", 2) if keys.has("wkv.head_size") else 0,
        l_cache=keys.number("shortconv.l_cache", 0),
        kda_head_dim=keys.number("kda.head_dim", 0),
        lightning_head_dim=head_dim if keys.architecture == "minimax-01" else 0,
    )


def _is_causal(keys: Keys) -> bool:
    return keys.architecture not in families.ENCODERS or keys.get("attention.causal") is True


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _vocabulary(keys: Keys) -> int:
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayInfo):
        return tokens.length
    return keys.number("vocab_size", 0)


def _has_rope_scaling(keys: Keys) -> bool:
    """Whether the file itself stretches positions past what it was trained on."""
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor")
    return (isinstance(kind, str) and kind != "none") or (isinstance(factor, float) and factor > 1)


# What makes a model more than dense attention, the architectures whose layout is known, and what is said of others.
_BEYOND_DENSE: tuple[tuple[tuple[str, ...], frozenset[str], str], ...] = (
    (("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim"),
     families.HYBRID | frozenset(RECURRENT), "recurrent layers: state and cache are counted for every layer"),
    (("attention.kv_lora_rank",), families.LATENT, "latent attention: the cache is counted for keys and values"),
    (("attention.sliding_window",), families.KNOWN,
     "sliding-window attention: every layer is counted at full context"),
)  # fmt: skip


def _bound(keys: Keys) -> str | None:
    """Why the plan of this model is an upper bound, or None."""
    architecture = keys.architecture
    for names, known, words in _BEYOND_DENSE:
        if architecture not in known and any(keys.get(name) not in (None, 0) for name in names):
            return f"architecture {architecture!r} is not known; {words}"
    if architecture not in families.KNOWN:
        return f"architecture {architecture!r} is not known: its buffers are counted twice"
    if architecture not in families.MEASURED:
        return f"architecture {architecture!r}: its graph was not measured, its buffers are counted twice"
    return None
