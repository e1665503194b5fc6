"""What `laya quantize` writes is what llama.cpp's own quantizer writes, and what must not be quantized is not.

llama_cpp_digests.json has what `llama_model_quantize` of another build (the wheel cyllama 0.2.18) made of the same
models, for every kind of file: digests of the types of all tensors, in their order, and of all their bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest

from laya.errors import BadModelFile, ConfigError
from laya.memory.ggml import GGML_TYPES, type_named
from laya.memory.gguf import read_header
from laya.quantization.ggml_api import functions
from laya.quantization.imatrix import Importance, ImportanceMatrix
from laya.quantization.job import Job, Wish, job_of
from laya.quantization.kinds import FILE_KINDS, file_kind
from laya.quantization.quantize import check_result, write
from tests.quantization.tiny_gguf import write_tiny

DIGESTS = json.loads(Path(__file__).with_name("llama_cpp_digests.json").read_text())
MODELS: dict[str, dict[str, object]] = {
    "dense256": {"n_layers": 9},
    "dense576": {"width": 576, "n_layers": 2},
    "moe8": {"n_experts": 8},
    "moe4": {"n_experts": 4, "tied": False, "n_layers": 4},
}
FULL = {"F32", "F16", "BF16"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    made = {name: write_tiny(folder / f"{name}.gguf", **sizes) for name, sizes in MODELS.items()}  # type: ignore[arg-type]
    for name, path in made.items():
        assert _data(path) == DIGESTS[name]["source"][1], f"{name} is not the model that llama.cpp was given"
    return made


def quantized(path: Path, out: Path, kind: str, **wish: object) -> Job:
    job = job_of(path, path.stem, Wish(kind, **wish))  # type: ignore[arg-type]
    write(job, out, n_threads=2, progress=lambda done, total: None)
    check_result(out, job)
    return job


def _data(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()[read_header(path).data_offset :]).hexdigest()[:32]


def _types(rows: list[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name} {kind}\n" for name, kind in rows).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", MODELS)
def test_each_tensor_gets_the_type_that_llama_cpp_gives_it(name: str, models: dict[str, Path]) -> None:
    kinds = [kind for kind in FILE_KINDS if kind != "f16"]
    assert set(kinds) | {"source"} == set(DIGESTS[name])
    for kind in kinds:
        job = job_of(models[name], name, Wish(kind))
        rows = [(target.tensor.name, target.type.name) for target in job.targets]
        assert _types(rows) == DIGESTS[name][kind][0], kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dense256", "q3_k_m"), ("dense256", "q4_k_m"), ("dense576", "q5_k_m"),
        ("dense576", "q8_0"),
        ("moe8", "q4_k_m"), ("moe8", "q4_0"), ("moe8", "q2_k"), ("moe4", "q6_k"), ("moe4", "bf16"),
    ],
)  # fmt: skip
def test_every_byte_is_llama_cpps(name: str, kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    job = quantized(models[name], tmp_path / "out.gguf", kind)
    assert _data(tmp_path / "out.gguf") == DIGESTS[name][kind][1]
    assert (tmp_path / "out.gguf").stat().st_size == job.file_bytes  # the exact size was known before
    header = read_header(tmp_path / "out.gguf")
    assert header.metadata["general.file_type"] == FILE_KINDS[kind].file_type
    assert header.metadata["tokenizer.ggml.tokens"].length == 320  # type: ignore[union-attr]
    for tensor in header.tensors:
        if "ffn_gate_inp" in tensor.name or "_norm" in tensor.name or len(tensor.shape) == 1:
            assert tensor.type_name in FULL, tensor.name


def test_a_router_has_16_bits_in_every_kind_of_file(models: dict[str, Path], tmp_path: Path) -> None:
    """Read by another program, of sources in 16 and in 32 bits, with the smallest types asked for all else."""
    out, wanted = tmp_path / "out.gguf", {"embeddings": type_named("q2_k"), "head": type_named("q4_0")}
    for source in (
        models["moe4"],
        write_tiny(tmp_path / "f32.gguf", n_layers=1, n_experts=4, tied=False, kind=np.float32),
    ):
        for kind in FILE_KINDS:
            if source == models["moe4"] and kind == "f16":
                continue  # it is that
            quantized(source, out, kind, **wanted)
            routers = [tensor for tensor in gguf.GGUFReader(out).tensors if "ffn_gate_inp" in tensor.name]
            assert routers, kind
            for tensor in routers:
                assert tensor.tensor_type.name in FULL, (kind, tensor.name)
                before = next(each for each in gguf.GGUFReader(source).tensors if each.name == tensor.name)
                assert (tensor.data == before.data).all(), (kind, tensor.name)


def test_another_implementation_reads_the_same_numbers(models: dict[str, Path], tmp_path: Path) -> None:
    quantized(models["moe4"], tmp_path / "out.gguf", "q8_0")
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    for tensor in gguf.GGUFReader(models["moe4"]).tensors:
        got = ours[tensor.name]
        if got.tensor_type == gguf.GGMLQuantizationType.Q8_0:
            values = np.asarray(tensor.data, np.float32)
            assert (gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0) == got.data).all(), tensor.name
        else:
            assert (tensor.data == got.data).all(), tensor.name


def test_each_expert_is_weighted_by_its_own_importance(models: dict[str, Path], tmp_path: Path) -> None:
    """As llama.cpp does: matrix by matrix, whole, each with its own columns' importance."""
    random = np.random.RandomState(1)
    name = "blk.1.ffn_down_exps.weight"
    values = np.abs(random.standard_normal((4, 256))).astype(np.float32)
    importance = Importance(array("f", values.tobytes()))
    wish = {"imatrix": ImportanceMatrix({name: importance}), "imatrix_note": "random"}
    job = quantized(models["moe4"], tmp_path / "out.gguf", "q4_k_m", **wish)
    assert any("nothing on" in text for text in job.warnings)
    got = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}[name]
    source = {tensor.name: tensor for tensor in gguf.GGUFReader(models["moe4"]).tensors}[name]
    kind = GGML_TYPES[int(got.tensor_type)]
    for expert in range(4):
        matrix = np.ascontiguousarray(source.data[expert], np.float32)
        room = (ctypes.c_uint8 * (256 * kind.row_bytes(256)))()
        own = np.ascontiguousarray(values[expert])
        functions()["ggml_quantize_chunk"](
            kind.id, matrix.ctypes.data, ctypes.addressof(room), 0, 256, 256, own.ctypes.data
        )
        assert bytes(room) == got.data[expert].tobytes()
    plain = quantized(models["moe4"], tmp_path / "plain.gguf", "q4_k_m")
    assert [target.type for target in plain.targets] == [target.type for target in job.targets]
    assert _data(tmp_path / "plain.gguf") != _data(tmp_path / "out.gguf")


