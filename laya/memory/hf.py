"""Owns: the facts of a Hugging Face model, from its config.json and the headers of its safetensors files.

On this disk or wherever a `ModelSource` reads; without files the weights are computed from the config, and said to be.
Knows no settings and no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from laya.errors import BadModelFile
from laya.memory.facts import ModelFacts, facts_before_download
from laya.memory.hf_config import HfConfig
from laya.memory.hf_names import ATTENTION_WORDS, FIGURES, NO_CACHE_WORDS, STATE_WORDS, WINDOW_WORDS
from laya.memory.hf_parameters import is_gated
from laya.memory.hf_shape import layer_words, n_layers, shape_of
from laya.memory.hf_weights import (
    HfWeights,
    computed_weights,
    dtype_bytes,
    groups_of,
    quantization,
    quantized_bits,
    weights_of,
)
from laya.memory.safetensors import model_files, read_tables
from laya.memory.shape import ModelShape
from laya.memory.source import LocalFile, LocalModel, ModelSource, whole

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MAX_CONFIG_BYTES, MAX_INDEX_BYTES = 4 << 20, 128 << 20


class HfFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A Hugging Face model as a plan needs it. `facts` prices it for llama.cpp; the rest is what vLLM asks beside."""

    facts: ModelFacts
    weights: HfWeights
    dtype_bytes: int  # of a weight that is not quantized, and of a KV cache that is not told otherwise
    quantization: str | None  # the method of its quantization_config
    state_bytes: int  # of an element of recurrent state, as vLLM keeps it
    encoder_width: int  # elements that what sees or hears computes with for each of its tokens; 0 = a language model
    notes: tuple[str, ...]  # what is computed or bounded, in words

    @property
    def shape(self) -> ModelShape:
        return self.facts.shape


def facts_of_hf(path: Path) -> HfFacts:
    """The facts of a model folder, or of a config.json. Raises BadModelFile naming the file and what is wrong."""
    return facts_of_source(local_model(path))


def local_model(path: Path) -> LocalModel:
    """The files of a model folder; of a config.json without weights beside it, that alone."""
    folder = path if path.is_dir() else path.parent
    config = folder / CONFIG if path.is_dir() else path
    if path.is_dir() and not config.is_file():
        raise BadModelFile(f"{path} has no config.json: it is not the folder of a Hugging Face model.", param="model")
    weights = sorted(folder.glob("*.safetensors")) if path.is_dir() or path.name == CONFIG else []
    if path.is_dir() and not weights:
        raise BadModelFile(f"{path} has no .safetensors files. {_found_instead(path)}", param="model")
    index = folder / INDEX
    return LocalModel(
        name=str(path),
        format="hf",
        files={file.name: LocalFile(file) for file in weights},
        config=whole(config, MAX_CONFIG_BYTES),
        index=whole(index, MAX_INDEX_BYTES) if weights and index.is_file() else None,
    )


