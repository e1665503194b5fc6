"""Small GGUF files for tests, written by the `gguf` package: a llama-like tensor table over a hole full of zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

MakeGguf = Callable[..., Path]
QUANTS = gguf.GGMLQuantizationType


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    n_layer: int = 2,
    n_embd: int = 256,
    n_head: int = 4,
    n_head_kv: int | Sequence[int] = 2,
    head_dim: int = 64,
    n_ff: int = 512,
    n_vocab: int = 320,
    n_ctx_train: int = 32768,
    weights: str = "Q8_0",
    tied: bool = True,
    split: tuple[int, int] | None = None,
    keys: dict[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    for key, value in (keys or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key if key.startswith("general.") else f"{architecture}.{key}", value)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    add_vocabulary(writer, n_vocab)
    kv_width = (n_head_kv if isinstance(n_head_kv, int) else max(n_head_kv)) * head_dim
    add_tensor(writer, "token_embd.weight", (n_embd, n_vocab), weights)
    if not tied:
        add_tensor(writer, "output.weight", (n_embd, n_vocab), weights)
    for layer in range(n_layer):
        for name, table in (
            ("attn_norm", (n_embd,)),
            ("ffn_norm", (n_embd,)),
            ("attn_q", (n_embd, n_head * head_dim)),
            ("attn_k", (n_embd, kv_width)),
            ("attn_v", (n_embd, kv_width)),
            ("attn_output", (n_head * head_dim, n_embd)),
            ("ffn_gate", (n_embd, n_ff)),
            ("ffn_up", (n_embd, n_ff)),
            ("ffn_down", (n_ff, n_embd)),
        ):
            add_tensor(writer, f"blk.{layer}.{name}.weight", table, weights if len(table) == 2 else "F32")
    add_tensor(writer, "output_norm.weight", (n_embd,), "F32")
    finish(writer)
    return path


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A byte-level BPE vocabulary that the engine can load: 256 bytes, then words."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = ["<|end|>", *letters, *(f"word{n}" for n in range(n_vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words[:n_vocab])
    writer.add_token_types([3] + [1] * (n_vocab - 1))
    writer.add_token_merges(["w o", "r d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def add_tensor(writer: gguf.GGUFWriter, name: str, table: tuple[int, ...], type_name: str) -> None:
    """A row of the tensor table; `table` in ggml's order, the row length first."""
    kind = QUANTS[type_name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_bytes = int(np.prod(table)) // block * block_bytes
    shape = list(reversed(table))
    if kind in (QUANTS.F32, QUANTS.F16):
        writer.add_tensor_info(name, shape, np.dtype(np.float32 if kind == QUANTS.F32 else np.float16), n_bytes)
    else:
        shape[-1] = table[0] // block * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), n_bytes, raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the header; the data becomes a hole of the right size."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    file.flush()
    alignment = writer.data_alignment
    data_bytes = sum(-(-tensor.nbytes // alignment) * alignment for tensor in writer.tensors[0].values())
    file.truncate(-(-file.tell() // alignment) * alignment + data_bytes)
    writer.close()
