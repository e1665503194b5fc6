"""Owns: the shape of a model from its config.json, by way of the metadata its GGUF would have.

A config's figures are put under GGUF's keys, as a conversion would put them, and read by the one reader there is: so
the same families, rows and formulas price both. What no table knows becomes an upper bound, marked. Knows no weights.
Sources: llama.cpp's converters and the models' own configs; see docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from laya.memory.gguf_checks import STATE_KEYS
from laya.memory.gguf_shape import read_shape
from laya.memory.hf_checks import WITHOUT_HEADS, check_figures, is_latent
from laya.memory.hf_config import MAX_LAYERS, HfConfig
from laya.memory.hf_names import (
    ARCHITECTURES,
    FIGURES,
    NO_CACHE_WORDS,
    STATE_WORDS,
    WINDOW_WORDS,
)
from laya.memory.shape import ModelShape

IMAGE_TOKENS = 4 * 1601  # that cross attention keeps of an image: four tiles
UNTOLD_CONTEXT = 1 << 20  # of models without a longest input, and of those whose config is silent
_SCALES_ROPE = frozenset({"dynamic", "linear", "llama3", "longrope", "ntk", "su", "yarn"})
# Latent attention that both engines run with whole keys and values.
_EXPANDED_LATENT = frozenset({"minicpm3", "plm"})
_STATE_SIZE = ("mamba_d_state", "ssm_state_size", "state_size", "d_state")
_CONV = ("mamba_d_conv", "conv_kernel", "d_conv", "mamba_conv_kernel")
_PATTERN_CHARS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def architecture_of(config: HfConfig) -> str:
    """llama.cpp's name of the architecture; its own where there is none."""
    return ARCHITECTURES.get(config.model_type) or config.model_type.replace("/", "-")


def shape_of(config: HfConfig) -> ModelShape:
    """The shape a config describes. Raises BadModelFile naming the key that is missing or impossible."""
    architecture = architecture_of(config)
    metadata = {f"{architecture}.{key}": value for key, value in _figures(config, architecture) if value is not None}
    check_figures(config, architecture)
    heads = metadata.get(f"{architecture}.attention.head_count_kv")
    if heads in (0, (0,) * n_layers(config)) and not any(f"{architecture}.{key}" in metadata for key in STATE_KEYS):
        config.fail("is corrupt: it leaves no layer to attention, and no key says how wide another state is")
    shape = read_shape(Path(f"{config.name}: config.json"), {"general.architecture": architecture, **metadata})
    crossed = set(config.numbers("cross_attention_layers") or ())
    if not crossed:
        return shape
    # Counted beside a cache of their own, which no engine gives them: an upper bound.
    rows = (
        msgspec.structs.replace(row, n_cross=IMAGE_TOKENS) if il in crossed else row
        for il, row in enumerate(shape.layers)
    )
    return msgspec.structs.replace(shape, layers=tuple(rows))


def n_layers(config: HfConfig) -> int:
    return config.number(*FIGURES["block_count"], least=1, most=MAX_LAYERS)


def layer_words(config: HfConfig, n_layer: int) -> tuple[str, ...] | None:
    """What each layer is, in the words of `layer_types`, or None where all are alike or only their kind says."""
    told = config.texts("layer_types", "layers_block_type", "block_types")
    drawn = config.get("hybrid_override_pattern")
    if isinstance(drawn, str):
        told = tuple(_PATTERN_CHARS.get(char, char) for char in drawn)
    told = told or _words_by_numbers(config, n_layer)
    if told is None:
        return None
    if len(told) < n_layer:
        config.fail(f"is corrupt: it says what {len(told)} of {n_layer} layers are")
    return tuple(word.lower() for word in told[:n_layer])


