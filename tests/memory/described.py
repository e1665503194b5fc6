"""Metadata of small models of every architecture that the planner knows, as their files would have it."""

from __future__ import annotations

from typing import Any, NamedTuple

N_LAYER = 8


class Widths(NamedTuple):
    """Of a model; a head is as wide as the embedding divided by the heads."""

    n_embd: int = 512
    n_head: int = 8
    n_head_kv: int = 4
    n_ff: int = 1024

    @property
    def head(self) -> int:
        return self.n_embd // self.n_head


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DENSE = words("""
arcee baichuan bitnet bloom chatglm codeshell cogvlm command-r deci ernie4_5 exaone falcon gemma glm4 gpt2 gptneox
granite hunyuan-dense hunyuan_vl internlm2 jais jais2 k2-horizon llama maincoder minicpm mistral3 mpt nanbeige
nemotron olmo olmo2 openelm orion paddleocr pangu-embedded phi2 phi3 plamo qwen qwen2 qwen2vl qwen3 qwen3vl refact
seed_oss smollm3 stablelm starcoder starcoder2 talkie xverse
""")
EXPERTS = words("""
arctic bailingmoe bailingmoe2 dbrx deepseek deepseek2-ocr dots1 ernie4_5-moe glm4moe granitemoe grovemoe hunyuan-moe
hy_v3 minimax-m2 olmoe phimoe qwen2moe qwen3moe qwen3vlmoe
""")
WINDOWED = words("""
afmoe cohere2 exaone-moe gemma2 gemma3 gemma3n gpt-oss lfm2 llama4 mellum olmo2 plamo3 smallthinker
""")
WINDOW_ARRAYS = ["cohere2moe", "gemma4", "granite_swa", "laguna", "mimo2", "step35"]
RECURRENT = ["falcon-h1", "mamba", "mamba2", "qwen35", "qwen35moe", "qwen3next", "rwkv7", "arwkv7"]
BY_HEADS = ["granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h", "plamo2"]
LATENT = ["deepseek2", "deepseek32", "glm-dsa", "minicpm3", "mistral4"]
ENCODERS = words(
    "bert dream eurobert gemma-embedding jina-bert-v3 llada modern-bert neo-bert nomic-bert nomic-bert-moe"
)
OTHERS = ["exaone4", "minimax-01"]
# What a plan of these says of the graph is an upper bound; the engine has no fused attention for the last two.
BOUNDED = ["arwkv7", "minimax-01", "qwen", "grok", "t5"]
ALL = sorted({*DENSE, *EXPERTS, *WINDOWED, *WINDOW_ARRAYS, *RECURRENT, *BY_HEADS, *LATENT, *ENCODERS, *OTHERS})

