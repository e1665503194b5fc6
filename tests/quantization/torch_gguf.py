"""A GGUF file of architecture `llama` with experts as transformers' Mixtral: another program's numbers of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

_OWN = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.gate", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
}  # fmt: skip


def mixtral_of(path: Path) -> MixtralForCausalLM:
    """In float32, quantized tensors unpacked by gguf's own code."""
    reader = gguf.GGUFReader(path)
    tensors = {
        tensor.name.removesuffix(".weight"): torch.from_numpy(
            gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )
        for tensor in reader.tensors
    }

    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads, head = (
        number("attention.head_count"),
        number("attention.head_count_kv"),
        number("rope.dimension_count"),
    )
    config = MixtralConfig(
        vocab_size=len(tensors["token_embd"]),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        num_local_experts=number("expert_count"),
        num_experts_per_tok=number("expert_used_count"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings="output" not in tensors,
    )
    state = {
        "model.embed_tokens.weight": tensors["token_embd"],
        "model.norm.weight": tensors["output_norm"],
        "lm_head.weight": tensors.get("output", tensors["token_embd"]),
    }
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        state |= {f"{theirs}{name}.weight": tensors[ours + own] for own, name in _OWN.items()}
        for name, n_heads in (("q", heads), ("k", kv_heads)):
            key = f"{theirs}self_attn.{name}_proj.weight"
            state[key] = _in_halves(state[key], n_heads)
        gate_up = [tensors[f"{ours}ffn_{part}_exps"] for part in ("gate", "up")]
        state[f"{theirs}mlp.experts.gate_up_proj"] = torch.cat(gate_up, 1)
        state[f"{theirs}mlp.experts.down_proj"] = tensors[f"{ours}ffn_down_exps"]
    model = MixtralForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def _in_halves(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of each head from pairs, as llama.cpp turns them, to first half and second half."""
    n_rows, width = weight.shape
    return weight.view(n_heads, n_rows // n_heads // 2, 2, width).transpose(1, 2).reshape(n_rows, width)