def _words_by_numbers(config: HfConfig, n_layer: int) -> tuple[str, ...] | None:
    """The same from lists of numbers and periods, which older configs have."""
    full: set[int] | None = None
    other = "linear_attention"
    kinds = config.numbers("attn_type_list")  # MiniMax: 1 = softmax
    if kinds is not None:
        return tuple("full_attention" if kind == 1 else other for kind in kinds)
    told = config.numbers("hybrid_layer_pattern", "sliding_window_layout")  # MiMo, SmallThinker: 1 = a window
    if told is not None:
        return tuple("sliding_attention" if mark else "full_attention" for mark in told)
    linear = config.part("linear_attn_config").get("full_attn_layers")  # Kimi: counted from 1
    if isinstance(linear, list):
        full = {number - 1 for number in linear if isinstance(number, int)}
    elif config.has("attn_layer_indices", "full_attn_idxs"):
        full = set(config.numbers("attn_layer_indices", "full_attn_idxs") or ())
        other = "conv" if config.has("full_attn_idxs") else "mamba"
    elif config.has("attn_layer_period"):  # Jamba
        period = config.number("attn_layer_period", least=1)
        offset = config.number("attn_layer_offset", default=0, most=period - 1)
        full, other = {il for il in range(n_layer) if il % period == offset}, "mamba"
    elif config.has("mamba_step"):  # PLaMo 2
        step = max(2, config.number("mamba_step", least=1))
        last = n_layer <= step // 2
        full = {il for il in range(n_layer) if (il == n_layer - 1 if last else il % step == step // 2)}
        other = "mamba"
    return None if full is None else tuple("attention" if il in full else other for il in range(n_layer))


def _figures(config: HfConfig, architecture: str) -> Iterator[tuple[str, Any]]:
    """GGUF's keys and values, those without a value as None."""
    n_layer = n_layers(config)
    n_nextn = config.number(*FIGURES["nextn_predict_layers"], default=0, most=MAX_LAYERS)
    n_embd = config.number(*FIGURES["embedding_length"], least=1)
    words = layer_words(config, n_layer)
    yield "block_count", n_layer + n_nextn
    yield "nextn_predict_layers", n_nextn
    yield "embedding_length", n_embd
    yield "embedding_length_per_layer_input", config.number("hidden_size_per_layer_input", default=0)
    yield "vocab_size", config.number(*FIGURES["vocab_size"], default=0, least=1)
    yield "context_length", config.number(*FIGURES["context_length"], default=UNTOLD_CONTEXT, least=1, most=1 << 40)
    yield from _rope(config)
    yield from _feed_forward(config, n_embd)
    yield from _heads(config, architecture, n_layer, n_embd, words)
    yield from _windows(config, words)
    yield from _state(config, n_embd)
    if words is not None and any(word in STATE_WORDS for word in words):
        yield "attention.recurrent_layers", tuple(word in STATE_WORDS for word in words)
    yield "full_attention_interval", config.number("full_attention_interval", default=0, least=1, most=n_layer) or None
    yield "attention.shared_kv_layers", config.number("num_kv_shared_layers", default=0, most=n_layer - 1)


def _rope(config: HfConfig) -> Iterator[tuple[str, Any]]:
    scaling = config.part("rope_scaling") or config.part("rope_parameters")
    kind = scaling.get("rope_type", scaling.get("type"))
    yield "rope.scaling.type", kind if isinstance(kind, str) and kind in _SCALES_ROPE else None


def _feed_forward(config: HfConfig, n_embd: int) -> Iterator[tuple[str, Any]]:
    n_expert = config.number(*FIGURES["expert_count"], default=0, is_per_layer=True)
    n_ff = dense_width(config, n_embd)
    yield "feed_forward_length", n_ff
    if not n_expert:
        return
    expert = config.number(
        *FIGURES["expert_feed_forward_length"], *FIGURES["feed_forward_length"], default=n_ff, least=1,
        is_per_layer=True,
    )  # fmt: skip
    yield "expert_count", n_expert
    yield "expert_used_count", min(n_expert, config.number(*FIGURES["expert_used_count"], default=1, is_per_layer=True))
    yield "expert_feed_forward_length", expert
    n_shared = config.number(
        *FIGURES["expert_shared_count"], default=int(config.model_type.startswith("llama4")), is_per_layer=True
    )
    shared = config.number(*FIGURES["expert_shared_feed_forward_length"], default=0, is_per_layer=True)
    yield "expert_shared_feed_forward_length", max(shared, n_shared * expert)


def dense_width(config: HfConfig, n_embd: int) -> int:
    """Width of the feed-forward of a layer without experts, the widest where they differ."""
    if config.has("intermediate_size_mlp"):  # Llama 4: the other key is the experts'
        return config.number("intermediate_size_mlp", least=1)
    if config.has("block_ff_dim"):  # LFM2 says the width before it is adjusted
        width = config.number("block_ff_dim", least=1)
        if config.flag("block_auto_adjust_ff_dim", default=True):
            step = max(1, config.number("block_multiple_of", default=256))
            factor = config.get("block_ffn_dim_multiplier")
            width = int((factor if isinstance(factor, (int, float)) else 1) * int(2 * width / 3))
            width = -(-width // step) * step
        return width
    if config.model_type == "qwen":  # counts gate and up together
        return config.number("intermediate_size") // 2
    factors = config.get("ffn_multipliers", "expansion_ratio")
    if factors is not None and not config.has(*FIGURES["feed_forward_length"]):
        widest = max(factors) if isinstance(factors, list) and factors else factors
        return -(-round(float(widest) * n_embd) // 256) * 256 if isinstance(widest, (int, float)) else 4 * n_embd
    has_experts = config.has(*FIGURES["expert_feed_forward_length"]) and config.has(*FIGURES["expert_count"])
    return config.number(*FIGURES["feed_forward_length"], default=0 if has_experts else 4 * n_embd, is_per_layer=True)


def _heads(
    config: HfConfig, architecture: str, n_layer: int, n_embd: int, words: tuple[str, ...] | None
) -> Iterator[tuple[str, Any]]:
    if architecture in WITHOUT_HEADS:
        yield "attention.head_count_kv", 0
        return
    n_head = config.numbers(*FIGURES["attention.head_count"]) or config.number(*FIGURES["attention.head_count"])
    if isinstance(n_head, tuple) and len(n_head) < n_layer:
        config.fail(f"is corrupt: it gives heads of {len(n_head)} of {n_layer} layers")
    most = max(n_head) if isinstance(n_head, tuple) else n_head
    yield "attention.head_count", n_head
    width = config.number(*FIGURES["head_dim"], default=max(1, n_embd // max(1, most)), least=1)
    is_compressed = is_latent(config) and architecture not in _EXPANDED_LATENT
    n_head_kv = (1,) * n_layer if is_compressed else _kv_heads(config, n_layer, n_head)
    if config.has("swa_num_key_value_heads") and words is not None:  # MiMo: more heads where there is a window
        windowed = config.number("swa_num_key_value_heads", least=1)
        n_head_kv = tuple(windowed if word in WINDOW_WORDS else n for word, n in zip(words, n_head_kv, strict=True))
    if config.has("global_head_dim"):  # Gemma 4: the layers that see everything have wider heads, and fewer
        n_full = config.number("num_global_key_value_heads", default=0)
        is_full = [word not in WINDOW_WORDS for word in words or ("full",) * n_layer]
        n_head_kv = tuple(n_full or heads if full else heads for heads, full in zip(n_head_kv, is_full, strict=True))
        yield "attention.key_length_swa", width
        yield "attention.value_length_swa", width
        width = config.number("global_head_dim", least=1)
    if words is not None:
        n_head_kv = tuple(
            0 if word in STATE_WORDS | NO_CACHE_WORDS else heads for word, heads in zip(words, n_head_kv, strict=True)
        )
    yield "attention.head_count_kv", n_head_kv
    if is_latent(config):
        yield from _latent(config, architecture, width)
    else:
        yield "attention.key_length", width
        yield "attention.value_length", config.number("v_head_dim", default=0) or width


def _kv_heads(config: HfConfig, n_layer: int, n_head: int | tuple[int, ...]) -> tuple[int, ...]:
    """KV heads of each layer."""
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and isinstance(n_head, int) and len(blocks) >= n_layer:  # Nemotron NAS
        parts = [block.get("attention") or {} if isinstance(block, dict) else {} for block in blocks[:n_layer]]
        groups = [part.get("n_heads_in_group") for part in parts]
        return tuple(n_head // group if isinstance(group, int) and group > 0 else 0 for group in groups)
    is_one = config.flag("multi_query") and not config.flag("new_decoder_architecture")
    told = config.numbers(*FIGURES["attention.head_count_kv"])
    if told is None and is_one:
        told = (1,) * n_layer
    if told is None and config.has(*FIGURES["attention.head_count_kv"]):
        told = (config.number(*FIGURES["attention.head_count_kv"]),) * n_layer
    if told is None:
        told = n_head if isinstance(n_head, tuple) else (n_head,) * n_layer
    if len(told) < n_layer:
        config.fail(f"is corrupt: it gives KV heads of {len(told)} of {n_layer} layers")
    return told[:n_layer]


def _latent(config: HfConfig, architecture: str, width: int) -> Iterator[tuple[str, Any]]:
    """Latent attention: one compressed row a token, or whole keys and values where no engine compresses."""
    rank, rope = config.number("kv_lora_rank", least=1), config.number("qk_rope_head_dim", least=1)
    key = config.number("qk_nope_head_dim", default=max(0, width - rope)) + rope
    value = config.number("v_head_dim", default=width, least=1)
    yield "attention.kv_lora_rank", rank
    if architecture in _EXPANDED_LATENT:
        yield "attention.key_length", key
        yield "attention.value_length", value
        return
    yield "attention.key_length", rank + rope
    yield "attention.value_length", rank
    yield "attention.key_length_mla", key
    yield "attention.value_length_mla", value
    for part, name in (("key_length", "index_head_dim"), ("head_count", "index_n_heads"), ("top_k", "index_topk")):
        yield f"attention.indexer.{part}", config.number(name, default=0, least=1) or None


def _windows(config: HfConfig, words: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    if config.get("use_sliding_window") is False:
        return
    window = config.number("attention_chunk_size", "sliding_window", "sliding_window_size", default=0, most=1 << 40)
    yield "attention.sliding_window", window or None
    if words is not None and any(word in WINDOW_WORDS for word in words):
        yield "attention.sliding_window_pattern", tuple(word in WINDOW_WORDS for word in words)
    else:
        yield "attention.sliding_window_pattern", config.get("sliding_window_pattern")


def _state(config: HfConfig, n_embd: int) -> Iterator[tuple[str, Any]]:
    """The widths of recurrent layers, by which keys are there."""
    kda = config.part("linear_attn_config")
    if config.has("linear_num_value_heads"):  # gated delta net
        yield "ssm.conv_kernel", config.number("linear_conv_kernel_dim", default=4, least=1)
        yield "ssm.state_size", config.number("linear_key_head_dim", least=1)
        yield "ssm.group_count", config.number("linear_num_key_heads", least=1)
        heads = config.number("linear_num_value_heads", least=1)
        yield "ssm.inner_size", config.number("linear_value_head_dim", least=1) * heads
    elif kda:
        yield "ssm.conv_kernel", kda.get("short_conv_kernel_size", 4)
        yield "kda.head_dim", kda.get("head_dim")
    elif config.has("conv_L_cache"):
        yield "shortconv.l_cache", config.number("conv_L_cache", least=1)
    elif config.model_type.startswith("rwkv"):
        yield "wkv.head_size", config.number("head_size", "head_dim", default=64, least=1)
    elif config.has(*_STATE_SIZE):
        yield from _mamba(config, n_embd)


def _mamba(config: HfConfig, n_embd: int) -> Iterator[tuple[str, Any]]:
    heads = config.number("mamba_num_heads", "mamba_n_heads", default=0)
    head = config.number("mamba_head_dim", "mamba_d_head", "hidden_size_per_head", default=0)
    if config.model_type in ("mamba", "mamba2"):
        heads, head = config.number("num_heads", default=0), config.number("head_dim", default=0)
    wide = config.number("mamba_expand", "expand", default=2, least=1) * n_embd
    inner = config.number("mamba_d_ssm", "d_inner", "mamba_intermediate_size", default=heads * head or wide)
    if config.model_type == "mamba":
        inner = config.number("intermediate_size", default=wide, least=1)
    yield "ssm.inner_size", inner
    yield "ssm.conv_kernel", config.number(*_CONV, default=4, least=1)
    yield "ssm.state_size", config.number(*_STATE_SIZE, least=1)
    yield "ssm.group_count", config.number("mamba_n_groups", "n_groups", "mamba_ngroups", default=0)
