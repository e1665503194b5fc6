"""Owns: a dense model of the llama family as what an upcycled model starts from: settings, and tensors one at a time.

A parent is a GGUF file, whose matrices are dequantized to float32, or a Hugging Face folder of safetensors. Both give
Hugging Face's names and row order. Nothing is kept but open files, so that a parent costs no more than what is asked of
it. Knows nothing of experts.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from laya.errors import BadModelFile
from laya.memory import read_header

_FAMILY = "llama"
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_TENSORS = tuple(f"{name}.weight" for name in _OF_LAYER)


class Parent(Protocol):
    """A dense model whose tensors are read when they are asked for."""

    path: Path
    name: str
    licence: str | None
    config: LlamaConfig

    def tensor(self, name: str) -> Tensor:
        """Float32, by Hugging Face's name (`model.layers.0.mlp.up_proj.weight`)."""
        ...

    def sha256(self) -> str:
        """Of the file, or of the folder's weight files one after the other."""
        ...


def open_parent(path: Path) -> Parent:
    """Raises BadModelFile for what is no dense model of the llama family."""
    return FolderParent(path) if path.is_dir() else GgufParent(path)


def layer_state(parent: Parent, index: int) -> dict[str, Tensor]:
    """A layer's tensors by their names within it."""
    return {name: parent.tensor(f"model.layers.{index}.{name}") for name in LAYER_TENSORS}


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


class Header:
    """A GGUF file's keys and tensors."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise BadModelFile(f"{path} is no GGUF file and no folder of a model")
        self.path = path
        read_header(path)  # which says what is wrong with a file that is cut off; gguf's reader stumbles
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise BadModelFile(f"{path} is no GGUF file: {error}") from None
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()


class GgufParent:
    """A file of llama.cpp's architecture `llama`, without experts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = Header(path)
        family = self.header.value("general.architecture")
        if family != _FAMILY:
            raise BadModelFile(f"{path} is of architecture '{family}'; what is upcycled is '{_FAMILY}'")
        if self.header.value("llama.expert_count", 0):
            raise BadModelFile(
                f"{path} has {self.header.value('llama.expert_count')} experts already: a parent is dense"
            )
        unknown = [name for name in self.header.tensors if not _is_known(name)]
        if unknown:
            raise BadModelFile(f"{path} has tensors that an upcycled model has no place for: {', '.join(unknown[:3])}")
        scaling = self.header.value("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise BadModelFile(f"{path} scales its rotary embedding ('{scaling}'), which an upcycled model does not")
        self.name = str(self.header.value("general.name", path.stem))
        self.licence = self.header.value("general.license")
        self.config = self._config()

    def _config(self) -> LlamaConfig:
        def setting(key: str, default: Any = None) -> Any:
            return self.header.value(f"llama.{key}", default)

        n_heads = setting("attention.head_count")
        hidden = setting("embedding_length")
        head_dim = setting("attention.key_length", setting("rope.dimension_count", hidden // n_heads))
        return LlamaConfig(
            vocab_size=int(self.header.tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden,
            intermediate_size=setting("feed_forward_length"),
            num_hidden_layers=setting("block_count"),
            num_attention_heads=n_heads,
            num_key_value_heads=setting("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            max_position_embeddings=setting("context_length"),
            rms_norm_eps=setting("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": setting("rope.freq_base", 10000.0)},
            tie_word_embeddings="output.weight" not in self.header.tensors,
            bos_token_id=self.header.value("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.header.value("tokenizer.ggml.eos_token_id"),
            pad_token_id=self.header.value("tokenizer.ggml.padding_token_id"),
        )

    def tensor(self, name: str) -> Tensor:
        found = self.header.tensors[_gguf_name(name)]
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        tensor = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: off the file's map
        for part, n_heads in (
            ("q_proj", self.config.num_attention_heads),
            ("k_proj", self.config.num_key_value_heads),
        ):
            if part in name:
                tensor = _in_halves(tensor, n_heads)
        return tensor

    def sha256(self) -> str:
        return _sha256([self.path])


def _is_known(name: str) -> bool:
    stem = name.removesuffix(".weight")
    if stem.startswith("blk."):
        return stem.split(".", 2)[2] in _OF_LAYER.values()
    return stem in _OF_MODEL.values()


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _OF_MODEL:
        return f"{_OF_MODEL[stem]}.weight"
    index, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{_OF_LAYER[part]}.weight"


def _in_halves(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of each head from pairs, as llama.cpp has them, to first half and second half."""
    n_rows, width = weight.shape
    return weight.view(n_heads, n_rows // n_heads // 2, 2, width).transpose(1, 2).reshape(n_rows, width)


class FolderParent:
    """A Hugging Face folder of model type `llama`."""

    def __init__(self, path: Path) -> None:
        config = path / "config.json"
        if not config.is_file():
            raise BadModelFile(f"{path} is no folder of a model: there is no {config}")
        try:
            settings: dict[str, Any] = json.loads(config.read_text())
            family = settings.get("model_type")
        except (ValueError, AttributeError):
            raise BadModelFile(f"{config} is no configuration of a model") from None
        if family != _FAMILY:
            n_experts = settings.get("num_local_experts") or settings.get("num_experts")
            has_experts = f", with {n_experts} experts" if n_experts else ""
            raise BadModelFile(
                f"{config}: model_type is '{family}'{has_experts}; what is upcycled is dense '{_FAMILY}'"
            )
        self.path = path
        self.name = path.resolve().name
        self.licence = settings.get("license")
        self.config = LlamaConfig.from_pretrained(path)
        scaling = self.config.rope_parameters.get("rope_type", "default")
        if scaling != "default":
            raise BadModelFile(f"{config} scales its rotary embedding ('{scaling}'), which an upcycled model does not")
        for key in ("attention_bias", "mlp_bias"):
            if getattr(self.config, key):
                raise BadModelFile(f"{config}: {key} is true; an upcycled model has no such bias")
        self._files = sorted(path.glob("*.safetensors"))
        if not self._files:
            raise BadModelFile(f"{path} has no safetensors file")
        self._of: dict[str, Path] = {}
        for file in self._files:
            with safe_open(file, framework="pt") as opened:
                self._of |= dict.fromkeys(opened.keys(), file)

    def tensor(self, name: str) -> Tensor:
        if name not in self._of:
            raise BadModelFile(f"{self.path} has no tensor {name}")
        with ExitStack() as stack:
            opened = stack.enter_context(safe_open(self._of[name], framework="pt"))
            tensor: Tensor = opened.get_tensor(name)
            return tensor.to(torch.float32).clone()

    def sha256(self) -> str:
        return _sha256(self._files)