def test_embeddings_and_head_by_choice(models: dict[str, Path], tmp_path: Path) -> None:
    asked = {"embeddings": type_named("q4_k"), "head": type_named("f16")}
    job = quantized(models["moe4"], tmp_path / "out.gguf", "q8_0", **asked)
    kinds = {tensor.name: tensor.type_name for tensor in read_header(tmp_path / "out.gguf").tensors}
    assert kinds["token_embd.weight"] == "Q4_K" and kinds["output.weight"] == "F16"
    assert {target.why for target in job.targets if target.tensor_class in ("embeddings", "head")} == {"asked"}
    tied = job_of(models["dense256"], "dense256", Wish("q8_0", head=type_named("q6_k")))
    assert {t.tensor.name: t.type.name for t in tied.targets}["token_embd.weight"] == "Q6_K"
    with pytest.raises(ConfigError, match="head is its embeddings"):
        job_of(models["dense256"], "dense256", Wish("q8_0", head=type_named("q6_k"), embeddings=type_named("q4_k")))


def test_a_second_quantization_is_refused_unless_asked_for(models: dict[str, Path], tmp_path: Path) -> None:
    quantized(models["dense256"], tmp_path / "q4.gguf", "q4_1")
    with pytest.raises(ConfigError, match=r"'q4' is Q4_1 already: q8_0 gains nothing from it\. The file grows"):
        job_of(tmp_path / "q4.gguf", "q4", Wish("q8_0"))
    with pytest.raises(ConfigError, match="the losses of Q4_1 and of q2_k would add up"):
        job_of(tmp_path / "q4.gguf", "q4", Wish("q2_k"))
    with pytest.raises(ConfigError, match="is q4_1 already: there is nothing to do"):
        job_of(tmp_path / "q4.gguf", "q4", Wish("q4_1", requantizes=True))
    job = quantized(tmp_path / "q4.gguf", tmp_path / "f16.gguf", "f16", requantizes=True)
    assert job.is_requantized and "was Q4_1 already" in job.warnings[0]


