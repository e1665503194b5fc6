"""The GGUF header reader, against the `gguf` package as its oracle and against broken files."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from small_gguf import MakeGguf

from laya.errors import BadModelFile, ConfigError, LayaError
from laya.memory import Machine, plan_file
from laya.memory.ggml import GGML_TYPES, KV_CACHE_TYPES, kv_cache_type
from laya.memory.gguf import KEPT_ARRAY_LENGTH, ArrayInfo, read_header
from laya.types import AskedSettings


def oracle_agrees(path: Path) -> None:
    """Everything a header says must be what the `gguf` package reads, arrays by length and small ones by value."""
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.data_offset == reader.data_offset
    assert header.alignment == reader.alignment
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value = header.metadata[name]
        if isinstance(value, ArrayInfo):
            assert value.length == len(field.data), name
        else:
            expected = field.contents()
            assert value == (tuple(expected) if isinstance(expected, list) else expected), name
    assert len(header.tensors) == len(reader.tensors)
    for mine, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert mine.name == theirs.name
        assert mine.shape == tuple(int(size) for size in theirs.shape)
        assert mine.type_name == theirs.tensor_type.name
        assert mine.n_bytes == theirs.n_bytes
        assert header.data_offset + mine.offset == theirs.data_offset


def test_header_equals_the_gguf_package_on_the_default_model(smollm2_path: Path) -> None:
    oracle_agrees(smollm2_path)
    header = read_header(smollm2_path)
    assert header.metadata["tokenizer.ggml.tokens"].length == 49152
    assert header.tensor_bytes == 96_576_768


@pytest.mark.parametrize("weights", ["F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_header_equals_the_gguf_package_on_written_files(make_gguf: MakeGguf, weights: str) -> None:
    oracle_agrees(make_gguf(weights=weights, n_head_kv=[2, 1], keys={"rope.scaling.factor": 2.0, "x.flag": True}))


def test_header_keeps_small_number_arrays_and_only_measures_the_others(make_gguf: MakeGguf) -> None:
    metadata = read_header(make_gguf(n_head_kv=[2, 1])).metadata
    assert metadata["llama.attention.head_count_kv"] == (2, 1)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArrayInfo)
    assert tokens.length == 320
    assert tokens.content_bytes > 320
    assert metadata["tokenizer.ggml.token_type"] == (3, *(1,) * 319)


def test_header_does_not_keep_long_number_arrays(make_gguf: MakeGguf) -> None:
    length = KEPT_ARRAY_LENGTH + 1
    metadata = read_header(make_gguf(n_vocab=length)).metadata
    assert metadata["tokenizer.ggml.token_type"] == ArrayInfo(5, length, 4 * length)


def test_header_reads_version_2(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    assert read_header(path).version == 2


def test_tensor_of_a_newer_type_takes_what_lies_before_the_next(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    before = {tensor.name: tensor for tensor in read_header(path).tensors}
    name = b"blk.0.ffn_up.weight"
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", 777)
    path.write_bytes(data)
    tensor = next(tensor for tensor in read_header(path).tensors if tensor.name == name.decode())
    assert tensor.type_name == "type 777"
    assert tensor.n_bytes == before[name.decode()].n_bytes


# what is not a GGUF file
SAFETENSORS = struct.pack("<Q", 40) + b'{"weight":{"dtype":"F16","shape":[1]}}  '
LOOKALIKES = {
    "zip": (b"PK\x03\x04" + b"\0" * 64, "zip archive"),
    "safetensors": (SAFETENSORS, "safetensors"),
    "html": (b"\n<!DOCTYPE html><html><body>404", "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    "old": (b"tjgg" + b"\1\0\0\0", "before GGUF"),
    "zeros": (b"\0" * 4096, "did not finish"),
    "json": (b'{"error": "not found"}', "JSON"),
    "text": (b"hello", "begins with"),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_other_file_is_named_for_what_it_looks_like(tmp_path: Path, kind: str) -> None:
    content, words = LOOKALIKES[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert words in caught.value.message


def test_missing_empty_folder_and_pipe_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, words in (
        ("missing.gguf", "no such file"),
        ("empty.gguf", "empty (0 bytes)"),
        ("folder.gguf", "is a folder"),
        ("pipe.gguf", "not a regular file"),
    ):
        with pytest.raises(BadModelFile, match=words.replace("(", r"\(").replace(")", r"\)")) as caught:
            read_header(tmp_path / name)
        assert name in caught.value.message
        assert caught.value.exit_code == 2


def test_unreadable_file_is_refused_by_name(make_gguf: MakeGguf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf()

    def denied(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(BadModelFile, match="Permission denied"):
        read_header(path)


def test_big_endian_and_other_versions_are_named(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    data = bytearray(path.read_bytes())
    for code, version, words in ((">I", 3, "big-endian"), ("<I", 1, "version 1"), ("<I", 9, "version 9")):
        data[4:8] = struct.pack(code, version)
        path.write_bytes(data)
        with pytest.raises(BadModelFile, match=words):
            read_header(path)


def test_truncated_data_says_how_much_is_missing(make_gguf: MakeGguf) -> None:
    path = make_gguf()
    header = read_header(path)
    os.truncate(path, header.file_bytes - 1000)
    end = max(tensor.offset + tensor.n_bytes for tensor in header.tensors)
    missing = header.data_offset + end - (header.file_bytes - 1000)
    with pytest.raises(BadModelFile, match=f"{missing} of {end} bytes of tensor data are missing") as caught:
        read_header(path)
    assert caught.value.details["missing_bytes"] == missing


@pytest.mark.parametrize("kept", [30, 3000, 300_000])
def test_header_that_is_cut_off_says_so_and_where(smollm2_path: Path, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(kept))
    with pytest.raises(BadModelFile, match=rf"is cut off or corrupt: .* past the end of the file \({kept} bytes\)"):
        read_header(path)


def patched(data: bytes, at: int, value: int, code: str = "<Q") -> bytes:
    return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]


def test_impossible_lengths_are_refused_without_being_believed(make_gguf: MakeGguf, tmp_path: Path) -> None:
    good = make_gguf().read_bytes()
    tokens = good.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    path = tmp_path / "bad.gguf"
    for data in (
        patched(good, 8, 1 << 62),  # tensors
        patched(good, 16, 1 << 62),  # metadata entries
        patched(good, 24, 1 << 62),  # length of the first key
        patched(good, tokens, 99, "<I"),  # type of a value
        patched(good, tokens + 8, 1 << 61),  # length of an array
        patched(good, tokens + 16, (1 << 64) - 1),  # length of a text in it
        patched(good, tokens + 4, 9, "<I"),  # an array of arrays
    ):
        path.write_bytes(data)
        with pytest.raises(BadModelFile, match="corrupt"):
            read_header(path)


def damaged(good: bytes, start: int, end: int, rng: random.Random) -> bytes:
    """A few bytes changed within the range, sometimes the end cut off."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(start, end)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def test_damaged_header_raises_nothing_but_bad_model_file(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf()
    good, end = source.read_bytes(), read_header(source).data_offset
    path, rng = tmp_path / "damaged.gguf", random.Random(20)
    n_refused = 0
    for _ in range(1500):
        path.write_bytes(damaged(good, 0, end, rng))
        try:
            read_header(path)
        except BadModelFile:
            n_refused += 1
    assert n_refused > 300


def test_damaged_metadata_leaves_the_planner_only_as_a_layaerror(make_gguf: MakeGguf, tmp_path: Path) -> None:
    good = make_gguf().read_bytes()
    path, rng = tmp_path / "damaged.gguf", random.Random(21)
    budget = Machine().budget()
    n_refused = 0
    for _ in range(800):
        path.write_bytes(damaged(good, 24, good.index(b"tokenizer.ggml.model"), rng))
        try:
            plan_file(path, AskedSettings(), budget, model_id="damaged")
        except LayaError:
            n_refused += 1
    assert n_refused > 100


def test_type_table_equals_the_gguf_package() -> None:
    for kind, (block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":
            continue  # never stored in a file; the package has it as it was before its sums became f16
        mine = GGML_TYPES[kind.value]
        assert (mine.name, mine.block, mine.block_bytes) == (kind.name, block, block_bytes)


def test_kv_cache_type_names_the_nearest() -> None:
    assert kv_cache_type("Q8_0") is KV_CACHE_TYPES["q8_0"]
    with pytest.raises(ConfigError, match="did you mean q8_0"):
        kv_cache_type("q8")
