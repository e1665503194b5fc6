"""Owns: a parent's tokenizer and chat template, as files in the folder of the model that is made of it.

From a GGUF header a tokenizer.json is built that gives the tokens llama.cpp gives; of a Hugging Face folder the files
are taken as they are. Knows nothing of weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer

from laya.errors import BadModelFile
from laya.modeling import pretokenizer
from laya.training.parent import GgufParent, Header, Parent

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_of(parent: Parent) -> Tokenizer:
    """Raises BadModelFile where the parent has none that is known here."""
    if isinstance(parent, GgufParent):
        return Tokenizer.from_str(json.dumps(tokenizer_json(parent.header)))
    file = parent.path / "tokenizer.json"
    if not file.is_file():
        raise BadModelFile(f"{parent.path} has no tokenizer.json")
    return Tokenizer.from_file(str(file))


def write_tokenizer(parent: Parent, folder: Path, chat_template: str | None = None) -> None:
    """chat_template: in place of the parent's own."""
    if isinstance(parent, GgufParent):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(parent.header), ensure_ascii=False), "utf-8")
        tokens = parent.header.value("tokenizer.ggml.tokens")
        numbers = {role: parent.header.value(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": parent.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        } | {role: tokens[number] for role, number in numbers.items() if number is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), "utf-8")
        template = chat_template or parent.header.value("tokenizer.chat_template")
    else:
        for name in _FILES:
            if (parent.path / name).is_file():
                shutil.copy(parent.path / name, folder / name)
        template = chat_template or _template_in_settings(parent.path / "tokenizer_config.json")
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")


def _template_in_settings(file: Path) -> str | None:
    """Where folders had it before it was a file of its own."""
    template = json.loads(file.read_text("utf-8")).get("chat_template") if file.is_file() else None
    return template if isinstance(template, str) else None


def tokenizer_json(header: Header) -> dict[str, Any]:
    """Raises BadModelFile for a kind, or a way to split, that is not known here."""
    kind, pre = header.value("tokenizer.ggml.model"), header.value("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in pretokenizer.STEPS:
        raise BadModelFile(
            f"{header.path} has a tokenizer of kind '{kind}' that splits as '{pre}'; read from GGUF are those of kind "
            f"'gpt2' that split as {', '.join(pretokenizer.STEPS)}. Its Hugging Face folder has it as a file."
        )
    tokens: list[str] = header.value("tokenizer.ggml.tokens")
    kinds: list[int] = header.value("tokenizer.ggml.token_type")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(number, token, is_special=of_token == gguf.TokenType.CONTROL)
            for number, (token, of_token) in enumerate(zip(tokens, kinds, strict=True))
            if of_token in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": pretokenizer.STEPS[pre],
        "post_processor": _post_processor(header, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in pretokenizer.IGNORES_MERGES,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in header.value("tokenizer.ggml.merges")],
        },
    }


def _added(number: int, token: str, *, is_special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": is_special}


def _post_processor(header: Header, tokens: list[str]) -> dict[str, Any] | None:
    """What puts the first token before a text, where the parent asks for it."""
    number = header.value("tokenizer.ggml.bos_token_id")
    if number is None or not header.value("tokenizer.ggml.add_bos_token", _adds_bos(header)):
        return None
    begin = {"SpecialToken": {"id": tokens[number], "type_id": 0}}
    first, second = ({"Sequence": {"id": text, "type_id": kind}} for text, kind in (("A", 0), ("B", 1)))
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}},
    }


def _adds_bos(header: Header) -> bool:
    """llama.cpp's own choice where a file says nothing."""
    return bool(header.value("tokenizer.ggml.pre") == "llama-bpe")
