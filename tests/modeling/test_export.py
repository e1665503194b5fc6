"""Exported models compute what the torch model does, are refused where they could not, and are served."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import OpenAI
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from laya.modeling.export import _SAMPLE, export_gguf, export_mixtral, main, n_weights
from laya.modeling.gguf_file import write_gguf
from laya.modeling.parity import prompts_of
from laya.quantization.llama_api import Evaluator, check_layout
from tests.conftest import RunningServer
from tests.modeling.small_model import small, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough to compare on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(_SAMPLE.read_text()[:800])
    return path


@pytest.fixture(scope="module")
def folder(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "small"
    small().save_pretrained(path)
    shutil.copy(tokenizer_file, path)
    return path


def test_f32_file_is_the_torch_model(folder: Path, text: Path, tmp_path: Path) -> None:
    parity = export_gguf(folder, tmp_path / "small.gguf", "f32", text, greedy_tokens=8)
    assert parity["mean_kl"] < 1e-5 and parity["same_experts_share"] > 0.999
    assert parity["n_same_greedy"] == parity["n_greedy_prompts"] > 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


@pytest.mark.engine
def test_file_is_served(tokenizer_file: Path, tmp_path: Path, start_server: Callable[..., RunningServer]) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(small(), tokenizer_file, path)
    server = start_server(str(path), "--max-seq-len", "256")
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.completions.create(model="small", prompt="A router is", max_tokens=8, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_mixtral_form_is_the_torch_model(folder: Path, tmp_path: Path) -> None:
    assert export_mixtral(folder, tmp_path / "mixtral") < 1e-4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral")
    assert type(loaded).__name__ == "MixtralForCausalLM" and (tmp_path / "mixtral" / "tokenizer.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["mixtral"]
    with safe_open(tmp_path / "mixtral" / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in list(file.keys())}
    assert {kind for name, kind in kinds.items() if "gate.weight" in name} <= {"F32", "F16", "BF16"}
    assert sum(name.endswith("gate.weight") for name in kinds) == 2


@pytest.mark.parametrize(
    ("router", "told"),
    [
        ({"router_rule": {"score_func": "sigmoid"}}, "score_func 'sigmoid'"),
        ({"router_rule": {"renormalize": False}}, "renormalize false"),
        ({"router_options": {"has_logit_bias": True}}, "a bias of the logits"),
        ({"router_rule": {"n_group": 2, "topk_group": 1}}, "2 groups"),
    ],
)
def test_router_that_llama_cpp_does_not_compute_is_refused(
    router: dict[str, object], told: str, tokenizer_file: Path, tmp_path: Path
) -> None:
    model = small(**router)
    gate = model.model.layers[0].mlp.gate
    if gate.logit_bias is not None:
        gate.logit_bias.data[0] = 1.0
    with pytest.raises(ValueError, match=f"layer 0's router has {told}"):
        write_gguf(model, tokenizer_file, tmp_path / "no.gguf")
    assert list(tmp_path.iterdir()) == []


def test_difference_is_found_and_leaves_no_file(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laya.modeling.gguf_file._side_by_side", lambda weight, n_heads: weight)
    with pytest.raises(ValueError, match=r"llama\.cpp computes something else: mean KL"):
        export_gguf(folder, tmp_path / "wrong.gguf", "f32", text, greedy_tokens=0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_told_in_a_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.gguf").write_text("kept")
    assert main([str(folder), "--out", str(tmp_path / "there.gguf")]) == 2
    assert (tmp_path / "there.gguf").read_text() == "kept"
    assert main([str(tmp_path), "--out", str(tmp_path / "a.gguf")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert "there.gguf is there already" in told[0] and "is no folder of a Laya model" in told[1], told


def test_a_folder_without_all_of_its_weights_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    lost = next(name for name in weights if name.endswith("down_proj"))
    del weights[lost]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for form in ("mixtral", "gguf"):
        assert main([str(broken), "--to", form, "--out", str(tmp_path / form)]) == 2
        assert f"lacks weights, which would be drawn at random: {lost}" in capsys.readouterr().err
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:3000])
    assert main([str(broken), "--out", str(tmp_path / "gguf")]) == 2
    assert "is cut off or corrupt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_model_without_room_is_refused_before_it_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = tmp_path / "huge"
    shutil.copytree(folder, huge)
    header = json.dumps({"a": {"dtype": "F16", "shape": [1 << 22, 1 << 20], "data_offsets": [0, 1 << 43]}}).encode()
    with (huge / "model.safetensors").open("wb") as file:  # 8 TiB that are not on the disk
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 43))
    assert n_weights(huge) == 1 << 42
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    assert main([str(huge), "--out", str(tmp_path / "a.gguf")]) == 3
    assert f"{tmp_path / 'a.gguf'} takes 8192.0 GiB of disk; {tmp_path} has" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 60))
    assert main([str(huge), "--out", str(tmp_path / "a.gguf")]) == 3
    assert f"Exporting {huge} takes 32768.0 GiB" in capsys.readouterr().err


def test_sigterm_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: signal.raise_signal(signal.SIGTERM))
    assert main([str(folder), "--out", str(tmp_path / "a.gguf")]) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        ('{"model_type": "llama"}', [], "model_type is 'llama'; what is exported is 'laya'"),
        ("[]", [], "is no configuration of a model"),
        (
            '{"model_type": "laya"}',
            ["--type", "f32"],
            "there is no .safetensors file beside config.json. Name",
        ),
        ('{"model_type": "laya"}', ["--text", "nowhere"], "--text nowhere: there is no such file"),
        ('{"model_type": "laya"}', ["--out", "no/folder/a.gguf"], "there is no folder no/folder"),
        ('{"model_type": "laya"}', ["--greedy-tokens", "-1"], "--greedy-tokens: expected 0 or more, got -1"),
    ],
)
def test_what_can_be_known_before_is_told_before(
    config: str, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config)
    if words != ["--type", "f32"]:
        (tmp_path / "model.safetensors").touch()
    assert main([str(tmp_path), "--out", str(tmp_path / "a.gguf"), *words]) == 2
    assert told in capsys.readouterr().err


def test_evaluator_refuses_what_it_cannot_take(folder: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(small(), tokenizer_file, path, kind="f32")
    evaluator = Evaluator(path, n_ctx=16, n_threads=1)
    with pytest.raises(ValueError, match="17 tokens; this context takes 1 to 16"):
        evaluator.logits(range(17))
    evaluator.close()
    with pytest.raises(Exception, match="cannot be loaded"):
        Evaluator(folder / "config.json", n_ctx=16, n_threads=1)
    with pytest.raises(Exception, match="lays its parameters out in a way that is not known"):
        check_layout(bytes(512))


def test_prompts_are_spread_over_the_text() -> None:
    assert prompts_of(range(100), 3, 10) == [list(range(10)), list(range(45, 55)), list(range(90, 100))]
    assert prompts_of(range(5), 3, 10) == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match=r"no token"):
        prompts_of([])


def test_verb_prints_json_last(folder: Path, text: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "laya.cli", "export", str(folder), "--text", str(text), "--json", "--out"]
    words.append(str(tmp_path / "a.gguf"))
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["exported"] == str(tmp_path / "a.gguf")
