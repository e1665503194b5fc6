"""A dense model becomes a Mixture of Experts that computes the same, uses its experts evenly, and is exported."""

from __future__ import annotations

import io
import json
import signal
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from laya.errors import BadModelFile, InsufficientMemory
from laya.modeling import LayaForCausalLM
from laya.modeling.export import export_gguf
from laya.quantization.llama_api import Evaluator
from laya.texts import load_set
from laya.training.parent import open_parent
from laya.training.parent_tokenizer import tokenizer_of
from laya.training.upcycle import main
from laya.training.upcycled_folder import ModelFolder
from tests.training.dense_model import TEMPLATE, dense, tokenizer, write_folder, write_gguf

IDS = torch.arange(40)[None] * 7 % 300


@pytest.fixture(scope="module")
def gguf_parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("parent") / "small.gguf", dense())


@pytest.fixture(scope="module")
def folder_parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("parent") / "small-hf", dense(tie_word_embeddings=False))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code = main([*map(str, words), "--threads", "1"])
    told = capsys.readouterr()
    assert code == 0, told.err
    return dict(json.loads(told.out.splitlines()[-1]))


@pytest.fixture(scope="module")
def result(gguf_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("upcycled")
    words = [str(gguf_parent), "--out", str(folder / "moe"), "--steps", "60", "--threads", "1", "--json"]
    for option, part in (("--text", slice(0, 6000)), ("--held-out", slice(6000, 8000))):
        words.append(option)
        for number, document in enumerate(load_set("mixed")):
            words.append(str(folder / f"{option[2:]}-{number}.txt"))
            Path(words[-1]).write_text(document.text[part])
    with redirect_stdout(io.StringIO()) as told:
        assert main(words) == 0
    return dict(json.loads(told.getvalue()))


@pytest.fixture(scope="module")
def upcycled(result: dict[str, Any]) -> Path:
    return Path(result["upcycled"])


def test_model_of_a_gguf_file_is_its_parent_and_balanced(
    gguf_parent: Path, upcycled: Path, result: dict[str, Any]
) -> None:
    assert result["max_kl_before"] < 1e-6 and abs(result["perplexity_ratio"] - 1) < 1e-4
    assert result["layers_outside_band"] == [] and result["n_dead"] == 0, result["layers"]
    model = AutoModelForCausalLM.from_pretrained(upcycled).eval()
    assert type(model) is LayaForCausalLM and model.config.num_local_experts == 8
    assert sum(p.numel() for p in model.parameters()) == result["n_parameters"]
    parent = open_parent(gguf_parent)
    theirs = LlamaForCausalLM(parent.config).eval()
    theirs.load_state_dict(
        {name: parent.tensor(name) for name in theirs.state_dict() if name != "lm_head.weight"}, strict=False
    )
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, atol=1e-4, rtol=1e-4)
        close = dense()(IDS).logits  # what was quantized
    assert torch.corrcoef(torch.stack([model(IDS).logits.flatten(), close.flatten()]))[0, 1] > 0.999
    card = (upcycled / "README.md").read_text()
    assert result["parent_sha256"] in card and "equal to the parent's" in card and "license: apache-2.0" in card


