"""The model shape that GGUF metadata describes, with llama.cpp's defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from described import ALL, metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.errors import BadModelFile, ConfigError
from laya.memory.engine_facts import XLLAMACPP
from laya.memory.facts import facts_before_download
from laya.memory.gguf import ArrayInfo, read_header
from laya.memory.gguf_shape import read_shape
from laya.memory.layers import LayerShape
from laya.memory.planner import Choice, Model, decide, price
from laya.memory.shape import ModelShape
from laya.types import AskedSettings

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 8192,
    "llama.embedding_length": 512,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 8,
    "tokenizer.ggml.tokens": ArrayInfo(8, 32000, 200_000),
}


def shape(**changes: Any) -> ModelShape:
    """LLAMA with dotted keys written with `__`; None removes one."""
    metadata = LLAMA | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return read_shape(Path("m.gguf"), {key: value for key, value in metadata.items() if value is not None})


def shape_of(architecture: str, **keys: Any) -> ModelShape:
    """LLAMA's figures under another architecture, with more keys."""
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in LLAMA.items()}
    own = {f"{architecture}.{key}": value for key, value in keys.items()}
    return read_shape(Path("m.gguf"), metadata | own | {"general.architecture": architecture})


def test_shape_of_the_default_model(smollm2_path: Path) -> None:
    found = read_shape(smollm2_path, read_header(smollm2_path).metadata)
    assert (found.architecture, found.n_layer, found.n_embd, found.n_ff) == ("llama", 30, 576, 1536)
    assert (found.n_head, found.n_head_kv) == ((9,) * 30, (3,) * 30)
    assert (found.head_dim_k, found.head_dim_v, found.n_vocab, found.n_ctx_train) == (64, 64, 49152, 8192)
    assert found.chat_template is not None
    assert "<|im_start|>" in found.chat_template
    assert (found.file_type, found.bound, found.has_rope_scaling) == ("Q4_1", None, False)


def test_missing_keys_take_the_engines_defaults() -> None:
    found = shape()
    assert found.n_head_kv == (8, 8, 8, 8)
    assert (found.head_dim_k, found.head_dim_v) == (64, 64)
    assert found.n_vocab == 32000
    assert found.is_causal


def test_head_counts_may_differ_by_layer() -> None:
    found = shape(attention__head_count_kv=(2, 0, 4, 0), attention__key_length=128, attention__value_length=64)
    assert [(layer.k, layer.v) for layer in found.layers] == [(256, 128), (0, 0), (512, 256), (0, 0)]


def test_vocabulary_size_stands_in_for_a_missing_token_list() -> None:
    metadata = {key: value for key, value in LLAMA.items() if not key.startswith("tokenizer")}
    assert read_shape(Path("m.gguf"), metadata | {"llama.vocab_size": 99}).n_vocab == 99


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__scaling__type": "yarn"}, True),
        ({"rope__scaling__factor": 4.0}, True),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 1.0}, False),
        ({}, False),
    ],
)
def test_rope_scaling_is_seen(changes: dict[str, Any], expected: bool) -> None:
    assert shape(**changes).has_rope_scaling is expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ssm__state_size": 128}, "recurrent"),
        ({"wkv__head_size": 64}, "recurrent"),
        ({"attention__kv_lora_rank": 512}, "latent"),
    ],
)
def test_attention_that_is_not_dense_gets_a_named_bound(changes: dict[str, Any], words: str) -> None:
    bound = shape(**changes).bound
    assert bound is not None
    assert words in bound


def test_unknown_architecture_gets_a_named_bound_and_a_window_one_too() -> None:
    metadata = {key.replace("llama.", "newarch."): value for key, value in LLAMA.items()}
    metadata["general.architecture"] = "newarch"
    assert "newarch" in (read_shape(Path("m.gguf"), metadata).bound or "")
    metadata["newarch.attention.sliding_window"] = 512
    assert "sliding-window" in (read_shape(Path("m.gguf"), metadata).bound or "")


def test_llama_ignores_a_sliding_window_as_the_engine_does() -> None:
    assert shape(attention__sliding_window=4096).bound is None


