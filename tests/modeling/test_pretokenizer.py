"""A tokenizer of each kind that is known gives the same tokens in llama.cpp, and read back from the file it gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from laya.modeling import LayaConfig, LayaForCausalLM, pretokenizer
from laya.modeling.gguf_file import write_gguf
from laya.quantization.llama_api import Evaluator
from laya.texts import load_set
from laya.training.parent import Header
from laya.training.parent_tokenizer import tokenizer_json

VOCAB = 400

TRICKY = "It's 12345 o'clock,  don't\n\n\tgo: naïve 漢字 🙂 x=[1,2]; <|im_start|>user\nHi<tool><|im_end|>\n"


def trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in pretokenizer.IGNORES_MERGES))
    tokenizer.decoder = decoders.ByteLevel()
    steps = json.loads(tokenizer.to_str()) | {"pre_tokenizer": pretokenizer.STEPS[pre]}
    tokenizer = Tokenizer.from_str(json.dumps(steps))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 1,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([document.text[:4000] for document in load_set("mixed")], trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", pretokenizer.STEPS)
def test_tokens_are_those_of_llama_cpp_and_stay_when_read_back(pre: str, tmp_path: Path) -> None:
    tokenizer, path = trained(pre), tmp_path / "small.gguf"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LayaForCausalLM(LayaConfig(vocab_size=VOCAB, num_hidden_layers=1, bos_token_id=0, eos_token_id=1, **sizes))
    write_gguf(model, tmp_path / "tokenizer.json", path)
    evaluator = Evaluator(path, n_ctx=8, n_threads=1)
    read = Tokenizer.from_str(json.dumps(tokenizer_json(Header(path))))
    for text in [TRICKY, *(document.text[:6000] for document in load_set("mixed"))]:
        ids = tokenizer.encode(text).ids
        assert evaluator.tokens_of(text) == ids == read.encode(text).ids
        assert read.decode(ids, skip_special_tokens=False) == text
    evaluator.close()
    added = {token.content: token.special for token in read.get_added_tokens_decoder().values()}
    assert added == {"<s>": True, "</s>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool>": False}


def test_other_splits_have_no_name() -> None:
    with_space = pretokenizer.STEPS["gpt-2"] | {"add_prefix_space": True}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for steps in (None, {"type": "Whitespace"}, with_space, whole):
        assert pretokenizer.name_of(steps) is None
    assert pretokenizer.name_of({"type": "ByteLevel", "add_prefix_space": False}) == "gpt-2"
