"""Owns: what the files of a few architectures hold: metadata keys and, layer by layer, names and shapes of tensors.

One row a family in `FAMILIES`. Sources: llama.cpp's loaders, which refuse a file with a tensor missing or misshapen.
Knows no weights, no vocabulary and no path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from laya.bench.random_gguf import Value

CONV_KERNEL, DELTA_NET_INTERVAL = 4, 4


DECISION_TEMPLATE = (
    "<|im_start|>user\n{{ state if state is string else state | tojson }}\n{{ instructions }}\n"
    "{% for option in options %}{{ option.label }}) {{ option.key }}: {{ option.description }}\n{% endfor %}"
    "<|im_end|>\n<|im_start|>assistant\n"
)


class GeneratedShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model. Widths in elements, lengths in tokens; a row must divide by the block of its type."""

    architecture: str = "llama"  # one of FAMILIES
    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2  # deepseek2 has one, compressed
    head_dim: int = 64
    n_ff: int = 768  # of a dense layer; qwen3moe and gpt-oss have none, deepseek2 its first
    n_expert: int = 0  # qwen3moe, gpt-oss, deepseek2
    n_expert_used: int = 0
    n_ff_expert: int = 0
    sliding_window: int = 0  # gemma3 (five layers of six see so many tokens) and gpt-oss (every other layer)
    kv_lora_rank: int = 0  # deepseek2: a token's compressed row beside `rope_dim`
    q_lora_rank: int = 0  # deepseek2
    rope_dim: int = 0  # deepseek2: of each head, what carries the position
    state_size: int = 0  # qwen35: width of a head of the recurrence, in three layers of four
    n_state_head: int = 0  # qwen35
    n_state_group: int = 0  # qwen35
    n_ctx_train: int = 32768
    decision_type: str | None = None  # of a decision model, as llama.cpp calls it: `nimble`
    weights: str = "Q8_0"  # one of random_gguf.WEIGHT_TYPES; norms, gates and convolutions are F32
    output_weights: str | None = None  # type of an output matrix of its own; None = the embedding is the output too

    @property
    def state_width(self) -> int:
        """Of all heads of the recurrence."""
        return self.n_state_head * self.state_size

    @property
    def convolved_width(self) -> int:
        return self.state_width + 2 * self.n_state_group * self.state_size


class Row(NamedTuple):
    """A tensor of a layer. `shape` in ggml's order."""

    name: str
    shape: tuple[int, ...]
    type_name: str | None = None  # None = the model's weights where it is a matrix, else F32

    @property
    def is_norm(self) -> bool:
        return len(self.shape) == 1 and self.name.endswith("weight")


class Family(NamedTuple):
    """One architecture."""

    layer: Callable[[GeneratedShape, int], Iterator[Row]]
    keys: Callable[[GeneratedShape], dict[str, Value]] = lambda shape: {}


def metadata(shape: GeneratedShape) -> dict[str, Value]:
    """All keys but those that come with a vocabulary."""
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
        keys["expert_count"], keys["expert_used_count"] = shape.n_expert, shape.n_expert_used
        keys["expert_feed_forward_length"] = shape.n_ff_expert
    if shape.sliding_window:
        keys["attention.sliding_window"] = shape.sliding_window
    keys |= FAMILIES[shape.architecture].keys(shape)
    general: dict[str, Value] = {"general.architecture": shape.architecture, "general.name": "generated"}
    if shape.decision_type is not None:
        keys["decision.type"] = shape.decision_type
        general["tokenizer.chat_template.systemone"] = DECISION_TEMPLATE
    return general | {f"{shape.architecture}.{key}": value for key, value in keys.items()}


