"""Metadata of models that people run, from their configs: the shapes at which the planner is asked most."""

from __future__ import annotations

from typing import Any

_COMMON = {
    "context_length": 131072, "use_parallel_residual": False, "logit_scale": 1.0, "residual_scale": 1.0,
    "embedding_scale": 1.0, "attention.scale": 1.0, "attention.max_alibi_bias": 8.0, "attention.q_lora_rank": 1536,
    "attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5, "leading_dense_block_count": 1,
}  # fmt: skip


def _model(
    architecture: str, n_layer: int, n_embd: int, heads: tuple[int, Any, int], n_ff: Any, n_vocab: int, **more: Any
) -> dict[str, Any]:
    """heads: of queries, of keys and values (one figure or one a layer), and their width, 0 where others say it."""
    n_head, n_head_kv, width = heads
    keys: dict[str, Any] = _COMMON | {"block_count": n_layer, "embedding_length": n_embd, "vocab_size": n_vocab}
    keys |= {"attention.head_count": n_head, "attention.head_count_kv": n_head_kv, "feed_forward_length": n_ff}
    keys["rope.dimension_sections"] = [max(width, 64) // 4] * 4
    if width:
        keys |= {"attention.key_length": width, "attention.value_length": width}
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    header = {"general.architecture": architecture, "tokenizer.ggml.model": "no_vocab"}
    return header | {f"{architecture}.{key}": value for key, value in keys.items()}


def _experts(count: int, used: int, n_ff: int, *, shared: int = 0) -> dict[str, Any]:
    keys = {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": n_ff}
    keys |= {"expert_gating_func": 2, "expert_shared_count": 1} if shared else {}
    return keys | ({"expert_shared_feed_forward_length": shared} if shared else {})


def _ssm(inner: int, groups: int, heads: int, *, state: int = 128) -> dict[str, Any]:
    widths = {"inner_size": inner, "group_count": groups, "time_step_rank": heads, "state_size": state}
    return {f"ssm__{key}": value for key, value in (widths | {"conv_kernel": 4}).items()}


def _latent(key: int, value: int) -> dict[str, Any]:
    widths = {"key_length": 576, "value_length": 512, "key_length_mla": key, "value_length_mla": value}
    return {f"attention__{name}": width for name, width in (widths | {"kv_lora_rank": 512}).items()} | {
        "rope__dimension_count": 64
    }


def _window(tokens: int) -> dict[str, Any]:
    return {"attention__sliding_window": tokens}


def _gemma4(n_layer: int, tokens: int, *, per_layer: int, shared: int) -> dict[str, Any]:
    keys = {"key_length_swa": 256, "value_length_swa": 256, "sliding_window": tokens, "shared_kv_layers": shared}
    keys |= {"sliding_window_pattern": [il % 6 != 5 for il in range(n_layer)]}
    rope = {"rope__dimension_count": 512, "rope__dimension_count_swa": 256}
    return (
        {f"attention__{name}": value for name, value in keys.items()}
        | rope
        | {"embedding_length_per_layer_input": per_layer}
    )


def _only(n_layer: int, layers: tuple[int, ...], heads: int) -> list[int]:
    return [heads if il in layers else 0 for il in range(n_layer)]


_NANO_ATTENTION = (14, 21, 30, 39)
_NANO_FF = [15680 if il % 2 and il not in _NANO_ATTENTION else 0 for il in range(56)]
MODELS = {
    "llama-3.1-8b": _model("llama", 32, 4096, (32, 8, 128), 14336, 128256),
    "qwen3-30b-a3b": _model("qwen3moe", 48, 2048, (32, 4, 128), 6144, 151936, **_experts(128, 8, 768)),
    "command-r7b": _model("cohere2", 32, 4096, (32, 8, 128), 14336, 256000, **_window(4096)),
    "gemma-3-1b": _model("gemma3", 26, 1152, (4, 1, 256), 6912, 262144, **_window(512)),
    "gemma-3-27b": _model("gemma3", 62, 5376, (32, 16, 128), 21504, 262144, **_window(1024)),
    "gemma-4-12b": _model(
        "gemma4", 48, 3840, (16, [1 if il % 6 == 5 else 8 for il in range(48)], 512), 15360, 262144,
        **_gemma4(48, 1024, per_layer=0, shared=0),
    ),
    "gemma-4-e4b": _model(
        "gemma4", 42, 2560, (8, 2, 512), 10240, 262144, **_gemma4(42, 512, per_layer=256, shared=18)
    ),
    "gpt-oss-20b": _model("gpt-oss", 24, 2880, (64, 8, 64), 2880, 201088, **_window(128), **_experts(32, 4, 2880)),
    "llama-4-scout": _model(
        "llama4", 48, 5120, (40, 8, 128), 16384, 202048, interleave_moe_layer_step=1,
        **_experts(16, 1, 8192, shared=8192),
    ),
    "deepseek-v3": _model(
        "deepseek2", 61, 7168, (128, 1, 0), 18432, 129280, **_latent(192, 128), **_experts(256, 8, 2048, shared=2048)
    ),
    "glm-4.7-flash": _model(
        "deepseek2", 47, 2048, (20, 1, 0), 10240, 154880, **_latent(256, 256), **_experts(64, 4, 1536, shared=1536)
    ),
    "qwen3.5-4b": _model("qwen35", 32, 2560, (16, 4, 256), 9216, 248320, **_ssm(4096, 16, 32)),
    "qwen3.5-27b": _model("qwen35", 64, 5120, (24, 4, 256), 17408, 248320, **_ssm(6144, 16, 48)),
    "qwen3.5-35b-a3b": _model(
        "qwen35moe", 40, 2048, (16, 2, 256), 0, 248320, **_ssm(4096, 16, 32), **_experts(256, 8, 512, shared=512)
    ),
    "qwen3-next-80b": _model(
        "qwen3next", 48, 2048, (16, 2, 256), 5120, 151936, **_ssm(4096, 16, 32), **_experts(512, 10, 512, shared=512)
    ),
    "mamba2-2.7b": _model("mamba2", 64, 2560, (0, 0, 0), 0, 50288, **_ssm(5120, 1, 80)),
    "granite-4-h-tiny": _model(
        "granitehybrid", 40, 1536, (12, _only(40, (5, 15, 25, 35), 4), 128), 512, 100352, **_ssm(3072, 1, 48),
        **_experts(64, 6, 512, shared=1024),
    ),
    "nemotron-nano-9b": _model(
        "nemotron_h", 56, 4480, (40, _only(56, _NANO_ATTENTION, 8), 128), _NANO_FF, 131072, **_ssm(10240, 8, 128)
    ),
    "falcon-h1-7b": _model("falcon-h1", 44, 3072, (12, 2, 128), 12288, 130048, **_ssm(3072, 1, 24, state=256)),
    "lfm2-1.2b": _model(
        "lfm2", 16, 2048, (32, _only(16, (2, 5, 8, 10, 12, 14), 8), 64), 8192, 65536, shortconv__l_cache=3
    ),
}  # fmt: skip
# All their feed-forward is experts, or none is there.
WITHOUT_DENSE = frozenset({"llama-4-scout", "mamba2-2.7b", "qwen3-30b-a3b", "qwen3-next-80b", "qwen3.5-35b-a3b"})
