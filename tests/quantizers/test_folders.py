"""`laya quantize --to awq|gptq`: folders that are whole, in names that loaders know, held to the model they are of."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from laya.errors import EngineFailed, InsufficientDisk, InsufficientMemory, LayaError
from laya.memory import Budget, facts_of_hf
from laya.modeling import LayaForCausalLM
from laya.models.files import model_at
from laya.models.library import Library, resolve
from laya.quantization import limits, make_folder
from laya.quantization.held import load_packed, text_windows
from laya.quantization.make_folder import FolderAsked
from laya.quantization.packed import unpack_awq, unpack_gptq, weights
from laya.quantization.published import check_whole
from laya.quantization.unpacked import as_laya
from tests.modeling.small_model import small, write_tokenizer

N_LAYERS, N_EXPERTS, WIDTH = 4, 8, 256
PLENTY = Budget(bytes=8 << 30, limit="memory available")


class Silent:
    def stage(self, text: str) -> None: ...
    def planned_folder(self, file_bytes: int, peak_bytes: int) -> None: ...


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of laya-nano's shape."""
    folder = tmp_path_factory.mktemp("models") / "nano"
    small(
        vocab_size=4096, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=N_LAYERS,
        num_local_experts=N_EXPERTS, num_attention_heads=8, num_key_value_heads=4, initializer_range=0.05,
    ).save_pretrained(folder)  # fmt: skip
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module", params=["awq", "gptq"])
def made(request: pytest.FixtureRequest, source: Path) -> tuple[Path, dict[str, Any], str]:
    """The folder, what the command printed, the kind."""
    kind = str(request.param)
    return source.parent / "models" / f"nano-{kind}", quantized(source, "--to", kind), kind


def quantized(source: Path, *words: str) -> dict[str, Any]:
    """What the command prints."""
    argv = [sys.executable, "-m", "laya.cli", "quantize", str(source), *words, "--json", "--threads", "1"]
    done = subprocess.run(argv, cwd=source.parent, env=environment(source.parent), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def environment(home: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"LAYA_HOME": str(home / "home"), "LAYA_URL": "http://127.0.0.1:9", "PYTHONPATH": path}


def test_every_linear_layer_is_packed_and_no_router(made: tuple[Path, dict[str, Any], str]) -> None:
    folder, told, _ = made
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = {name: file.get_slice(name).get_dtype() for name in list(file.keys())}
    packed = {name for name in names if name.endswith(".qweight")}
    assert sum(".experts." in name for name in packed) == N_LAYERS * N_EXPERTS * 3
    assert sum(".self_attn." in name for name in packed) == N_LAYERS * 4
    assert len(packed) == N_LAYERS * (3 * N_EXPERTS + 4)
    for layer in range(N_LAYERS):
        for matrix in ("w1", "w2", "w3"):
            assert f"model.layers.{layer}.block_sparse_moe.experts.{N_EXPERTS - 1}.{matrix}.qweight" in packed
        assert names[f"model.layers.{layer}.block_sparse_moe.gate.weight"] == "F32"
    kept = {name: kind for name, kind in names.items() if name.rpartition(".")[2] in ("weight", "bias")}
    assert told["card"]["made"]["kept"] == kept and set(kept.values()) <= {"F32", "F16"}
    assert told["card"]["made"]["routers"] == N_LAYERS
    assert told["card"]["quantized_share_of_f16"] <= 0.40


def test_what_is_printed_is_what_the_folder_computes(source: Path, made: tuple[Path, dict[str, Any], str]) -> None:
    """KL of the unpacked folder against the Laya model itself, computed here in another way."""
    folder, told, _ = made
    before, after = LayaForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), load_packed(folder)
    kls = []
    with torch.inference_mode():
        for window in text_windows(folder):
            p, q = (model(input_ids=torch.tensor([window])).logits[0, :-1].double() for model in (before, after))
            p, q = p.log_softmax(-1), q.log_softmax(-1)
            kls.append((p.exp() * (p - q)).sum(-1))
    kl = torch.cat(kls)
    figures = told["card"]["made"]
    assert figures["mean_kl"] == pytest.approx(float(kl.mean()), abs=1e-4) and len(kl) == figures["n_tokens"]
    assert 0 < figures["mean_kl"] < 0.2
    assert figures["perplexity"] == pytest.approx(figures["reference_perplexity"], rel=0.1)
    assert figures["tuned_on_tokens"] == 0