def _found_instead(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return "Its weights are PyTorch pickles, which cannot be read without running them."
    return f"`laya plan {folder / CONFIG}` plans it without its weights."


def facts_of_source(source: ModelSource) -> HfFacts:
    """The facts of a model wherever it lies. Raises BadModelFile, and what its source raises."""
    if source.config is None:
        raise BadModelFile(f"{source.name} has no config.json: nothing says what kind of model it is.", param="model")
    config = HfConfig(source.name, source.config)
    shape = shape_of(config)
    whole_bytes = dtype_bytes(config)
    if source.files:
        files = model_files(source.name, source.files, source.index)
        weights = weights_of(read_tables(files), shape)
        if not weights.n_tensors:
            raise BadModelFile(f"{source.name}: its safetensors files hold no tensors.", param="model")
    else:
        weights = computed_weights(config, shape)
    method = quantization(config)
    shape = msgspec.structs.replace(shape, file_type=_file_type(config, whole_bytes))
    return HfFacts(
        facts=_facts(config, shape, weights),
        weights=weights,
        dtype_bytes=whole_bytes,
        quantization=method,
        state_bytes=2 if str(config.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")).endswith("16") else 4,
        encoder_width=_encoder_width(config),
        notes=tuple(_notes(config, shape, weights)),
    )


def _facts(config: HfConfig, shape: ModelShape, weights: HfWeights) -> ModelFacts:
    """What a conversion of the same types would give; its vocabulary's text is bounded from its size."""
    largest = max(weights.by_dtype, key=lambda dtype: weights.by_dtype[dtype], default="BF16")
    facts = facts_before_download(shape, weights.total_bytes, largest)
    is_tied = weights.embedding_bytes > 0 and not weights.output_bytes
    is_dense = not shape.n_expert or shape.n_ff > shape.n_ff_expert
    gated = weights.is_gated or (weights.is_computed and is_gated(config))
    return msgspec.structs.replace(
        facts,
        matrix_bytes=weights.by_dtype,
        tied_output=(largest, weights.embedding_bytes) if is_tied else None,
        groups=groups_of(weights),
        n_ff_matrices=(3 if gated else 2) if is_dense else 0,
        n_tensors=_converted_tensors(shape, weights),
    )


def _converted_tensors(shape: ModelShape, weights: HfWeights) -> int:
    """A conversion makes one tensor of all experts of a layer."""
    return min(weights.n_tensors, 24 * shape.n_layer + 8)


def _file_type(config: HfConfig, whole_bytes: int) -> str:
    method, bits = quantization(config), quantized_bits(config)
    if method is None:
        is_half = str(config.get("torch_dtype", "dtype")) in ("float16", "half")
        return {4: "F32", 2: "F16" if is_half else "BF16"}.get(whole_bytes, "F8")
    return f"{method.upper()} {bits:.2g} bits" if bits else method.upper()


def _encoder_width(config: HfConfig) -> int:
    """Elements a token of an image or sound is widest at, from the config of what sees or hears; 0 where none is."""
    widest = 0
    for key in ("vision_config", "audio_config"):
        part: Any = config.outer.get(key)
        if isinstance(part, dict):
            hidden = _first_count(part, "embed_dim", "hidden_size", "d_model", "width") or 1024
            inner = _first_count(part, "intermediate_size", "encoder_ffn_dim") or 4 * hidden
            widest = max(widest, min(6 * hidden + 3 * inner, 1 << 20))
    return widest


def _first_count(part: dict[str, Any], *names: str) -> int:
    return next((part[name] for name in names if type(part.get(name)) is int and part[name] > 0), 0)


def _notes(config: HfConfig, shape: ModelShape, weights: HfWeights) -> list[str]:
    notes = []
    if weights.is_computed:
        notes.append(
            f"weights computed from config.json: {weights.n_parameters / 1e9:.2f} billion parameters at "
            f"{shape.file_type}; no tensor table was read"
        )
        if quantization(config) is not None and quantized_bits(config) is None:
            notes.append(
                f"quantization {quantization(config)!r} does not say its bits: the weights are counted unquantized, an "
                f"upper bound"
            )
    if weights.nextn_bytes:
        notes.append(f"{weights.nextn_bytes >> 20} MiB of the weights are layers for multi-token prediction")
    if not config.has(*FIGURES["context_length"]) and any(layer.k for layer in shape.layers):
        notes.append("its config says no trained length, so any is planned")
    words = _unknown_words(config)
    if words:
        notes.append(f"layers of kind {', '.join(words)} are not known: counted as full attention, an upper bound")
    return notes


def _unknown_words(config: HfConfig) -> tuple[str, ...]:
    """Words of `layer_types` that no table knows: their layers are counted as full attention."""
    known = WINDOW_WORDS | STATE_WORDS | NO_CACHE_WORDS | ATTENTION_WORDS
    words = layer_words(config, n_layers(config)) or ()
    return tuple(sorted({word for word in words if word not in known}))