def test_model_of_a_folder_has_noise_where_asked_and_trained_experts(
    folder_parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (folder_parent, "--experts", 4, "--steps", 20, "--dtype", "bfloat16", "--json")
    noisy = run(capsys, *words, "--perturb", 0.02, "--out", tmp_path / "noisy")
    assert 1e-6 < noisy["max_kl_before"] < 0.1 and abs(noisy["perplexity_ratio"] - 1) < 0.05
    again = run(capsys, *words, "--perturb", 0.02, "--out", tmp_path / "again")
    assert [layer["share"] for layer in again["layers"]] == [layer["share"] for layer in noisy["layers"]]

    trained = run(capsys, *words, "--train-experts", 12, "--out", tmp_path / "trained")
    assert trained["perplexity"] < trained["parent_perplexity"]
    state = load_file(tmp_path / "trained" / "layer-000.safetensors")
    experts = state["model.layers.0.mlp.experts.down_proj"]
    assert experts.dtype is torch.bfloat16 and not torch.equal(experts[0], experts[1])
    assert state["model.layers.0.mlp.gate.projection"].dtype is torch.float32
    assert "trained on 12 windows" in (tmp_path / "trained" / "README.md").read_text()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not loaded.config.tie_word_embeddings
    assert (tmp_path / "trained" / "chat_template.jinja").read_text() == TEMPLATE


def test_tokens_and_template_are_the_parents(gguf_parent: Path, upcycled: Path) -> None:
    ours = AutoTokenizer.from_pretrained(upcycled)
    read = Tokenizer.from_file(str(upcycled / "tokenizer.json"))
    text = "<user>" + load_set("mixed")[0].text[:3000] + "<answer> 123 wörld 漢字"
    evaluator = Evaluator(gguf_parent, n_ctx=8, n_threads=1)
    ids = evaluator.tokens_of(text)
    evaluator.close()
    assert ids == tokenizer().encode(text).ids == read.encode(text).ids == ours(text)["input_ids"]
    assert tokenizer_of(open_parent(gguf_parent)).decode(ids, skip_special_tokens=False) == text
    chat = ours.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<user>Hi<answer>" and ours.eos_token == "</s>"


def test_export_runs_as_the_torch_model(upcycled: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(load_set("mixed")[1].text[:600])
    parity = export_gguf(upcycled, tmp_path / "moe.gguf", "f32", text, greedy_tokens=4)
    assert parity["mean_kl"] < 1e-5 and parity["same_experts_share"] > 0.999
    assert parity["n_same_greedy"] == parity["n_greedy_prompts"]


def test_what_cannot_be_is_told_and_leaves_nothing(
    folder_parent: Path,
    upcycled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    biased = write_folder(tmp_path / "biased", dense(attention_bias=True))
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    longer = write_folder(tmp_path / "longer", dense(rope_parameters=scaled))
    (tmp_path / "short.txt").write_text("too short")
    export = tmp_path / "moe.gguf"
    export_gguf(upcycled, export, "f32", tmp_path / "short.txt", greedy_tokens=0)
    there = sorted(tmp_path.iterdir())
    out = tmp_path / "out"
    for words, told in (
        ((folder_parent, "--out", out, "--experts", 2, "--top-k", 3), "--top-k 3: there are 2 experts to choose from"),
        ((folder_parent, "--out", upcycled), "is there already"),
        ((folder_parent, "--out", tmp_path / "no" / "out"), "there is no folder"),
        ((folder_parent, "--out", out, "--perturb", -1), "--perturb: expected 0 or more, got -1"),
        ((folder_parent, "--out", out, "--perturb", "nan"), "--perturb: expected 0 or more, got nan"),
        ((folder_parent, "--out", out, "--text", tmp_path / "short.txt"), "no document is as long as a window"),
        ((folder_parent, "--out", out, "--text", tmp_path / "none.txt"), "there is no such file"),
        ((upcycled, "--out", out), "model_type is 'laya', with 8 experts; what is upcycled is dense 'llama'"),
        ((export, "--out", out), "has 8 experts already: a parent is dense"),
        ((biased, "--out", out), "attention_bias is true"),
        ((longer, "--out", out), "scales its rotary embedding ('linear')"),
    ):
        assert main([*map(str, words)]) == 2
        assert told in capsys.readouterr().err
    assert main(["no-such-model", "--out", str(out)]) != 0
    (tmp_path / "cut.gguf").write_bytes(export.read_bytes()[:-5000])
    there.append(tmp_path / "cut.gguf")
    assert main([str(tmp_path / "cut.gguf"), "--out", str(out)]) == BadModelFile.exit_code
    assert "is cut off" in capsys.readouterr().err
    monkeypatch.setattr("laya.training.upcycle.need_bytes", lambda *_args, **_kwargs: 1 << 60)
    assert main([str(folder_parent), "--out", str(out)]) == InsufficientMemory.exit_code
    assert "Upcycling this model takes" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == sorted(there)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_leaves_nothing(
    number: signal.Signals, folder_parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_layer = ModelFolder.write_layer

    def write_and_be_interrupted(folder: ModelFolder, layer: int, state: dict[str, torch.Tensor]) -> None:
        write_layer(folder, layer, state)
        assert list(folder.path.iterdir()) and folder.path.parent == tmp_path
        signal.raise_signal(number)

    monkeypatch.setattr(ModelFolder, "write_layer", write_and_be_interrupted)
    text = folder_parent / "text.txt"
    text.write_text(load_set("mixed")[0].text)
    words = [str(folder_parent), "--steps", "1", "--text", str(text), "--out", str(tmp_path / "moe")]
    before = signal.getsignal(signal.SIGTERM)
    assert main([*words, "--threads", "1"]) == (130 if number == signal.SIGINT else 143)
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) is before