def test_a_row_of_laya_eval_is_what_the_folder_computes(source: Path, made: tuple[Path, dict[str, Any], str]) -> None:
    """By llama.cpp from the unpacked weights, beside the figures that torch gave, in windows of one token more."""
    folder, told, kind = made
    figures = told["card"]["made"]
    words = ["--quant", f"f32,{folder}", "--tokens", str(figures["n_tokens"]), "--no-tasks", "--exact"]
    argv = [sys.executable, "-m", "laya.cli", "eval", str(source), *words, "--no-speed", "--n-threads", "1", "--json"]
    done = subprocess.run(argv, cwd=source.parent, env=environment(source.parent), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, packed = json.loads(done.stdout.splitlines()[-1])["variants"]
    assert (whole["name"], packed["name"]) == ("f32", folder.name)
    assert packed["likelihood"]["mean_kl"]["value"] == pytest.approx(figures["mean_kl"], rel=0.3)
    loaded = load_packed(folder)
    ids = torch.tensor([text_windows(folder)[0]])
    with torch.inference_mode():  # what is written as GGUF is the model that was unpacked
        assert torch.allclose(as_laya(loaded)(input_ids=ids).logits, loaded(input_ids=ids).logits, atol=1e-4)
    assert whole["memory"] is not None and packed["memory"] is None  # nothing here runs the folder
    assert packed["file_bytes"] == told["card"]["file_bytes"] and 4 < packed["bits"] < 16
    assert any(kind.upper() in flag["what"] for flag in packed["flags"])
    assert not [flag for flag in packed["flags"] if "off the reference" in flag["what"]]  # no more than 4 bits are


def test_rounding_that_is_tuned_on_a_text_loses_less(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    small(max_position_embeddings=512).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    nearest = quantized(folder, "--to", "gptq", "--out", "nearest")["card"]
    tuning = ("--calibration", "python", "--calibration-tokens", "1024")
    tuned = quantized(folder, "--to", "gptq", "--out", "tuned", *tuning)["card"]
    assert tuned["made"]["tuned_on_tokens"] == 1024 and tuned["calibration"] == "python" and "tuned" in tuned["recipe"]
    assert tuned["group_size"] == nearest["group_size"] == 64
    assert 0 < tuned["made"]["mean_kl"] < nearest["made"]["mean_kl"]


def test_the_card_tells_where_it_is_from_and_the_plan_is_of_its_tensors(
    source: Path, made: tuple[Path, dict[str, Any], str]
) -> None:
    folder, told, kind = made
    card = json.loads((folder / "card.json").read_bytes())
    assert card == told["card"] and card["kind"] == kind
    assert card["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert card["source_sha256"] == hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert {"auto-round", "torch", "transformers"} <= set(card["made"]["versions"])
    assert "gate.weight x 4: F32" in (folder / "README.md").read_text()
    assert told["card"]["made"]["peak_bytes"] <= told["planned_peak_bytes"]
    assert told["planned_file_bytes"] == pytest.approx(card["file_bytes"], rel=0.1)
    facts = facts_of_hf(folder)
    assert facts.quantization == kind and 0 <= card["file_bytes"] - facts.weights.total_bytes < 1 << 17  # the header
    assert resolve(f"nano-{kind}", models_dir=folder.parent).path == folder  # by its name
    assert sorted(path.name for path in folder.parent.iterdir() if path.name.startswith(".")) == []


def test_a_folder_that_is_not_whole_is_refused(
    source: Path, made: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    folder, _, _ = made
    stems = frozenset(name.removesuffix(".weight") for name, _, is_packed in weights(folder) if is_packed)
    tensors = load_file(folder / "model.safetensors")
    gate = "model.layers.2.block_sparse_moe.gate.weight"
    expert = "model.layers.1.block_sparse_moe.experts.5.w2"
    for broken, said in (
        ({gate: tensors[gate].to(torch.int8)}, f"{gate} became I8"),
        ({f"{expert}.qweight": None}, f"{expert} was not quantized"),
    ):
        changed = {name: tensor for name, tensor in (tensors | broken).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(EngineFailed, match=said):
            check_whole(tmp_path, stems)


def test_words_of_both_layouts_are_unpacked_to_the_same_numbers() -> None:
    """Packed here nibble by nibble: 8 inputs, 8 outputs, two groups of 4."""
    levels = torch.randint(0, 16, (8, 8), generator=torch.Generator().manual_seed(1))
    zeros, scales = torch.randint(1, 16, (2, 8)), torch.rand(2, 8).half()
    group = torch.arange(8) // 4
    weight = ((levels - zeros[group]) * scales.float()[group]).t()

    def words(columns: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        numbers = [sum(int(row[column]) << 4 * nibble for nibble, column in enumerate(order)) for row in columns]
        return torch.tensor([[number - (1 << 32) if number >> 31 else number] for number in numbers], dtype=torch.int32)

    awq, plain = (0, 2, 4, 6, 1, 3, 5, 7), tuple(range(8))
    assert torch.equal(unpack_awq(words(levels, awq), words(zeros, awq), scales), weight)
    packed = words(levels.t(), plain).t()
    assert torch.equal(unpack_gptq(packed, words(zeros - 1, plain), scales, group), weight)
    assert torch.equal(unpack_gptq(packed, words(zeros, plain), scales, group, is_v2=True), weight)


def test_it_is_refused_with_numbers_before_anything_is_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "models" / "nano-awq"
    asked = FolderAsked(model=model_at(source), kind="awq", out=out)
    library = Library(tmp_path / "home")
    with pytest.raises(InsufficientMemory, match=r"\(\d+ bytes\)"):
        make_folder.make_folder(asked, library, Budget(bytes=1 << 20, limit="a limit"), Silent())
    with monkeypatch.context() as patched:
        patched.setattr(limits, "disk_free_bytes", lambda folder: 1 << 20)
        with pytest.raises(InsufficientDisk):
            make_folder.make_folder(asked, library, PLENTY, Silent())
    for wrong, said in (
        (asked._replace(group_size=96), "Those that do: 128, 64, 32"),
        (asked._replace(out=source), "is there already"),
    ):
        with pytest.raises(LayaError, match=said):
            make_folder.make_folder(wrong, library, PLENTY, Silent())
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("stage", ["reading", "rounding"])
def test_ctrl_c_leaves_nothing(source: Path, tmp_path: Path, stage: str) -> None:
    out = tmp_path / "out" / "nano-awq"
    out.parent.mkdir()
    words = [sys.executable, "-m", "laya.cli", "quantize", str(source), "--to", "awq", "--out", str(out)]
    child = subprocess.Popen(words, env=environment(tmp_path), start_new_session=True, stderr=subprocess.DEVNULL)
    part = out.parent / ".nano-awq.laya-part" / "work"
    wanted = part if stage == "reading" else part / "mixtral"
    deadline = time.monotonic() + 200
    while not wanted.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert wanted.exists()
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(60) != 0
    assert list(out.parent.iterdir()) == []


def test_a_quantized_folder_is_not_quantized_again(made: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    folder, _, kind = made
    asked = FolderAsked(model=model_at(folder), kind=kind, out=tmp_path / "again")
    with pytest.raises(LayaError, match=f"quantized already \\({kind}\\)"):
        make_folder.make_folder(asked, Library(tmp_path / "home"), PLENTY, Silent())
