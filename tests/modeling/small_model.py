"""A tiny random Laya model and a tokenizer for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from laya.modeling import LayaConfig, LayaForCausalLM
from laya.modeling.export import _SAMPLE

VOCAB = 400


def small(**kwargs: object) -> LayaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.1,
    }
    return LayaForCausalLM(LayaConfig(**sizes | kwargs)).eval()


def write_tokenizer(path: Path) -> Path:
    """A byte-level BPE of `VOCAB` tokens; 0 begins a text, 1 ends one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([_SAMPLE.read_text()], trainer)
    tokenizer.save(str(path))
    return path
