"""Owns: whether the figures of a config.json can be those of one model: counts beside each other, and its two objects.

A single figure out of its range is refused where it is read (hf_config.py); here are heads that do not divide, more
experts for a token than there are, positions scaled by nothing, a quantization that says no method. Knows no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from laya.memory.hf_config import MAX_WIDTH, HfConfig
from laya.memory.hf_names import FIGURES

# No head of attention in any layer.
WITHOUT_HEADS = frozenset({"mamba", "mamba2", "rwkv6", "rwkv7"})
_HEADS, _KV_HEADS = FIGURES["attention.head_count"], FIGURES["attention.head_count_kv"]
_BITS = ("bits", "w_bit", "num_bits", "nbits")
# What a quantization_config without a method has in its place: bitsandbytes, MLX, ModelOpt, compressed-tensors.
_METHODLESS = (*_BITS, "load_in_4bit", "load_in_8bit", "quant_algo", "quantization", "config_groups")


def check_figures(config: HfConfig, architecture: str) -> None:
    """Raises BadModelFile naming the key, its value and what would be right."""
    if architecture not in WITHOUT_HEADS:
        _check_heads(config)
        _check_feed_forward(config)
    _check_experts(config)
    if not isinstance(config.get("sliding_window_pattern"), list | str):
        config.number("sliding_window_pattern", default=1, least=1)
    _check_positive(config, "linear_attn_config", ("head_dim", "num_heads", "short_conv_kernel_size"))
    _check_rope(config)
    _check_quantization(config)


def is_latent(config: HfConfig) -> bool:
    """Whether its attention keeps one compressed row a token."""
    return config.has("kv_lora_rank") and config.has("qk_rope_head_dim")


def _check_heads(config: HfConfig) -> None:
    heads = _counts(config, _HEADS)
    n_embd = config.number(*FIGURES["embedding_length"], least=1)
    if not config.has(*FIGURES["head_dim"]) and max(heads) > n_embd:
        config.refuse(_HEADS, f"it must be at most the width of a row, {n_embd}, where no head_dim is told")
    if is_latent(config):
        return
    if not config.flag("multi_query"):  # Falcon: one KV head, whatever the key says
        _check_division(config, heads, _KV_HEADS)
    windowed = _counts(config, ("swa_num_attention_heads", *_HEADS))
    _check_division(config, windowed, ("swa_num_key_value_heads",))
    if config.number("num_global_key_value_heads", default=0):
        _check_division(config, heads, ("num_global_key_value_heads",))


def _counts(config: HfConfig, names: tuple[str, ...]) -> tuple[int, ...]:
    """One count for all layers, or one for each of which some may be 0."""
    counts = config.numbers(*names)
    if counts is None:
        return (config.number(*names, least=1),)
    if not any(counts):
        config.refuse(names, "some layer must have at least 1")
    return counts


def _check_division(config: HfConfig, heads: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Every KV head serves as many heads as the others."""
    if not config.has(*names):
        return
    groups = _counts(config, names)
    pairs = zip(heads * len(groups) if len(heads) == 1 else heads, groups * len(heads), strict=False)
    wrong = next(((all_, kv) for all_, kv in pairs if kv and all_ % kv), None)
    if wrong is not None:
        config.refuse(names, f"KV heads must divide the heads, and {wrong[1]} does not divide {wrong[0]}")


def _check_feed_forward(config: HfConfig) -> None:
    names = FIGURES["feed_forward_length"]
    width = config.number(*names, default=1, is_per_layer=True)
    if not width and not config.number(*FIGURES["expert_count"], default=0, is_per_layer=True):
        config.refuse(names, "without experts it must be at least 1")
    widths = config.numbers(*names)
    n_layer = config.number(*FIGURES["block_count"], least=1)
    if widths is not None and len(widths) < n_layer:
        config.refuse(names, f"a list must have one for each of {n_layer} layers")


def _check_experts(config: HfConfig) -> None:
    n_expert = config.number(*FIGURES["expert_count"], default=0, is_per_layer=True)
    if n_expert < 2:  # a dense model of a family with experts
        return
    used = FIGURES["expert_used_count"]
    if config.number(*used, default=1, least=1, is_per_layer=True) > n_expert:
        config.refuse(used, f"it must be at most the number of experts, {n_expert}")


def _check_rope(config: HfConfig) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        told = config.get(key)
        if not isinstance(told, dict) and told not in (None, False):
            config.refuse((key,), "it must be an object with rope_type and factor, or null")
        for part in _parts(told):
            _check_scaling(config, key, part)


def _parts(told: Any) -> Iterator[dict[str, Any]]:
    """An object, and those in it: some families scale each kind of layer in its own way."""
    if isinstance(told, dict):
        yield told
        yield from (part for part in told.values() if isinstance(part, dict))


def _check_scaling(config: HfConfig, key: str, scaling: dict[str, Any]) -> None:
    for name in ("factor", "original_max_position_embeddings"):
        value = scaling.get(name)
        if value is not None and not _is_positive(value):
            config.fail(f"is corrupt: {key}.{name} is {value!r}; it must be a number above 0")
    for name in ("rope_type", "type"):
        if not isinstance(scaling.get(name, ""), str | None):
            config.fail(f"is corrupt: {key}.{name} is {scaling[name]!r}; it must be a word such as 'yarn'")


def _check_quantization(config: HfConfig) -> None:
    for values in (config.values, config.outer):
        for key in ("quantization_config", "compression_config"):
            told = values.get(key)
            if told is None or told == {}:
                continue
            if not isinstance(told, dict):
                config.fail(f"is corrupt: {key} is {told!r}; it must be an object with a quant_method, or null")
            _check_method(config, key, told)


def _check_method(config: HfConfig, key: str, told: dict[str, Any]) -> None:
    method = told.get("quant_method")
    if method is None and not any(name in told for name in _METHODLESS):
        config.fail(f"is corrupt: {key} has no quant_method, so nothing says how its weights are kept")
    if method is not None and not (isinstance(method, str) and method):
        config.fail(f"is corrupt: {key}.quant_method is {method!r}; it must be a word such as 'gptq'")
    for name in _BITS:
        bits = told.get(name)
        if bits is not None and not (_is_positive(bits) and bits <= 32):
            config.fail(f"is corrupt: {key}.{name} is {bits!r}; it must be a number of bits from 1 to 32")


def _check_positive(config: HfConfig, key: str, names: tuple[str, ...]) -> None:
    """Counts within an object of the config."""
    part = config.part(key)
    for name in names:
        value = part.get(name)
        if value is not None and not (type(value) is int and 0 < value <= MAX_WIDTH):
            config.fail(f"is corrupt: {key}.{name} is {value!r}; it must be a whole number from 1 to {MAX_WIDTH}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
