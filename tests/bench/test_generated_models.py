"""Generated models against the `gguf` package as the oracle of what a file says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest

from laya.bench.generated_models import SHAPES, GeneratedShape, generate, generated
from laya.bench.random_gguf import WEIGHT_TYPES
from laya.errors import BadModelFile, ConfigError
from laya.memory import read_facts

TINY = GeneratedShape(n_layer=1, n_embd=256, n_ff=256)
WORDS = ["<|end|>", "a", "b", "ab"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with every kind of tokenizer entry and one tensor."""
    path = tmp_path_factory.mktemp("vocabulary") / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_scores([0.0, 1.0, 2.0, 3.0])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("weights", WEIGHT_TYPES)
def test_weights_of_every_type_are_small_numbers_for_the_gguf_package(
    weights: str, vocabulary: Path, tmp_path: Path
) -> None:
    shape = GeneratedShape(n_layer=1, n_embd=256, n_ff=256, weights=weights)
    path = generate(tmp_path / "m.gguf", shape, vocabulary=vocabulary)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    raw = tensors["blk.0.ffn_up.weight"]
    numbers = gguf.quants.dequantize(raw.data, raw.tensor_type)
    assert numbers.shape == (256, 256)
    assert np.isfinite(numbers).all()
    assert 0.005 < numbers.std() < 0.1
    assert abs(numbers.mean()) < numbers.std() / 2
    assert (tensors["blk.0.attn_norm.weight"].data == 1).all()


def test_the_same_arguments_write_the_same_bytes_and_another_seed_others(vocabulary: Path, tmp_path: Path) -> None:
    digests = [
        hashlib.sha256(generate(tmp_path / "m.gguf", TINY, vocabulary=vocabulary, seed=seed).read_bytes()).hexdigest()
        for seed in (0, 0, 1)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_the_vocabulary_is_that_of_the_source_entry_by_entry(vocabulary: Path, tmp_path: Path) -> None:
    path = generate(tmp_path / "m.gguf", TINY, vocabulary=vocabulary)
    assert _tokenizer(path) == _tokenizer(vocabulary)
    assert "tokenizer.chat_template" in _tokenizer(path)


def test_a_model_is_made_once(vocabulary: Path, tmp_path: Path) -> None:
    path = generated("long", vocabulary=vocabulary, folder=tmp_path)
    first = path.stat().st_mtime_ns
    assert generated("long", vocabulary=vocabulary, folder=tmp_path).stat().st_mtime_ns == first
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", SHAPES)
def test_plan_of_every_shape_is_exact(name: str, vocabulary: Path, tmp_path: Path) -> None:
    path = generated(name, vocabulary=vocabulary, folder=tmp_path)
    facts = read_facts(path)
    assert facts.shape.bound is None
    assert (facts.shape.n_expert > 0) == (SHAPES[name].n_expert > 0)
    assert facts.shape.window == SHAPES[name].sliding_window
    assert facts.shape.is_recurrent == (SHAPES[name].state_size > 0)


@pytest.mark.parametrize(("field", "value"), [("architecture", "qwen4"), ("weights", "Q8_1")])
def test_what_cannot_be_generated_is_named(field: str, value: str, vocabulary: Path, tmp_path: Path) -> None:
    shape = GeneratedShape(**{field: value})
    with pytest.raises(ConfigError, match=value):
        generate(tmp_path / "m.gguf", shape, vocabulary=vocabulary)


def test_a_file_without_vocabulary_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(BadModelFile, match=r"text\.gguf"):
        generate(tmp_path / "m.gguf", SHAPES["long"], vocabulary=tmp_path / "text.gguf")


def _tokenizer(path: Path) -> dict[str, bytes]:
    """Key -> its whole entry."""
    fields = gguf.GGUFReader(path).fields
    return {
        key: b"".join(part.tobytes() for part in field.parts)
        for key, field in fields.items()
        if key.startswith("tokenizer.")
    }
