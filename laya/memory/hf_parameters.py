"""Owns: how many parameters a model has, counted from its config where its weights are not at hand.

Matrices are counted exactly for the families named here; biases and norms by a bound that is under a thousandth of
them. Kept apart: what a quantization compresses (the matrices of the layers), what only some compress (experts), and
what stays. Knows no bytes.
"""

from __future__ import annotations

import msgspec

from laya.memory.hf_config import HfConfig
from laya.memory.hf_names import FIGURES, NO_CACHE_WORDS
from laya.memory.hf_shape import dense_width, layer_words
from laya.memory.shape import ModelShape

# Families whose feed-forward has two matrices, not a gate beside them.
_UNGATED = """
bert bloom falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj jais mpt nemotron nemotron_h opt phi roberta starcoder2
xlm-roberta
"""
UNGATED = frozenset(_UNGATED.split())
_LEARNED_POSITIONS = frozenset({"bert", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "roberta", "xlm-roberta"})
# Families whose embedding is the output matrix too unless the config says otherwise.
_TIED = """
bert bloom cohere cohere2 falcon gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gpt2
gpt_bigcode lfm2 lfm2_moe mamba modernbert mpt new nomic_bert opt roberta smollm3 starcoder2 t5 xlm-roberta
"""
TIED = frozenset(_TIED.split())


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Counts. `linear`, `expert` and `embedding` are matrices, `other` is what no quantization touches."""

    linear: int
    expert: int
    embedding: int  # with the output matrix where it is one of its own
    encoder: int  # of what sees or hears
    other: int

    @property
    def total(self) -> int:
        return self.linear + self.expert + self.embedding + self.encoder + self.other


def is_tied(config: HfConfig) -> bool:
    """Whether the embedding is the output matrix too."""
    told = config.get("tie_word_embeddings")
    if told is None:
        told = config.outer.get("tie_word_embeddings")
    return told if isinstance(told, bool) else config.model_type in TIED


def is_gated(config: HfConfig) -> bool:
    """Whether the feed-forward has a gate matrix beside up and down."""
    activation = config.get("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")
    return config.model_type not in UNGATED and activation != "relu2"


def parameters_of(config: HfConfig, shape: ModelShape) -> Parameters:
    """The parameters of a model without its layers for multi-token prediction."""
    words = layer_words(config, shape.n_layer)
    matrices = 3 if is_gated(config) else 2
    dense_ff = matrices * shape.n_embd * dense_width(config, shape.n_embd)
    has_experts = expert_layers(config, shape, words)
    shared = matrices * shape.n_embd * shape.n_ff_shared
    linear = expert = 0
    for il in range(shape.n_layer):
        word, row = words[il] if words else "", shape.layers[il]
        is_state = bool(row.conv or row.state)
        linear += _state(config, shape) if is_state else 0
        # A layer that reads the cache of an earlier one has matrices all the same.
        if row.n_head_kv or not (is_state or word in NO_CACHE_WORDS):
            linear += _attention(config, shape, il)
        if has_experts[il]:
            expert += shape.n_expert * matrices * shape.n_embd * shape.n_ff_expert
            linear += shared
        elif _has_feed_forward(config, shape, word):
            linear += dense_ff
    if config.flag("is_encoder_decoder"):
        linear *= 3  # the encoder's stack, the decoder's, and attention across
    copies = 1 if is_tied(config) else 2
    per_layer = 8 * shape.n_embd + sum(max(shape.n_head_kv, default=0) * width for width in _widths(shape)) + 4096
    per_layer += shape.n_expert * (2 * shape.n_ff_expert + shape.n_embd) if config.flag("attention_bias") else 0
    routers = sum(has_experts) * shape.n_embd * shape.n_expert
    positions = shape.n_ctx_train * shape.n_embd if config.model_type in _LEARNED_POSITIONS else 0
    return Parameters(
        linear=linear + _per_layer_embedding(config, shape)[1],
        expert=expert,
        embedding=copies * shape.n_vocab * shape.n_embd + _per_layer_embedding(config, shape)[0],
        encoder=_encoder(config, shape),
        other=shape.n_layer * per_layer + routers + positions + shape.n_embd,
    )


def _has_feed_forward(config: HfConfig, shape: ModelShape, word: str) -> bool:
    """Mamba has none; a drawn pattern has it in layers of its own."""
    if shape.architecture in ("mamba", "mamba2"):
        return False
    return word in NO_CACHE_WORDS or config.get("hybrid_override_pattern") is None


def expert_layers(config: HfConfig, shape: ModelShape, words: tuple[str, ...] | None) -> tuple[bool, ...]:
    """Which layers have experts, by the keys that families say it with."""
    n_layer = shape.n_layer
    if not shape.n_expert:
        return (False,) * n_layer
    if words is not None and config.get("hybrid_override_pattern") is not None:
        return tuple(word == "moe" for word in words)
    first = config.number(*FIGURES["first_dense"], default=0, most=n_layer, is_per_layer=True)
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    step = config.number(*steps, default=1, least=1, most=n_layer)
    period = config.number("expert_layer_period", default=1, least=1, most=n_layer)
    offset = config.number("expert_layer_offset", default=0, most=n_layer)
    only_dense = set(config.numbers("mlp_only_layers") or ())
    told = config.numbers("moe_layer_freq")
    if told is not None:
        return tuple(bool(told[il]) if il < len(told) else True for il in range(n_layer))
    marks = tuple(
        il >= first and (il + 1) % step == 0 and il % period == offset % period and il not in only_dense
        for il in range(n_layer)
    )
    if shape.n_expert > 1 and not any(marks):
        config.fail(f"is corrupt: it has {shape.n_expert} experts and leaves none of its {n_layer} layers to them")
    return marks


def _widths(shape: ModelShape) -> tuple[int, int]:
    return shape.head_dim_k, shape.head_dim_v


def _attention(config: HfConfig, shape: ModelShape, il: int) -> int:
    """The matrices of one attention layer."""
    n_embd, n_head = shape.n_embd, shape.n_head[il]
    if config.has("kv_lora_rank") and config.has("qk_rope_head_dim"):
        return _latent_attention(config, n_embd, n_head)
    row = shape.layers[il]
    heads_kv = row.n_head_kv or max(shape.n_head_kv, default=n_head)
    width_k, width_v = row.head_k or shape.head_dim_k, row.head_v or shape.head_dim_v
    # Qwen's hybrids have a gate on the output, as wide as the query.
    n_query = 2 if config.flag("attn_output_gate", default=shape.architecture == "qwen3next") else 1
    return n_embd * (n_query * n_head * width_k + heads_kv * (width_k + width_v) + n_head * width_v)


def _latent_attention(config: HfConfig, n_embd: int, n_head: int) -> int:
    rank, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    nope, value = config.number("qk_nope_head_dim", default=128), config.number("v_head_dim", default=128)
    q_rank = config.number("q_lora_rank", default=0)
    query = q_rank * (n_embd + n_head * (nope + rope)) if q_rank else n_embd * n_head * (nope + rope)
    index_heads, index_width = config.number("index_n_heads", default=0), config.number("index_head_dim", default=0)
    index = q_rank * index_heads * index_width + n_embd * (index_width + index_heads)
    return query + n_embd * (rank + rope) + rank * n_head * (nope + value) + n_head * value * n_embd + index


def _state(config: HfConfig, shape: ModelShape) -> int:
    """The matrices of one recurrent layer."""
    widths, n_embd = shape.recurrent, shape.n_embd
    n_head = max(shape.n_head, default=1)
    if widths.l_cache:
        return 4 * n_embd * n_embd + widths.l_cache * n_embd
    if widths.head_size:
        return 6 * n_embd * n_embd
    if widths.kda_head_dim:
        width = n_head * widths.kda_head_dim
        return n_embd * (4 * width + 2 * widths.kda_head_dim + n_head) + 2 * width * widths.kda_head_dim
    if widths.lightning_head_dim:
        return 5 * n_embd * n_head * widths.lightning_head_dim
    channels = widths.inner + 2 * widths.groups * widths.state
    if config.has("linear_num_value_heads"):
        heads = config.number("linear_num_value_heads")
        return n_embd * (channels + widths.inner + 2 * heads) + channels * widths.conv_kernel + widths.inner * n_embd
    if widths.groups:
        heads = config.number("mamba_num_heads", "mamba_n_heads", "num_heads", default=n_head)
        return n_embd * (channels + widths.inner + heads) + channels * widths.conv_kernel + widths.inner * n_embd
    told = config.get("mamba_dt_rank", "time_step_rank")
    rank = told if isinstance(told, int) else -(-n_embd // 16)
    return n_embd * 3 * widths.inner + widths.inner * (2 * rank + 3 * widths.state + widths.conv_kernel)


def _per_layer_embedding(config: HfConfig, shape: ModelShape) -> tuple[int, int]:
    """Gemma's embeddings of each layer: the table, and the matrices that use it."""
    width = shape.n_embd_per_layer
    n_vocab = config.number("vocab_size_per_layer_input", default=shape.n_vocab) if width else 0
    return n_vocab * width * shape.n_layer, 3 * shape.n_embd * width * shape.n_layer


def _encoder(config: HfConfig, shape: ModelShape) -> int:
    """A bound for what sees or hears: its layers, a projection into the language model, and a tenth more."""
    total = 0
    for key in ("vision_config", "audio_config"):
        part = config.outer.get(key)
        if not isinstance(part, dict):
            continue
        width = _first(part, "embed_dim", "hidden_size", "d_model", "width")
        depth = _first(part, "num_hidden_layers", "depth", "encoder_layers", "layers", "conf_num_hidden_layers")
        wide = _first(part, "intermediate_size", "encoder_ffn_dim") or 4 * width
        total += depth * (4 * width * width + 3 * width * wide) + 8 * width * shape.n_embd + 2048 * width
    return total * 11 // 10


def _first(part: dict[str, object], *names: str) -> int:
    found = next((part[name] for name in names if isinstance(part.get(name), int)), 0)
    return min(found, 1 << 20) if isinstance(found, int) and found > 0 else 0
