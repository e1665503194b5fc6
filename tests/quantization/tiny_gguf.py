"""Models of a few hundred kilobytes with random weights, alike on every machine, that llama.cpp loads and runs."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

F16, F32 = np.float16, np.float32


def write_tiny(
    path: Path,
    *,
    width: int = 256,
    n_layers: int = 3,
    n_experts: int = 0,
    tied: bool = True,
    kind: type[np.floating] = F16,
    n_vocab: int = 320,
    tensors_per_file: int = 0,
    seed: int = 0,
) -> Path:
    """A llama, with experts where n_experts > 0. tensors_per_file > 0: split. Gives the path of its (first) file."""
    random = np.random.RandomState(seed)  # whose numbers no version of numpy changes
    n_head, n_head_kv, ff = 4, 2, width if n_experts else 2 * width
    head = width // n_head
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_file)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if kind is F16 else gguf.LlamaFileType.ALL_F32)
    for add, value in (
        (writer.add_block_count, n_layers),
        (writer.add_context_length, 2048),
        (writer.add_embedding_length, width),
        (writer.add_feed_forward_length, ff),
        (writer.add_head_count, n_head),
        (writer.add_head_count_kv, n_head_kv),
        (writer.add_rope_dimension_count, head),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, n_vocab),
    ):
        add(value)
    if n_experts:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(2)
    _put_tokenizer(writer, n_vocab)

    def matrix(name: str, *shape: int, of: type[np.floating] = kind) -> None:
        values = random.standard_normal(shape).astype(F32) * F32(0.5 / np.sqrt(shape[-1]))
        writer.add_tensor(f"{name}.weight", values.astype(of))

    matrix("token_embd", n_vocab, width)
    if not tied:
        matrix("output", n_vocab, width)
    writer.add_tensor("output_norm.weight", np.ones(width, F32))
    for layer in range(n_layers):
        own = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{own}{norm}.weight", np.ones(width, F32))
        matrix(own + "attn_q", width, width)
        matrix(own + "attn_k", n_head_kv * head, width)
        matrix(own + "attn_v", n_head_kv * head, width)
        matrix(own + "attn_output", width, width)
        experts = (n_experts,) if n_experts else ()
        suffix = "_exps" if n_experts else ""
        if n_experts:
            matrix(own + "ffn_gate_inp", n_experts, width, of=F32)
        matrix(own + "ffn_gate" + suffix, *experts, ff, width)
        matrix(own + "ffn_up" + suffix, *experts, ff, width)
        matrix(own + "ffn_down" + suffix, *experts, width, ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf")))) if tensors_per_file else path


def _put_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Every byte is a token; texts are cut as GPT-2 does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<s>", "</s>"]
    tokens += [f"[unused{number}]" for number in range(len(tokens), n_vocab)]
    kinds = [gguf.TokenType.NORMAL] * len(alphabet) + [gguf.TokenType.CONTROL] * 2
    kinds += [gguf.TokenType.UNUSED] * (n_vocab - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