def test_encoder_keeps_no_tokens_and_another_architecture_does_without_causality_too() -> None:
    found = shape_of("bert", **{"attention.causal": False, "pooling_type": 1})
    assert not found.is_causal
    assert found.pooling == "mean"
    assert found.layers == (LayerShape(),) * 4
    assert shape(attention__causal=False).is_causal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 1 << 40}, "llama.block_count is 1099511627776"),
        ({"embedding_length": "wide"}, "llama.embedding_length is 'wide'"),
        ({"attention__head_count_kv": (1, 2)}, "head_count_kv is not a count for each of 4 layers"),
        ({"attention__head_count_kv": (1, 2, 3, -1)}, "head_count_kv is not a count"),
        ({"context_length": True}, "llama.context_length is True"),
        ({"context_length": 0}, "llama.context_length is 0; it must be a whole number from 1"),
        ({"block_count": 0}, "llama.block_count is 0; it must be a whole number from 1 to 4096"),
        ({"embedding_length": 0}, "llama.embedding_length is 0"),
        ({"attention__head_count": 0}, "head_count is 0; some layer must have at least 1"),
        ({"attention__head_count_kv": 0}, "head_count_kv is 0; some layer must have at least 1"),
        ({"attention__head_count_kv": (0, 0, 0, 0)}, "head_count_kv is (0, 0, 0, 0); some layer must"),
        ({"attention__head_count_kv": 3}, "head_count_kv is 3; KV heads must divide the heads"),
        ({"attention__key_length": 0}, "attention.key_length is 0; it must be a whole number from 1"),
        ({"feed_forward_length": 0}, "feed_forward_length is 0; without experts it must be at least 1"),
        ({"expert_count": 8, "expert_used_count": 9}, "expert_used_count is 9; it must be a whole number from 1 to 8"),
        ({"expert_count": 8, "expert_used_count": 0}, "expert_used_count is 0"),
        ({"expert_count": 8, "expert_feed_forward_length": 0}, "expert_feed_forward_length is 0; with 8 experts"),
        ({"attention__shared_kv_layers": 4}, "shared_kv_layers is 4; it must be a whole number from 0 to 3"),
        ({"rope__scaling__factor": -1.0}, "rope.scaling.factor is -1.0; it must be above 0"),
    ],
)
def test_impossible_keys_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModelFile, match=re.escape(words)) as caught:
        shape(**changes)
    assert "m.gguf" in caught.value.message


def test_layers_without_heads_are_sound_where_they_have_a_state_or_an_array_says_so() -> None:
    assert shape(attention__head_count_kv=(0, 2, 2, 0)).n_head_kv == (0, 2, 2, 0)
    keys = {"attention.head_count": 0, "feed_forward_length": 0, "ssm.state_size": 16, "ssm.inner_size": 1024}
    assert shape_of("mamba", **keys).is_recurrent


def test_file_without_architecture_or_of_a_projector_is_refused() -> None:
    with pytest.raises(BadModelFile, match=r"no general\.architecture"):
        read_shape(Path("m.gguf"), {})
    with pytest.raises(BadModelFile, match="projector"):
        read_shape(Path("m.gguf"), {"general.architecture": "clip"})


VALUES: list[Any] = [
    0,
    1,
    3,
    1 << 24,
    1 << 40,
    -1,
    2.5,
    True,
    "many",
    (),
    (1, 0),
    (True,) * 8,
    (0,) * 8,
    (1 << 24,) * 8,
]


@settings(max_examples=300, deadline=None)
@given(
    architecture=st.sampled_from([*ALL, "unheard-of"]),
    changes=st.dictionaries(st.integers(0, 60), st.sampled_from(VALUES), min_size=1, max_size=3),
)
def test_any_metadata_is_planned_or_refused_by_name(architecture: str, changes: dict[int, Any]) -> None:
    keys = metadata("llama" if architecture == "unheard-of" else architecture)
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in keys.items()}
    read = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    names = [key for key in read if key.startswith(f"{architecture}.")]
    read |= {names[number % len(names)]: value for number, value in changes.items()}
    read["general.architecture"] = architecture
    said = fault_of(read)
    assert said is None or "kv_cache_dtype" in said or ("m.gguf" in said and f"{architecture}." in said)


def fault_of(read: dict[str, Any]) -> str | None:
    """What is said of this metadata when a plan of it is refused."""
    try:
        facts = facts_before_download(read_shape(Path("m.gguf"), read), 1 << 30, "Q4_K")
        model = Model(id="m", facts=facts, engine=XLLAMACPP, n_cores=1)
        wanted = Choice(max_num_seqs=2, max_seq_len=512, kv_cache_dtype="q8_0")
        assert min(price(model, decide(model, AskedSettings(), wanted))["cpu"].values()) > 0
    except (BadModelFile, ConfigError) as error:
        return error.message
    return None
