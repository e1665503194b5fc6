"""Figures of published models as their configs have them, and folders of safetensors with holes for weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from laya.memory.hf import HfFacts, facts_of_source
from laya.memory.safetensors import DTYPE_BITS
from laya.memory.source import LocalModel

Table = Mapping[str, tuple[str, Sequence[int]]]  # tensor -> dtype, shape


def config(*figures: int, **more: Any) -> dict[str, Any]:
    """width, layers, heads, KV heads, feed-forward, vocabulary, trained length; then what else there is."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
             "vocab_size", "max_position_embeddings")  # fmt: skip
    return {"torch_dtype": "bfloat16", **dict(zip(names, figures, strict=True)), **more}


def latent(q_lora: int | None, kv_lora: int = 512) -> dict[str, Any]:
    return {"q_lora_rank": q_lora, "kv_lora_rank": kv_lora, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128}  # fmt: skip


def delta_net(value_heads: int) -> dict[str, Any]:
    return {"linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip


_WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": config(4096, 32, 32, 32, 11008, 32000, 4096, model_type="llama", tie_word_embeddings=False),
    "llama-3.1-8b": config(4096, 32, 32, 8, 14336, 128256, 131072, model_type="llama",
                           rope_scaling={"rope_type": "llama3", "factor": 8.0}),
    "smollm2-135m": config(576, 30, 9, 3, 1536, 49152, 8192, model_type="llama", tie_word_embeddings=True),
    "qwen2.5-0.5b": config(896, 24, 14, 2, 4864, 151936, 32768, model_type="qwen2", tie_word_embeddings=True),
    "qwen3-4b": config(2560, 36, 32, 8, 9728, 151936, 40960, model_type="qwen3", head_dim=128),
    "mixtral-8x7b": config(4096, 32, 32, 8, 14336, 32000, 32768, model_type="mixtral", num_local_experts=8,
                           num_experts_per_tok=2, sliding_window=None),
    "deepseek-v3": config(7168, 61, 128, 128, 18432, 129280, 163840, model_type="deepseek_v3", **latent(1536),
                          moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
                          first_k_dense_replace=3, moe_layer_freq=1, num_nextn_predict_layers=1,
                          rope_scaling={"type": "yarn", "factor": 40}, tie_word_embeddings=False),
    "gemma-2-2b": config(2304, 26, 8, 4, 9216, 256000, 8192, model_type="gemma2", head_dim=256, sliding_window=4096),
    "gemma-3-270m": config(640, 18, 4, 1, 2048, 262144, 32768, model_type="gemma3_text", head_dim=256,
                           sliding_window=512, layer_types=_WINDOWS * 3),
    "gemma-4-12b": {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
                    "text_config": config(3840, 48, 16, 8, 15360, 262144, 262144, model_type="gemma4_text",
                                          num_global_key_value_heads=1, head_dim=256, global_head_dim=512,
                                          sliding_window=1024, layer_types=_WINDOWS * 8)},
    "gemma-4-31b": {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
                    "text_config": config(5376, 60, 32, 16, 21504, 262144, 262144, model_type="gemma4_text",
                                          num_global_key_value_heads=4, head_dim=256, global_head_dim=512,
                                          sliding_window=1024, layer_types=_WINDOWS * 10)},
    "gpt-oss-20b": config(2880, 24, 64, 8, 2880, 201088, 131072, model_type="gpt_oss", head_dim=64, sliding_window=128,
                          num_local_experts=32, num_experts_per_tok=4, attention_bias=True, tie_word_embeddings=False,
                          layer_types=["sliding_attention", "full_attention"] * 12),
    "qwen3-30b-a3b": config(2048, 48, 32, 4, 6144, 151936, 40960, model_type="qwen3_moe", head_dim=128,
                            moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1,
                            mlp_only_layers=[], tie_word_embeddings=False),
    "qwen3-235b-a22b": config(4096, 94, 64, 4, 12288, 151936, 40960, model_type="qwen3_moe", head_dim=128,
                              moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8),
    "qwen3-next-80b": config(2048, 48, 16, 2, 5120, 151936, 262144, model_type="qwen3_next", head_dim=256,
                             moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
                             num_experts_per_tok=10, full_attention_interval=4, tie_word_embeddings=False,
                             **delta_net(32)),
    "qwen3.8-27b": {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
                    "vision_config": {"hidden_size": 1152, "depth": 27, "intermediate_size": 4304},
                    "text_config": config(5120, 64, 24, 4, 17408, 248320, 262144, model_type="qwen3_5_text",
                                          head_dim=256, layer_types=_LINEAR * 16, mtp_num_hidden_layers=1,
                                          attn_output_gate=True, **delta_net(48))},
    "llama-4-scout": {"model_type": "llama4",
                      "text_config": config(5120, 48, 40, 8, 8192, 202048, 10485760, model_type="llama4_text",
                                            head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
                                            num_experts_per_tok=1, attention_chunk_size=8192)},
    "kimi-linear-48b": config(2304, 27, 32, 32, 9216, 163840, 1048576, model_type="kimi_linear", head_dim=72,
                              moe_intermediate_size=1024, num_experts=256, num_experts_per_token=8,
                              num_shared_experts=1, first_k_dense_replace=1, tie_word_embeddings=False, **latent(None),
                              linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
                                                  "num_heads": 32, "short_conv_kernel_size": 4}),
    "nemotron-h-8b": config(4096, 52, 32, 8, 21504, 131072, 8192, model_type="nemotron_h", head_dim=128, n_groups=8,
                            mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, conv_kernel=4,
                            hybrid_override_pattern=_NEMOTRON, tie_word_embeddings=False),
    "jamba-v0.1": config(4096, 32, 32, 8, 14336, 65536, 262144, model_type="jamba", num_experts=16,
                         num_experts_per_tok=2, attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2,
                         expert_layer_offset=1, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2, mamba_dt_rank=256,
                         tie_word_embeddings=False),
    "lfm2-1.2b": config(2048, 16, 32, 8, 12288, 65536, 128000, model_type="lfm2", block_ff_dim=12288,
                        block_auto_adjust_ff_dim=True, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
                        conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    "mamba-2.8b": {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 16,
                   "conv_kernel": 4, "intermediate_size": 5120, "time_step_rank": 160, "vocab_size": 50280},
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
             "n_positions": 1024},
    "falcon-7b": {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
                  "multi_query": True, "num_kv_heads": 71, "vocab_size": 65024, "max_position_embeddings": 2048},
    "granite-4-tiny": config(1536, 40, 12, 4, 512, 100352, 131072, model_type="granitemoehybrid", num_local_experts=62,
                             num_experts_per_tok=6, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64,
                             mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4,
                             layer_types=(["mamba"] * 5 + ["attention"]) + ["mamba"] * 34),
    "falcon-h1-0.5b": config(1024, 36, 8, 2, 2048, 32784, 16384, model_type="falcon_h1", head_dim=64,
                             mamba_d_ssm=1536, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_n_heads=24),
    "minimax-01": config(6144, 80, 64, 8, 9216, 200064, 10240000, model_type="minimax_text_01", head_dim=128,
                         num_local_experts=32, num_experts_per_tok=2, attn_type_list=([0] * 7 + [1]) * 10),
    "rwkv7-1.5b": {"model_type": "rwkv7", "hidden_size": 2048, "num_hidden_layers": 24, "head_dim": 64,
                   "vocab_size": 65536, "intermediate_size": 8192},
}  # fmt: skip

