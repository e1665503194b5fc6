"""Owns: a Laya model as a GGUF file, under the architecture `llama`, which llama.cpp serves.

That architecture's router is softmax, top-k, renormalised, without biases: what a model has beyond that is refused, as
the file would compute something else. Rotary pairs lie side by side there, so query and key rows are reordered.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from torch import Tensor

from laya.modeling import pretokenizer
from laya.modeling.model import LayaForCausalLM
from laya.modeling.router import LayaRouter

ARCHITECTURE = "llama"
TYPES = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16}
_FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16}
_NORMAL, _CONTROL, _UNUSED = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED


def write_gguf(
    model: LayaForCausalLM,
    tokenizer_file: Path,
    path: Path,
    *,
    kind: Literal["f32", "f16"] = "f16",
    name: str = "laya",
    chat_template: str | None = None,
) -> None:
    """tokenizer_file: a byte-level BPE's tokenizer.json. The file is there when it is whole.

    Routers, norms and everything of one dimension stay in float32. Raises ValueError where llama.cpp's `llama` computes
    something else than this model, or its tokenizer is of another kind.
    """
    check_router(model)
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURE)
    try:
        _put_settings(writer, model, kind, name)
        _put_tokenizer(writer, json.loads(tokenizer_file.read_text()), model.config)
        if chat_template is not None:
            writer.add_chat_template(chat_template)
        for tensor_name, tensor in _tensors(model):
            is_small = tensor.dim() == 1 or "ffn_gate_inp" in tensor_name
            values = tensor.detach().to(torch.float32).contiguous().numpy()
            writer.add_tensor(tensor_name, values if is_small or kind == "f32" else values.astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_router(model: LayaForCausalLM) -> None:
    """Raises ValueError where a layer's router is not softmax, top-k, renormalised, without biases."""
    for index, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate  # type: ignore[union-attr]
        if not isinstance(gate, LayaRouter):
            raise ValueError(f"layer {index} has a router of its own, {type(gate).__name__}: only torch runs it")
        rule = gate.rule
        for what, differs in (
            (f"score_func '{rule.score_func}'", rule.score_func != "softmax"),
            ("renormalize false", not rule.renormalize and rule.score_scope == "all"),
            (f"routed_scaling_factor {rule.routed_scaling_factor}", rule.routed_scaling_factor != 1.0),
            (f"{rule.n_group} groups", rule.is_grouped),
            ("a bias of the logits", _is_set(gate.logit_bias)),
            ("a choice bias", _is_set(gate.choice_bias)),
            ("a scale of its experts", gate.expert_scale is not None and bool((gate.expert_scale != 1).any())),
            ("a norm of its input", gate.input_scale is not None),
        ):
            if differs:
                raise ValueError(
                    f"layer {index}'s router has {what}, which llama.cpp's '{ARCHITECTURE}' does not compute"
                )


def _is_set(vector: Tensor | None) -> bool:
    return vector is not None and bool(vector.any())


def _head_dim(config: Any) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _put_settings(writer: gguf.GGUFWriter, model: LayaForCausalLM, kind: str, name: str) -> None:
    config = model.config
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_vocab_size(config.vocab_size)


def _put_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: Any) -> None:
    pre = pretokenizer.name_of(tokenizer.get("pre_tokenizer"))
    if (tokenizer.get("model") or {}).get("type") != "BPE" or pre is None:
        raise ValueError(
            f"tokenizer.json is no byte-level BPE that splits as {' or '.join(pretokenizer.STEPS)} does, without a "
            "space before the text: llama.cpp would split otherwise"
        )
    added = {entry["id"]: entry for entry in tokenizer.get("added_tokens", [])}
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    words |= {number: entry["content"] for number, entry in added.items()}
    tokens, kinds = [], []
    for number in range(config.vocab_size):
        tokens.append(words.get(number, f"[unused{number}]"))
        kinds.append(_UNUSED if number not in words else _kind_of_added(added[number]) if number in added else _NORMAL)
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for add, number in (
        (writer.add_bos_token_id, config.bos_token_id),
        (writer.add_eos_token_id, config.eos_token_id),
        (writer.add_pad_token_id, config.pad_token_id),
    ):
        if number is not None:
            add(number if isinstance(number, int) else number[0])
    writer.add_add_bos_token(_begins_with_bos(tokenizer))


def _kind_of_added(entry: dict[str, Any]) -> gguf.TokenType:
    return _CONTROL if entry.get("special", True) else gguf.TokenType.USER_DEFINED


def _begins_with_bos(tokenizer: dict[str, Any]) -> bool:
    """Whether the template of a single text puts a token before it."""
    processor = tokenizer.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    return any("SpecialToken" in step["single"][0] for step in steps if step.get("type") == "TemplateProcessing")


def _tensors(model: LayaForCausalLM) -> list[tuple[str, Tensor]]:
    config, decoder = model.config, model.model
    found: list[tuple[str, Tensor]] = [("token_embd.weight", decoder.embed_tokens.weight)]
    for index, layer in enumerate(decoder.layers):
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        gate_up: Tensor = mlp.experts.gate_up_proj
        own: dict[str, Any] = {
            "attn_norm": layer.input_layernorm.weight,  # type: ignore[union-attr]
            "attn_q": _side_by_side(attention.q_proj.weight, config.num_attention_heads),
            "attn_k": _side_by_side(attention.k_proj.weight, config.num_key_value_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,  # type: ignore[union-attr]
            "ffn_gate_inp": mlp.gate.folded_weight(),
            "ffn_gate_exps": gate_up[:, : config.intermediate_size],
            "ffn_up_exps": gate_up[:, config.intermediate_size :],
            "ffn_down_exps": mlp.experts.down_proj,
        }
        found += [(f"blk.{index}.{name}.weight", tensor) for name, tensor in own.items()]
    found.append(("output_norm.weight", decoder.norm.weight))
    if not config.tie_word_embeddings:
        found.append(("output.weight", model.lm_head.weight))
    return found


def _side_by_side(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of each head from first half and second half to pairs."""
    n_rows, width = weight.shape
    return weight.view(n_heads, 2, n_rows // n_heads // 2, width).transpose(1, 2).reshape(n_rows, width)
