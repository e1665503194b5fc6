"""What all verbs of the lab have in common: exit codes, an interruption that says what is left, plain progress."""

from __future__ import annotations

import io
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from laya.cli.main import main as cli
from laya.lab_progress import Progressing
from laya.lab_verb import run_verb
from laya.modeling.export import main as export
from laya.quantization.evaluate import main as evaluate
from laya.result_file import as_umask_says
from laya.training.train import main as train
from laya.training.upcycle import main as upcycle

Verb = Callable[[list[str]], int]


def _of_cli(verb: str) -> Verb:
    def run(words: list[str]) -> int:
        with pytest.raises(SystemExit) as end:
            cli([verb, *words])
        assert isinstance(end.value.code, int)
        return end.value.code

    return run


quantize, experts = _of_cli("quantize"), _of_cli("experts")


@pytest.mark.parametrize(
    ("verb", "words", "told"),
    [
        (train, ["laya-nan", "--out", "run"], "did you mean laya-nano?"),
        (train, ["--out", "run", "--tokens", "0"], "--tokens: expected 1 or more, got 0"),
        (train, ["--out", "a-file/run"], "--out a-file/run: Not a directory"),
        (train, ["--out", "a-file"], "--out a-file: that is a file"),
        (upcycle, ["smollm3", "--out", "moe"], "The model 'smollm3' does not exist"),
        (upcycle, ["laya-nano", "--out", "there"], "--out there is there already"),
        (upcycle, ["laya-nano", "--out", "moe", "--threads", "0"], "--threads: expected 1 or more, got 0"),
        (export, ["there", "--out", "a.gguf"], "there is no folder of a Laya model"),
        (evaluate, ["laya-nan"], "Did you mean 'laya-nano'?"),
        (evaluate, ["laya-nano", "--repeats", "0"], "--repeats: expected 1 or more, got 0"),
        (quantize, ["laya-nano"], "Missing option '--to'. `laya quantize --help` lists what it takes."),
        (quantize, ["laya-nano", "--to", "q4"], "Did you mean 'q4_k_m'?"),
        (quantize, ["laya-nano", "--to", "q8_1"], "Did you mean 'q8_0'?"),
        (quantize, ["laya-nano", "--to", "q4_0", "--threads", "0"], "--threads: expected a number >= 1, got 0"),
        (experts, ["laya-nano", "--window", "1"], "--window: expected a number >= 2, got 1"),
        (experts, ["laya-nano", "--set", "mixt"], "Did you mean 'mixed'?"),
    ],
)
def test_what_was_asked_wrongly_ends_with_2(
    verb: Verb, words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    (tmp_path / "there").mkdir()
    (tmp_path / "a-file").touch()
    assert verb(words) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in tmp_path.iterdir()} <= {"there", "a-file", "home"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interruption_says_what_is_left(
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    before = signal.getsignal(signal.SIGTERM)
    for verb, place, words, told in (
        (quantize, "laya.quantization.make.job_of", ["laya-nano", "--to", "q4_0"], "models and files are as they were"),
        (experts, "laya.cli.experts.ask", ["laya-nano"], "nothing is written"),
        (evaluate, "laya.quantization.evaluate.variants", ["laya-nano"], "no report is written"),
        (upcycle, "laya.training.upcycle._asked", ["a", "--out", "moe"], "nothing is left of moe"),
        (export, "laya.modeling.export._check", ["a", "--out", "b.gguf"], "nothing is left of b.gguf"),
        (train, "laya.training.train._chosen", ["--out", "run"], "the same command goes on from run"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, interrupted)
            assert verb(words) == code, place
        said = capsys.readouterr().err.splitlines()[-1]
        assert "interrupted; " in said and said.endswith(told), place
        assert signal.getsignal(signal.SIGTERM) is before


def test_an_interruption_while_a_verb_is_read_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow_to_read.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    words = [sys.executable, "-m", "laya.lab_verb", "slow_to_read"]
    environ = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, preexec_fn=_hear_sigint)
    assert (ended.returncode, ended.stderr) == (130, "laya: interrupted; nothing was begun\n")


def _hear_sigint() -> None:
    """A test run may be started with SIGINT ignored, and its children would be too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_what_fails_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise OSError(28, "No space left on device", "model.gguf")

    assert run_verb("export", "nothing is left", fail) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_where_there_is_no_terminal_a_line_is_said_now_and_then() -> None:
    said = io.StringIO()
    with Progressing(Console(file=said), every_s=0.001) as progress:
        progress.stage("tiny", total=24, done=4, unit="steps")
        progress.update(9, note="loss 1.234")
        until = time.monotonic() + 60
        while said.getvalue().count("9 of 24") < 2 and time.monotonic() < until:
            time.sleep(0.001)
    line = next(line for line in said.getvalue().splitlines() if "9 of 24" in line)
    assert line.startswith(" tiny: 9 of 24 steps, 38%, loss 1.234, ") and line.endswith(" left")
    silent = io.StringIO()
    with Progressing(Console(file=silent), is_silent=True, every_s=0.001) as progress:
        progress.stage("tiny")
    assert silent.getvalue() == ""


def test_results_are_readable_to_whom_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (tmp_path / "folder").mkdir()
        private = tmp_path / "folder" / "model.safetensors"
        os.close(os.open(private, os.O_CREAT | os.O_WRONLY, 0o600))
        as_umask_says(tmp_path)
        assert stat.S_IMODE(private.stat().st_mode) == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
