"""`laya eval` on whole files: broken variants are caught, figures are transformers' own, the table is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from laya.modeling import LayaConfig, LayaForCausalLM
from laya.modeling.export import as_mixtral
from laya.modeling.gguf_file import write_gguf
from laya.models.library import Library
from laya.quantization.evaluate import main
from laya.quantization.inspection import inspect
from laya.quantization.likelihood import Subject
from laya.quantization.measuring import measure, mixed_text
from tests.conftest import RunningServer
from tests.quantization.tiny_gguf import write_tiny

QUICK = ("--no-speed", "--no-tasks", "--no-memory", "--tokens", "256", "--window", "64", "--n-threads", "1", "--json")
SET = """
{"id": "a", "kind": "contains", "prompt": "Say a", "answer": "a", "max_tokens": 4}
{"id": "b", "kind": "json_schema", "prompt": "A number", "schema": {"type": "integer"}, "max_tokens": 4}
{"id": "c", "kind": "choice", "prompt": "The sun rises in the", "choices": [" east", " soup"], "answer": " east"}
"""


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own is not touched."""
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with 4 experts, F16."""
    return write_tiny(tmp_path_factory.mktemp("moe") / "f16.gguf", n_layers=2, n_experts=4)


def changed(
    source: Path, path: Path, change: Callable[[str, Any], tuple[Any, gguf.GGMLQuantizationType | None]]
) -> Path:
    """The model with other tensors: `change` gives each one's data, and its type where it is quantized."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        data, kind = change(tensor.name, np.array(tensor.data))
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    assert said.out, said.err
    report: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    return code, report


def flags(report: dict[str, Any], name: str) -> list[str]:
    (variant,) = [each for each in report["variants"] if each["name"] == name]
    return [flag["what"] for flag in variant["flags"] if flag["is_broken"]]


