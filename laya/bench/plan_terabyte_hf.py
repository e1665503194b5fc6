"""Owns: what planning a Hugging Face model of a terabyte costs: 62 files whose headers are real and weights holes.

    python -m laya.bench.plan_terabyte_hf       one JSON line: seconds and peak MiB of a fresh process

Unlike a GGUF, each expert is tensors of its own: 61 layers x 384 experts x 3 matrices, each with its scales, are
139 000 tensors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from laya.bench.fresh_plan import report

N_LAYER, N_EXPERT, N_EMBD, N_FF, N_FF_EXPERT, N_VOCAB, N_FILES = 61, 384, 7168, 18432, 2048, 163840, 62
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": N_EMBD, "num_hidden_layers": N_LAYER, "num_attention_heads": 64, "num_key_value_heads": 64,
    "intermediate_size": N_FF, "moe_intermediate_size": N_FF_EXPERT, "n_routed_experts": N_EXPERT,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": N_VOCAB,
    "max_position_embeddings": 131072, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
Tensor = tuple[str, str, tuple[int, ...]]


def write_model(folder: Path) -> int:
    """Write config, index and files into the folder; on a disk they take what their headers take. Returns all bytes."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = list(_tensors())
    each, total = -(-len(tensors) // N_FILES), 0
    weight_map: dict[str, str] = {}
    for number in range(N_FILES):
        name = f"model-{number + 1:05d}-of-{N_FILES:05d}.safetensors"
        part = tensors[number * each : (number + 1) * each]
        total += _write_file(folder / name, part)
        weight_map |= {tensor: name for tensor, _, _ in part}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _tensors() -> Iterator[Tensor]:
    yield "model.embed_tokens.weight", "BF16", (N_VOCAB, N_EMBD)
    yield "lm_head.weight", "BF16", (N_VOCAB, N_EMBD)
    attention = {"q_a_proj": (1536, N_EMBD), "q_b_proj": (12288, 1536), "kv_a_proj_with_mqa": (576, N_EMBD),
                 "kv_b_proj": (16384, 512), "o_proj": (N_EMBD, 8192)}  # fmt: skip
    for il in range(N_LAYER):
        layer = f"model.layers.{il}."
        yield f"{layer}input_layernorm.weight", "BF16", (N_EMBD,)
        for name, shape in attention.items():
            yield from _scaled(f"{layer}self_attn.{name}.weight", shape)
        if il == 0:
            yield from _feed_forward(f"{layer}mlp.", N_FF)
            continue
        yield f"{layer}mlp.gate.weight", "BF16", (N_EXPERT, N_EMBD)
        yield from _feed_forward(f"{layer}mlp.shared_experts.", N_FF_EXPERT)
        for expert in range(N_EXPERT):
            yield from _feed_forward(f"{layer}mlp.experts.{expert}.", N_FF_EXPERT)


def _feed_forward(before: str, width: int) -> Iterator[Tensor]:
    for name, shape in (("gate", (width, N_EMBD)), ("up", (width, N_EMBD)), ("down", (N_EMBD, width))):
        yield from _scaled(f"{before}{name}_proj.weight", shape)


def _scaled(name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    yield name, "F8_E4M3", shape
    yield f"{name}_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))


def _write_file(path: Path, tensors: list[Tensor]) -> int:
    rows, end = {}, 0
    for name, dtype, shape in tensors:
        first, end = end, end + prod(shape) * BYTES[dtype]
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    header = json.dumps(rows, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return end


def main() -> int:
    """Print the median of some plans as one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        print(report("plan_terabyte_hf", Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
