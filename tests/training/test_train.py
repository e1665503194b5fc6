"""`laya train`: a small recipe, whole, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from laya.training import recipe as recipes
from laya.training import train
from laya.training.run_folder import RunFolder

STEPS = 24
RECIPE = """
name: tiny
sources:
  - {{topic: words, package: "folder:{texts}", licence: own, files: ["words-*"]}}
  - {{topic: numbers, package: "folder:{texts}", licence: own, files: ["numbers-*"]}}
held_out: {{share: 0.0, files: ["*-0.txt"]}}
model: {{vocab_size: 300, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, num_local_experts: 4,
        max_position_embeddings: 64, router_projection_size: 8}}
train: {{tokens: {tokens}, sequence_tokens: 16, sequences_per_step: 4, warmup_steps: 4, checkpoint_steps: 5,
        held_out_steps: 8, held_out_tokens: 256, learning_rate: 0.01}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "texts").mkdir()
    for number in range(4):
        named = ("river", "mountain", "engine") * 40
        words = " ".join(f"the {word} of the {word[::-1]}" for word in sorted(named))
        (folder / "texts" / f"words-{number}.txt").write_text(words)
        (folder / "texts" / f"numbers-{number}.txt").write_text(" ".join(str(n * 7 + number) for n in range(400)))
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(texts=folder / "texts", tokens=STEPS * 64))
    return path


def _words(recipe: Path, out: Path) -> list[str]:
    return [str(recipe), "--out", str(out), "--threads", "1", "--cache", str(recipe.parent / "cache"), "--json"]


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from beginning to end."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train.main(_words(recipe, out)) == 0
    return out


def _log(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_what_a_run_leaves(whole: Path) -> None:
    assert [line["step"] for line in _log(whole) if "learning_rate" in line] == list(range(1, STEPS + 1))
    looks = [line for line in _log(whole) if "layers" in line]
    assert [look["step"] for look in looks] == [8, 16, 24] and len(looks[0]["layers"]) == 2  # type: ignore[arg-type]
    assert looks[-1]["loss"] < looks[0]["loss"]  # type: ignore[operator]
    for picture in ("loss.png", "balance.png"):
        assert (whole / picture).read_bytes().startswith(b"\x89PNG")
    card = (whole / "model" / "README.md").read_text()
    assert "folder:" in card and "words 1 of 4" in card and "MaxVio" in card
    assert not list(whole.rglob("*.part"))
    modes = {path.name: path.stat().st_mode for path in (whole / "model").iterdir()}
    assert modes["model.safetensors"] == modes["README.md"], "as the umask says, not a temporary file's"


def test_the_model_is_one_that_transformers_loads(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    ids = tokenizer("the river of", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "the river of"
    out = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] == ids.shape[1] + 4
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"


def test_killed_and_resumed_is_as_if_it_had_not_been(whole: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "laya.training.train", *_words(recipe, out)], env=os.environ
    )
    until = time.monotonic() + 120
    while not (out / "checkpoint.pt").is_file():
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (out / "model").exists()
    assert train.main(_words(recipe, out)) == 0
    assert _log(out) == _log(whole)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (out, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_sigint_ends_after_a_whole_step_and_keeps_it(
    whole: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train._step

    def interrupted(*args: object) -> object:
        if args[4] == 6:
            signal.raise_signal(signal.SIGINT)
        return step(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(train, "_step", interrupted)
        assert train.main(_words(recipe, tmp_path / "run")) == 130
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 7
    assert train.main(_words(recipe, tmp_path / "run")) == 0
    assert _log(tmp_path / "run") == _log(whole)


def test_a_folder_of_something_else_is_refused(
    whole: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(_words(recipe, whole)) == 2
    assert "trained already" in capsys.readouterr().err
    begun = tmp_path / "begun"
    begun.mkdir()
    for name in ("recipe.json", "checkpoint.pt"):
        (begun / name).write_bytes((whole / name).read_bytes())
    assert train.main([*_words(recipe, begun), "--seed", "9"]) == 2
    assert "seed: 1 there, 9 now" in capsys.readouterr().err
    with RunFolder.open(begun, recipes.load(str(recipe)), None) as folder:
        assert folder.n_threads == 1
        assert train.main(_words(recipe, begun)) == 2
    assert "another process trains there" in capsys.readouterr().err
    (begun / "checkpoint.pt").write_bytes((whole / "checkpoint.pt").read_bytes()[:5000])
    assert train.main(_words(recipe, begun)) == 2
    assert "checkpoint.pt cannot be read" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert train.main(_words(recipe, tmp_path / "other")) == 2
    assert "no run of `laya train`" in capsys.readouterr().err


def test_a_log_with_garbage_in_it_and_texts_that_changed(
    whole: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("recipe.json", "checkpoint.pt", "log.jsonl"):
        (run / name).write_bytes((whole / name).read_bytes())
    with (run / "log.jsonl").open("ab") as log:
        log.write(b'\0\0\n[1]\n{"step": null}\n{"step": 3')
    changed = recipe.parent / "texts" / "words-1.txt"
    before = changed.read_text()
    changed.write_text(before + " and more")
    try:
        assert train.main(_words(recipe, run)) == 2
    finally:
        changed.write_text(before)
    assert "begun with other texts" in capsys.readouterr().err
    assert train.main(_words(recipe, run)) == 0  # its steps are done: what it is worth is measured again
    assert _log(run)[:-1] == _log(whole)


def test_a_loss_that_is_no_number_ends_it(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steep.yaml"
    path.write_text(recipe.read_text().replace("learning_rate: 0.01", "learning_rate: 1.0e+38"))
    assert train.main([str(path), *_words(recipe, tmp_path / "run")[1:]]) == 1
    assert "a lower train.learning_rate may help" in capsys.readouterr().err
    assert train.main([*_words(recipe, tmp_path / "run"), "--threads", "0"]) == 2
    assert "--threads: expected 1 or more, got 0" in capsys.readouterr().err
    path.write_text(recipe.read_text().replace("hidden_size: 32,", "hidden_size: 4000000,"))
    assert train.main([str(path), *_words(recipe, tmp_path / "run")[1:]]) == 3
    assert "may be used" in capsys.readouterr().err


def test_twins(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--tokens", "128"]
    assert train.main([*_words(recipe, tmp_path / "dense"), *short, "--dense"]) == 0
    dense = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert dense["layers"] == [] and not (tmp_path / "dense" / "balance.png").exists()
    assert train.main([*_words(recipe, tmp_path / "bare"), *short, "--no-balance"]) == 0
    assert all(line["aux_loss"] == 0 for line in _log(tmp_path / "bare") if "aux_loss" in line)


def test_more_vocabulary_than_the_texts_give(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text(recipe.read_text().replace("vocab_size: 300", "vocab_size: 4000"))
    assert train.main([str(path), "--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]) == 2
    assert "the texts give no more than" in capsys.readouterr().err