def test_a_router_that_was_quantized_before_is_not_passed_on(models: dict[str, Path], tmp_path: Path) -> None:
    """Another tool's file: its router has 4 bits."""
    reader = gguf.GGUFReader(models["moe4"])
    writer = gguf.GGUFWriter(tmp_path / "broken.gguf", "llama")
    for key in ("block_count", "attention.head_count", "attention.head_count_kv", "expert_count"):
        writer.add_uint32(f"llama.{key}", int(reader.fields[f"llama.{key}"].contents()))
    for tensor in reader.tensors:
        if "ffn_gate_inp" in tensor.name:
            q4_0 = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(tensor.name, gguf.quants.quantize(np.asarray(tensor.data), q4_0), raw_dtype=q4_0)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    job = quantized(tmp_path / "broken.gguf", tmp_path / "out.gguf", "q4_0")
    kinds = {tensor.name: tensor.type_name for tensor in read_header(tmp_path / "out.gguf").tensors}
    assert {kinds[f"blk.{layer}.ffn_gate_inp.weight"] for layer in range(4)} == {"F32"}
    assert any("what it lost before stays lost" in text for text in job.warnings)


def test_split_models_become_one_file_and_broken_ones_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    split = write_tiny(tmp_path / "split.gguf", n_experts=8, tensors_per_file=10)
    quantized(split, tmp_path / "out.gguf", "q4_0")
    assert _data(tmp_path / "out.gguf") == DIGESTS["moe8"]["q4_0"][1]
    assert "split.count" not in read_header(tmp_path / "out.gguf").metadata
    renamed = tmp_path / "part.gguf"
    renamed.write_bytes(split.read_bytes())
    with pytest.raises(BadModelFile, match="one of 4 parts of a split model"):
        job_of(renamed, "part", Wish("q4_0"))
    third = next(tmp_path.glob("split-00003-of-*.gguf"))
    third.write_bytes(next(tmp_path.glob("split-00002-of-*.gguf")).read_bytes())
    with pytest.raises(BadModelFile, match="its 4 parts are not those of one model, in their order"):
        job_of(split, "split", Wish("q4_0"))
    bad = tmp_path / "nan.gguf"
    raw = bytearray(models["dense256"].read_bytes())
    header = read_header(models["dense256"])
    place = next(tensor for tensor in header.tensors if tensor.name == "blk.3.attn_q.weight")
    raw[header.data_offset + place.offset + 6 : header.data_offset + place.offset + 8] = b"\xff\x7f"
    bad.write_bytes(raw)
    with pytest.raises(BadModelFile, match=r"blk\.3\.attn_q\.weight: it holds values that are no numbers"):
        quantized(bad, tmp_path / "never.gguf", "q4_0")


def test_names_of_kinds() -> None:
    assert file_kind("Q4_K")[0] == "q4_k_m"
    with pytest.raises(ConfigError, match=r"Did you mean 'q4_k_m'\?"):
        file_kind("q4km")
    with pytest.raises(ConfigError, match="no kind of GGUF file; of its size: q4_k_m"):
        file_kind("awq")
