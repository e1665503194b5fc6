"""A small dense llama-family model of random weights, as a Hugging Face folder and as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from laya.modeling.pretokenizer import STEPS
from laya.texts import load_set

VOCAB, TEMPLATE = 300, "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}<answer>"
_PRE = "smollm"


def dense(**kwargs: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | kwargs)).eval()


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.decoder = decoders.ByteLevel()
    made = Tokenizer.from_str(json.dumps(json.loads(made.to_str()) | {"pre_tokenizer": STEPS[_PRE]}))
    special = ["<s>", "</s>", "<user>", "<answer>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([document.text for document in load_set("mixed")], trainer)
    return made


def write_folder(path: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def write_gguf(path: Path, model: LlamaForCausalLM) -> Path:
    """As llama.cpp's converter does it, in Q8_0: rotary pairs side by side."""
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    words = json.loads(tokenizer().to_str())
    tokens = sorted(words["model"]["vocab"], key=words["model"]["vocab"].__getitem__)
    special = {entry["id"] for entry in words["added_tokens"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE)
    writer.add_token_list(tokens)
    writer.add_token_types([control if number in special else normal for number in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in words["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        n_heads = next((n_heads for part, n_heads in heads.items() if part in name), None)
        values = (tensor if n_heads is None else _paired(tensor, n_heads)).numpy()
        kind = gguf.GGMLQuantizationType.F32 if tensor.dim() == 1 else gguf.GGMLQuantizationType.Q8_0
        found = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _paired(weight: Tensor, n_heads: int) -> Tensor:
    """llama.cpp's LlamaModel.permute."""
    return weight.reshape(n_heads, 2, len(weight) // n_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