def layer_rows(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    """The tensors of one layer."""
    return FAMILIES[shape.architecture].layer(shape, layer)


# parts of layers
def _norms(n_embd: int, *names: str) -> Iterator[Row]:
    return (Row(f"{name}.weight", (n_embd,)) for name in names)


def _attention(shape: GeneratedShape, *, q_factor: int = 1) -> Iterator[Row]:
    q, kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    yield Row("attn_q.weight", (shape.n_embd, q_factor * q))
    yield Row("attn_k.weight", (shape.n_embd, kv))
    yield Row("attn_v.weight", (shape.n_embd, kv))
    yield Row("attn_output.weight", (q, shape.n_embd))


def _dense(shape: GeneratedShape, n_ff: int, suffix: str = "") -> Iterator[Row]:
    yield Row(f"ffn_gate{suffix}.weight", (shape.n_embd, n_ff))
    yield Row(f"ffn_up{suffix}.weight", (shape.n_embd, n_ff))
    yield Row(f"ffn_down{suffix}.weight", (n_ff, shape.n_embd))


def _experts(shape: GeneratedShape) -> Iterator[Row]:
    wide = (shape.n_embd, shape.n_ff_expert, shape.n_expert)
    yield Row("ffn_gate_inp.weight", (shape.n_embd, shape.n_expert), "F32")
    yield Row("ffn_gate_exps.weight", wide)
    yield Row("ffn_up_exps.weight", wide)
    yield Row("ffn_down_exps.weight", (shape.n_ff_expert, shape.n_embd, shape.n_expert))


# layers
def _llama(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    yield from _norms(shape.n_embd, "attn_norm", "ffn_norm")
    yield from _attention(shape)
    yield from _dense(shape, shape.n_ff)


def _qwen3(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    yield from _llama(shape, layer)
    yield from _norms(shape.head_dim, "attn_q_norm", "attn_k_norm")


def _qwen3moe(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    yield from _norms(shape.n_embd, "attn_norm", "ffn_norm")
    yield from _norms(shape.head_dim, "attn_q_norm", "attn_k_norm")
    yield from _attention(shape)
    yield from _experts(shape)


def _gemma3(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    yield from _qwen3(shape, layer)
    yield from _norms(shape.n_embd, "post_attention_norm", "post_ffw_norm")


def _gpt_oss(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    yield from _norms(shape.n_embd, "attn_norm", "post_attention_norm")
    for row in (*_attention(shape), *_experts(shape)):
        yield row
        yield Row(row.name.replace("weight", "bias"), row.shape[1:], "F32")
    yield Row("attn_sinks.weight", (shape.n_head,))


def _deepseek2(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    n_embd, q, latent = shape.n_embd, shape.n_head * shape.head_dim, shape.kv_lora_rank
    yield from _norms(n_embd, "attn_norm", "ffn_norm")
    yield Row("attn_q_a.weight", (n_embd, shape.q_lora_rank))
    yield Row("attn_q_a_norm.weight", (shape.q_lora_rank,))
    yield Row("attn_q_b.weight", (shape.q_lora_rank, q))
    yield Row("attn_kv_a_mqa.weight", (n_embd, latent + shape.rope_dim))
    yield Row("attn_kv_a_norm.weight", (latent,))
    yield Row("attn_k_b.weight", (shape.head_dim - shape.rope_dim, latent, shape.n_head))
    yield Row("attn_v_b.weight", (latent, shape.head_dim, shape.n_head))
    yield Row("attn_output.weight", (q, n_embd))
    if layer == 0:
        yield from _dense(shape, shape.n_ff)
    else:
        yield from _experts(shape)
        yield from _dense(shape, shape.n_ff_expert, "_shexp")


def _deepseek2_keys(shape: GeneratedShape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": shape.kv_lora_rank + shape.rope_dim,
        "attention.value_length": shape.kv_lora_rank,
        "attention.key_length_mla": shape.head_dim,
        "attention.value_length_mla": shape.head_dim,
        "attention.kv_lora_rank": shape.kv_lora_rank,
        "attention.q_lora_rank": shape.q_lora_rank,
        "rope.dimension_count": shape.rope_dim,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
    }


def _qwen35(shape: GeneratedShape, layer: int) -> Iterator[Row]:
    n_embd, heads = shape.n_embd, shape.n_state_head
    yield from _norms(n_embd, "attn_norm", "post_attention_norm")
    yield from _dense(shape, shape.n_ff)
    if layer % DELTA_NET_INTERVAL == DELTA_NET_INTERVAL - 1:
        yield from _attention(shape, q_factor=2)  # queries and their gates
        yield from _norms(shape.head_dim, "attn_q_norm", "attn_k_norm")
        return
    yield Row("attn_qkv.weight", (n_embd, shape.convolved_width))
    yield Row("attn_gate.weight", (n_embd, shape.state_width))
    yield Row("ssm_conv1d.weight", (CONV_KERNEL, shape.convolved_width), "F32")
    yield Row("ssm_dt.bias", (heads,))
    yield Row("ssm_a", (heads,))
    yield Row("ssm_beta.weight", (n_embd, heads))
    yield Row("ssm_alpha.weight", (n_embd, heads))
    yield Row("ssm_norm.weight", (shape.state_size,))
    yield Row("ssm_out.weight", (shape.state_width, n_embd))


def _qwen35_keys(shape: GeneratedShape) -> dict[str, Value]:
    quarter = shape.head_dim // 4
    return {
        "ssm.conv_kernel": CONV_KERNEL,
        "ssm.inner_size": shape.state_width,
        "ssm.state_size": shape.state_size,
        "ssm.time_step_rank": shape.n_state_head,
        "ssm.group_count": shape.n_state_group,
        "full_attention_interval": DELTA_NET_INTERVAL,
        "rope.dimension_count": 2 * quarter,
        "rope.dimension_sections": [quarter // 4, quarter // 4, quarter // 4, quarter // 4],
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "qwen3": Family(_qwen3),
    "qwen3moe": Family(_qwen3moe),
    "gemma3": Family(_gemma3),
    "gpt-oss": Family(_gpt_oss),
    "deepseek2": Family(_deepseek2, _deepseek2_keys),
    "qwen35": Family(_qwen35, _qwen35_keys),
}