# What the models' own pages give, or their tables add up to: all tensors but layers for multi-token prediction.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
    "gemma-2-2b": 2_614_341_888,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b": 79_674_391_296,
    "jamba-v0.1": 51_570_323_328,
    "lfm2-1.2b": 1_170_340_608,
    "mamba-2.8b": 2_768_345_600,
    "gpt2": 124_439_808,
    "falcon-7b": 6_921_720_704,
}


def facts_of_config(name_or_config: str | Mapping[str, Any]) -> HfFacts:
    """The facts of a bare config."""
    found = CONFIGS[name_or_config] if isinstance(name_or_config, str) else name_or_config
    return facts_of_source(LocalModel(name="test", format="hf", files={}, config=json.dumps(found).encode()))


def table_of(figures: Mapping[str, Any], dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a llama-like model, with experts where the config has some."""
    width, heads, kv = figures["hidden_size"], figures["num_attention_heads"], figures["num_key_value_heads"]
    head, ff = width // heads, figures["intermediate_size"]
    table = {
        "model.embed_tokens.weight": (dtype, (figures["vocab_size"], width)),
        "model.norm.weight": (dtype, (width,)),
    }
    if not figures.get("tie_word_embeddings"):
        table["lm_head.weight"] = (dtype, (figures["vocab_size"], width))
    for il in range(figures["num_hidden_layers"]):
        layer = f"model.layers.{il}."
        table |= {
            f"{layer}{norm}.weight": (dtype, (width,)) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for name, rows in (("q", heads * head), ("k", kv * head), ("v", kv * head)):
            table[f"{layer}self_attn.{name}_proj.weight"] = (dtype, (rows, width))
        table[f"{layer}self_attn.o_proj.weight"] = (dtype, (width, heads * head))
        for expert in range(figures.get("num_experts", 0)):
            table |= _feed_forward(f"{layer}mlp.experts.{expert}.", width, figures["moe_intermediate_size"], dtype)
        if "num_experts" in figures:
            table[f"{layer}mlp.gate.weight"] = (dtype, (figures["num_experts"], width))
        else:
            table |= _feed_forward(f"{layer}mlp.", width, ff, dtype)
    return table


def _feed_forward(before: str, width: int, ff: int, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    shapes = {"gate_proj": (ff, width), "up_proj": (ff, width), "down_proj": (width, ff)}
    return {f"{before}{name}.weight": (dtype, shape) for name, shape in shapes.items()}


def safetensors_header(table: Table) -> tuple[bytes, int]:
    """The header of a file with these tensors, its length in front, and the bytes of its data."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in table.items():
        n_bytes = -(-prod(shape) * DTYPE_BITS[dtype] // 8)
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(rows, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text, end


def write_safetensors(path: Path, table: Table) -> int:
    """A file whose weights are a hole. Returns the bytes of its tensors."""
    header, data_bytes = safetensors_header(table)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + data_bytes)
    return data_bytes


def write_model(folder: Path, figures: Mapping[str, Any], table: Table, n_files: int = 1) -> int:
    """A model folder. Returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(figures))
    if n_files == 1:
        return write_safetensors(folder / "model.safetensors", table)
    names, total, weight_map = list(table), 0, {}
    each = -(-len(names) // n_files)
    for number in range(n_files):
        file = f"model-{number + 1:05d}-of-{n_files:05d}.safetensors"
        part = names[number * each : (number + 1) * each]
        total += write_safetensors(folder / file, {name: table[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