def test_broken_variants_are_caught(moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def zeroed(name: str, data: Any) -> tuple[Any, None]:
        if name == "blk.1.ffn_down_exps.weight":
            data[2] = 0
        return data, None

    def small_router(name: str, data: Any) -> tuple[Any, gguf.GGMLQuantizationType | None]:
        if name != "blk.0.ffn_gate_inp.weight":
            return data, None
        kind = gguf.GGMLQuantizationType.Q4_0
        return gguf.quantize(data, kind), kind

    def swapped(name: str, data: Any) -> tuple[Any, None]:
        return (data[[1, 0, 2, 3]] if name == "blk.0.ffn_gate_inp.weight" else data), None

    files = [changed(moe, tmp_path / f"{change.__name__}.gguf", change) for change in (zeroed, small_router, swapped)]
    quant = ",".join(map(str, (moe, "q8_0", *files)))
    code, report = evaluated(capsys, moe, "--quant", quant, "--reference", "f16", "--strict", *QUICK)
    assert code == 1 and report["reference"] == "f16"
    assert flags(report, "f16") == flags(report, "q8_0") == []
    assert "blk.1.ffn_down_exps.weight, expert 2 is all zero" in flags(report, "zeroed")
    assert "the router blk.0.ffn_gate_inp.weight is Q4_0: routers stay at 16 bits or more" in flags(
        report, "small_router"
    )
    told = " ".join(flags(report, "swapped"))
    assert "blk.0.ffn_gate_inp.weight (F32) is" in told and "same experts" in told, told
    assert evaluated(capsys, moe, "--quant", f"{moe},q8_0", "--strict", *QUICK)[0] == 0
    assert set(tmp_path.glob("*.gguf")) == set(files)


def test_tensors_that_hold_no_numbers_are_told(moe: Path, tmp_path: Path) -> None:
    def broken(name: str, data: Any) -> tuple[Any, None]:
        if name == "blk.0.ffn_up_exps.weight":
            data[3, 0, 0] = np.nan
        return data, None

    path = changed(moe, tmp_path / "nan.gguf", broken)
    assert [flag.what for flag in inspect(path, moe)] == ["blk.0.ffn_up_exps.weight, expert 3 holds NaN or infinity"]
    assert inspect(moe) == []


def test_unpacked_weights_are_as_far_off_as_four_bits_are(moe: Path, tmp_path: Path) -> None:
    """Those of a block's matrices; a router was never packed."""

    def nudged(name: str, data: Any) -> tuple[Any, None]:
        return (data * np.float32(1.1) if name in ("blk.0.ffn_up_exps.weight", router) else data), None

    router = "blk.1.ffn_gate_inp.weight"
    path = changed(moe, tmp_path / "unpacked.gguf", nudged)
    assert len(inspect(path, moe)) > 1
    (flag,) = inspect(path, moe, is_unpacked=True)
    assert flag.what.startswith(f"{router} (F32) is 10.0% off the reference"), flag


def test_figures_are_those_of_transformers(tmp_path: Path) -> None:
    text = mixed_text("mixed")[:3000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 256}
    config = LayaConfig(vocab_size=400, tie_word_embeddings=True, initializer_range=0.15, **sizes)
    model = LayaForCausalLM(config).eval()
    other = LayaForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * weight.abs().mean() * torch.randn_like(weight)
    subjects = []
    for name, each in (("model", model), ("other", other)):
        write_gguf(each, tmp_path / "tokenizer.json", tmp_path / f"{name}.gguf", kind="f32")
        subjects.append(Subject(name=name, path=tmp_path / f"{name}.gguf"))
    (tmp_path / "text.txt").write_text(text)
    measured = measure(
        subjects, text=tmp_path / "text.txt", n_tokens=508, window_tokens=128, n_vocab=400, n_threads=1, questions=[],
        folder=tmp_path, tell=lambda words: None, exact=True,
    )  # fmt: skip
    ids = torch.tensor(tokenizer.encode(text).ids[:512]).view(4, 128)
    with torch.inference_mode():
        ours, theirs = (
            as_mixtral(each)(input_ids=ids).logits[:, :-1].double().log_softmax(-1) for each in (model, other)
        )
    for name, logits in (("model", ours), ("other", theirs)):
        perplexity = float(torch.nn.functional.nll_loss(logits.flatten(0, 1), ids[:, 1:].flatten()).exp())
        assert measured.likelihood[name].perplexity.value == pytest.approx(perplexity, rel=5e-3)
    kl = (ours.exp() * (ours - theirs)).sum(-1)
    found = measured.likelihood["other"]
    assert found.mean_kl is not None and found.same_top_share is not None and found.max_kl is not None
    assert float(kl.mean()) > 1e-3, "nothing to tell apart"
    assert abs(found.mean_kl.value - float(kl.mean())) < 1e-4
    assert found.max_kl == pytest.approx(float(kl.max()), abs=1e-3)
    same = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    assert found.same_top_share.value == pytest.approx(same, abs=0.01)
    assert found.n_tokens == 4 * 127 and found.same_experts_share is not None


@pytest.mark.engine
def test_table_is_complete(moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set.jsonl").write_text(SET)
    words = [moe, "--quant", f"{moe},q8_0", "--kv", "q8_0", "--set", tmp_path / "set.jsonl", "--against", moe]
    words += ["--tokens", "128", "--window", "64", "--repeats", "2", "--n-threads", "1"]
    words += ["--html", tmp_path / "report.html", "--json"]
    code, report = evaluated(capsys, *words)
    assert code == 0 and [each["name"] for each in report["variants"]] == ["f16", "q8_0", "f16 kv q8_0"]
    for each in report["variants"]:
        memory, speed = each["memory"], each["speed"]
        assert memory["is_in_band"] and memory["load_s"] > 0, memory
        assert speed["n_rounds"] == 2 and speed["decode_tokens_per_s"]["low"] > 0
        assert each["tasks"]["n"] == 3 and set(each["tasks"]["kinds"]) == {"contains", "json_schema", "choice"}
    plain, quantized, small_cache = report["variants"]
    assert plain["likelihood"]["mean_kl"] is None and 0 < quantized["likelihood"]["mean_kl"]["value"] < 0.01
    assert 0 < small_cache["likelihood"]["mean_kl"]["value"] < 0.05 and small_cache["kv_cache_dtype"] == "q8_0"
    assert small_cache["memory"]["kv_bytes"] < 0.6 * plain["memory"]["kv_bytes"]
    assert quantized["file_bytes"] < 0.6 * plain["file_bytes"]
    assert 99 < quantized["quality_percent"]["value"] < 101 and "quality = " in report["definitions"][0]
    assert report["against"]["n"] == 3 and report["against"]["n_wins"] == report["against"]["n_losses"] == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2 and "http" not in page.replace("http://www.w3.org", "").split("<figure>")[0]


@pytest.mark.engine
def test_two_models_are_compared_by_api(
    server: RunningServer, smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.jsonl").write_text(SET)
    address = f"{server.url}/v1#smollm2"
    words = [smollm2_path, "--against", address, "--set", tmp_path / "set.jsonl", "--n-threads", "1", "--json"]
    code, report = evaluated(
        capsys, *words, "--no-tasks", "--no-speed", "--no-memory", "--tokens", "64", "--window", "64"
    )
    found = report["against"]
    assert code == 0 and report["reference"] is None and report["variants"][0]["quality_percent"] is None
    assert 1 < report["variants"][0]["likelihood"]["perplexity"]["value"] < 200
    assert (found["theirs"], found["n"], found["note"].partition(":")[0]) == (
        "smollm2",
        3,
        "perplexity is not compared",
    )
    assert found["n_wins"] + found["n_losses"] <= 3 and found["same_answers_share"]["value"] > 0.6  # the same model
    assert main([str(smollm2_path), "--against", f"{server.url}/v1"]) == 2
    assert "which model? Write it behind a #" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--quant", "q8_1"], "Did you mean 'q8_0'?"),
        (["--kv", "q7"], "'q7' is not a type of KV cache"),
        (["--reference", "f32"], "--reference f32: no variant of the table; there are f16"),
        (["--tokens", "-1"], "--tokens: expected 0 or more, got -1"),
        (["--text", "nowhere"], "--text nowhere: No such file"),
        (["--text", "/proc/self/exe"], "--text /proc/self/exe: no text"),
        (["--html", "."], "--html .: that is a folder"),
        (["--against", "http://127.0.0.1:9/v1"], "which model? Write it behind a #"),
        (["--set", "nowhere"], "--set nowhere: there is no such file"),
        (["--html", "no/folder/a.html"], "there is no folder"),
    ],
)
def test_what_can_be_known_before_is_told_before(
    words: list[str], told: str, moe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(moe), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_before(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(moe), "--against", "http://127.0.0.1:9/v1#model"]) == 1
    assert "http://127.0.0.1:9/v1 did not answer" in capsys.readouterr().err


def test_what_a_killed_run_left_goes_with_the_next(
    moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = Library(tmp_path / "home").scratch_path("eval 1") / "q8_0.gguf"
    left.parent.mkdir(parents=True)
    left.write_text("gigabytes")
    pulled = Library(tmp_path / "home").work_path("a-model")
    pulled.mkdir()
    assert evaluated(capsys, moe, "--quant", f"{moe},q8_0", *QUICK)[0] == 0
    assert list((tmp_path / "home" / "partial").iterdir()) == [pulled]


def test_weights_that_cannot_be_compared_are_told(moe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_0
    path = changed(
        moe,
        tmp_path / "packed.gguf",
        lambda name, data: (gguf.quantize(data, kind), kind) if name.endswith("attn_q.weight") else (data, None),
    )

    def unknown(data: Any, qtype: Any) -> Any:
        raise NotImplementedError(qtype)

    monkeypatch.setattr(gguf, "dequantize", unknown)
    (flag,) = inspect(path, moe)
    assert flag.what == "2 tensors were not compared: Q4_0 cannot be read here" and not flag.is_broken