# One KV head for each head: their loaders take no other.
_WITHOUT_GROUPS = words(
    "bloom deepseek2-ocr dots1 falcon gpt2 gptneox minicpm3 modern-bert mpt neo-bert olmo olmoe phi2 plamo refact t5"
)
_COMPRESSED = frozenset({"deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "mistral4"})
# Their experts are as wide as `feed_forward_length` says.
_ONE_WIDTH = words("arctic dbrx granitemoe hunyuan-moe minimax-01 minimax-m2 olmoe phimoe")
_EXPERTS_TOO = words("""
afmoe cohere2moe deepseek2 deepseek32 exaone-moe glm-dsa gpt-oss kimi-linear laguna lfm2moe llama4 mellum mimo2
minimax-01 mistral4 qwen35moe qwen3next smallthinker step35
""")
_WITH_EXPERTS = frozenset({*EXPERTS, *_EXPERTS_TOO, "grok"})
# Feed-forward of two matrices, without a gate.
UNGATED = frozenset(
    words("""
arcee bert bloom codeshell falcon gpt2 gptneox jais2 jina-bert-v3 mpt nemotron nemotron_h nomic-bert-moe phi2 starcoder
starcoder2
""")
)
_STATE_SPACE = frozenset(["falcon-h1", "granitehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "plamo2"])
_DELTA_NET = frozenset(["qwen35", "qwen35moe", "qwen3next"])
_N_LAYER = {"exaone4": 64, "gemma3n": 25, "nemotron_h": 9}


SMALL = Widths()


def metadata(architecture: str, widths: Widths = SMALL) -> dict[str, Any]:
    """GGUF keys of a model of N_LAYER layers or so."""
    n_layer = _N_LAYER.get(architecture, N_LAYER)
    keys = _common(n_layer, widths) | _heads(architecture, n_layer, widths) | _mixers(architecture, n_layer, widths)
    if architecture in {*WINDOWED, *WINDOW_ARRAYS, "exaone4", "gemma-embedding", "modern-bert"}:
        keys["attention.sliding_window"] = 512
    if architecture in _WITH_EXPERTS:
        keys |= {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2, "experts_per_group": 1}
        keys |= {"interleave_moe_layer_step": 2, "expert_group_scale": 1.0}
        keys["expert_feed_forward_length"] = widths.n_ff if architecture in _ONE_WIDTH else widths.n_ff // 2
        keys |= {"expert_shared_count": 1} if architecture != "granitemoe" else {}
    header = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.ggml.token_type_count": 2,
    }
    return header | {f"{architecture}.{key}": value for key, value in keys.items()}


def _common(n_layer: int, widths: Widths) -> dict[str, Any]:
    """What every loader needs, and what only some read."""
    epsilons = dict.fromkeys(("layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon"), 1e-5)
    keys: dict[str, Any] = {f"attention.{name}": value for name, value in epsilons.items()}
    keys |= {"vocab_size": 4096, "context_length": 32768}
    keys |= {"embedding_length": widths.n_embd, "features_length": widths.n_embd}
    keys |= {"block_count": n_layer, "feed_forward_length": widths.n_ff, "leading_dense_block_count": 1}
    keys |= {"use_parallel_residual": False, "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0}
    keys |= {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.0, "attention.group_norm_groups": 8}
    keys |= {"attention.q_lora_rank": 512, "attention.scale": 1.0, "attention.relative_buckets_count": 8}
    return keys | {"rope.dimension_sections": [widths.head // 4] * 4}


def _heads(architecture: str, n_layer: int, widths: Widths) -> dict[str, Any]:
    if architecture in BY_HEADS:
        heads = 1 if architecture in _COMPRESSED else widths.n_head_kv
        skipped = (0, 2) if architecture == "nemotron_h" else (0,)
        keys: dict[str, Any] = {"attention.head_count_kv": [0 if il % 3 in skipped else heads for il in range(n_layer)]}
    else:
        heads = (
            widths.n_head if architecture in _WITHOUT_GROUPS else 1 if architecture in _COMPRESSED else widths.n_head_kv
        )
        keys = {"attention.head_count_kv": heads}
    keys["attention.head_count"] = [widths.n_head] * n_layer if architecture == "plamo2" else widths.n_head
    if architecture in LATENT or architecture in _COMPRESSED:
        keys["attention.kv_lora_rank"] = 512
    if architecture in _COMPRESSED:
        keys |= {"attention.key_length": 576, "attention.value_length": 512, "rope.dimension_count": 64}
        keys |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
    if architecture in ("deepseek32", "glm-dsa"):
        indexer = {"head_count": 1, "key_length": 128, "top_k": 8}
        keys |= {f"attention.indexer.{name}": value for name, value in indexer.items()}
    if architecture == "gemma4":
        keys |= {
            "attention.key_length": 2 * widths.head,
            "attention.value_length": 2 * widths.head,
            "rope.dimension_count_swa": widths.head,
        }
        keys |= {
            "attention.key_length_swa": widths.head,
            "attention.value_length_swa": widths.head,
            "rope.freq_base_swa": 1e4,
        }
        keys |= {"attention.shared_kv_layers": 4, "rope.dimension_count": 2 * widths.head}
    if architecture in ("gemma3n", "gemma4"):
        keys["embedding_length_per_layer_input"] = 256
    if architecture in WINDOW_ARRAYS:
        keys["attention.sliding_window_pattern"] = [il % 4 != 3 for il in range(n_layer)]
    return keys


def _mixers(architecture: str, n_layer: int, widths: Widths) -> dict[str, Any]:
    """The widths of recurrent layers."""
    if architecture in _STATE_SPACE:
        keys: dict[str, Any] = {"ssm.inner_size": 2 * widths.n_embd, "ssm.conv_kernel": 4, "ssm.state_size": 128}
        keys |= {"ssm.time_step_rank": widths.n_head, "ssm.group_count": 0 if architecture == "plamo2" else 2}
        if architecture == "nemotron_h":
            keys["feed_forward_length"] = [widths.n_ff if il % 3 == 2 else 0 for il in range(n_layer)]
        return keys
    if architecture in _DELTA_NET:
        keys = {
            "ssm.inner_size": widths.n_embd,
            "ssm.conv_kernel": 4,
            "ssm.state_size": widths.head,
            "full_attention_interval": 4,
        }
        return keys | {"ssm.time_step_rank": widths.n_head, "ssm.group_count": 2}
    ranks = ("decay_lora_rank", "iclr_lora_rank", "value_residual_mix_lora_rank", "gate_lora_rank")
    ranked = {"wkv.head_size": widths.head, **{f"attention.{rank}": 64 for rank in ranks}}
    return {
        "arwkv7": ranked | {"token_shift_count": 1},
        "rwkv7": ranked,
        "lfm2": {"shortconv.l_cache": 3},
        "lfm2moe": {"shortconv.l_cache": 3},
        "kimi-linear": {"kda.head_dim": 128, "ssm.conv_kernel": 4},
    }.get(architecture, {})
