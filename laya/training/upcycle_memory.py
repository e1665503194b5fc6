"""Owns: what an upcycling takes of memory and disk, worked out from the parent's shape before a tensor is read."""

from __future__ import annotations

from laya.modeling.config import LayaConfig
from laya.training.upcycled_folder import DTYPES

_FLOAT_BYTES, _DOUBLE_BYTES = 4, 8
_FIT_COPIES = 6
"""Of the training text's hidden states: before and after attention, normed, centred, a piece's own, room."""


def n_parameters(config: LayaConfig) -> int:
    layer = _attention(config) + config.num_local_experts * _block(config) + _router(config)
    return int(config.num_hidden_layers * layer + _rest(config))


def n_active_parameters(config: LayaConfig) -> int:
    """Of those, used for a token."""
    layer = _attention(config) + config.num_experts_per_tok * _block(config) + _router(config)
    return int(config.num_hidden_layers * layer + _rest(config))


def _attention(config: LayaConfig) -> int:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    wide, narrow = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return int(2 * config.hidden_size * (wide + narrow + 1))


def _router(config: LayaConfig) -> int:
    width = int((config.router_options or {})["projection_size"])
    return int(width * (config.hidden_size + config.num_local_experts))


def _block(config: LayaConfig) -> int:
    return int(3 * config.hidden_size * config.intermediate_size)


def _rest(config: LayaConfig) -> int:
    matrices = 1 if config.tie_word_embeddings else 2
    return int(config.hidden_size * (matrices * config.vocab_size + 1))


def need_bytes(
    config: LayaConfig, *, n_training_tokens: int, n_held_tokens: int, window: int, perturbs: bool, trains_experts: bool
) -> int:
    """At most, beside what this process holds already."""
    experts = config.num_local_experts * _block(config)
    layer = _FLOAT_BYTES * ((2 + perturbs) * experts + 2 * (_attention(config) + _block(config)))
    tokens = _FIT_COPIES * n_training_tokens + 4 * n_held_tokens
    states = _FLOAT_BYTES * config.hidden_size * tokens
    logits = window * config.vocab_size * (2 * _FLOAT_BYTES + 4 * _DOUBLE_BYTES)
    embeddings = 2 * _FLOAT_BYTES * config.vocab_size * config.hidden_size
    making = layer + states + logits + embeddings
    if not trains_experts:
        return int(making)
    kept = window * (12 * config.hidden_size + 6 * config.num_experts_per_tok * config.intermediate_size)
    activations = _FLOAT_BYTES * config.num_hidden_layers * kept
    training = _FLOAT_BYTES * (n_parameters(config) + 3 * experts) + activations + logits
    return int(max(making, training))


def disk_bytes(config: LayaConfig, dtype: str) -> int:
    """Of the model's folder."""
    return n_parameters(config) * DTYPES[dtype].itemsize
