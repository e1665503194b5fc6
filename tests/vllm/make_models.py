"""Writes small Hugging Face models with weights of chance.

    python -m tests.vllm.make_models FOLDER

A dense Llama, a LayaForCausalLM with eight experts and what `laya export --to mixtral` makes of it, the dense one in 4
bits as GPTQ and as AWQ pack it, and the dense one less one tensor. Their tokenizer is a real byte-level BPE, learned
from the docs, with a chat template that knows tools in Hermes' form. What they say means nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from laya.modeling import LayaConfig, LayaForCausalLM
from laya.modeling.export import export_mixtral

N_VOCAB, N_CTX_TRAIN, WIDTH = 2048, 4096, 256
GROUP, PER_WORD, MOST = 64, 8, 15  # weights that share a scale; nibbles of 32 bits
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble of a word -> column
TEMPLATE = """{%- if tools %}<|im_start|>system
You may call functions: {{ tools | tojson }}
Answer a call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT = (Path(__file__).parents[2] / "docs").glob("*.md")


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([path.read_text() for path in sorted(TEXT)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


FIGURES = {
    "vocab_size": N_VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": N_CTX_TRAIN, "bos_token_id": 0,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


# As laya-nano: a tied head, experts as wide as what they are in
LAYA = FIGURES | {
    "intermediate_size": WIDTH, "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True,
    "initializer_range": 0.1,
}  # fmt: skip


def write(
    folder: Path, model: torch.nn.Module, words: PreTrainedTokenizerFast, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Only words are likely: what the vocabulary learned changes with the docs, and a special token has no text."""
    is_word = [
        name.strip("Ġ").isascii() and name.strip("Ġ").isalpha() for name in words.convert_ids_to_tokens(range(N_VOCAB))
    ]
    with torch.no_grad():
        model.lm_head.weight[~torch.tensor(is_word)] = 0
    model.to(dtype).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def quantize(folder: Path, dense: Path, method: str) -> None:
    """The dense model with its linear layers rounded to 4 bits, group by group."""
    shutil.copytree(dense, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = tensor.to(torch.float16)
            continue
        stem = name.removesuffix(".weight")
        levels, scales, zeros = _rounded(tensor.float(), is_symmetric=method == "gptq")
        packed = PACKERS[method](levels, scales, zeros)
        tensors |= {f"{stem}.{key}": value.contiguous() for key, value in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = "float16"
    config.pop("dtype", None)
    config["quantization_config"] = QUANTIZATION[method]
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _rounded(weight: torch.Tensor, *, is_symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] -> levels [in, out], scales and zero points [in / group, out]."""
    rows = weight.t().reshape(-1, GROUP, weight.shape[0])
    low, high = rows.amin(1), rows.amax(1)
    if is_symmetric:  # the only kind that vLLM runs of GPTQ: the zero point in the middle
        low, high = -rows.abs().amax(1) * 16 / 15, rows.abs().amax(1) * 14 / 15
    scales = ((high - low) / MOST).clamp(min=1e-6)
    zeros = (-low / scales).round().clamp(1, MOST)
    levels = (rows / scales[:, None] + zeros[:, None]).round().clamp(0, MOST)
    return levels.reshape(-1, weight.shape[0]).int(), scales.half(), zeros.int()


def _packed(levels: torch.Tensor, order: tuple[int, ...] = tuple(range(PER_WORD))) -> torch.Tensor:
    """Eight columns in a word."""
    parts = levels.reshape(levels.shape[0], -1, PER_WORD).to(torch.int64)
    words = sum(parts[:, :, column] << 4 * nibble for nibble, column in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _gptq(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "qweight": _packed(levels.t()).t(),
        "qzeros": _packed(zeros - 1),  # the format's own: a zero point is kept less one
        "scales": scales,
        "g_idx": (torch.arange(levels.shape[0]) // GROUP).int(),
    }


def _awq(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"qweight": _packed(levels, AWQ_ORDER), "qzeros": _packed(zeros, AWQ_ORDER), "scales": scales}


PACKERS = {"gptq": _gptq, "awq": _awq}
QUANTIZATION = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def cut(folder: Path, dense: Path, name: str) -> None:
    """The dense model without one of its tensors."""
    shutil.copytree(dense, folder)
    tensors = load_file(dense / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    words = tokenizer()
    dense = write(folder / "dense", LlamaForCausalLM(LlamaConfig(**FIGURES)), words)
    laya = write(folder / "laya", LayaForCausalLM(LayaConfig(**LAYA)), words, torch.float32)
    export_mixtral(laya, folder / "moe")
    for method in PACKERS:
        quantize(folder / method, dense, method)
    cut(folder / "not-whole", dense, "model.layers.1.mlp.down_proj.weight")
    (folder / ".made").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
