"""`laya quantize` from a name to a file in the store: whole or not there, and refused with numbers."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from openai import OpenAI
from rich.console import Console

from laya.cli.main import main
from laya.cli.quantize import _budget
from laya.config import Config
from laya.errors import BadModelFile, Conflict, DownloadError, InsufficientDisk, InsufficientMemory
from laya.memory import Budget, Machine
from laya.memory.gguf import read_header
from laya.models.files import model_at
from laya.models.library import Library, resolve
from laya.quantization import limits
from laya.quantization.make import Asked, make
from tests.conftest import RunningServer
from tests.quantization.tiny_gguf import write_tiny

ROOT = Path(__file__).parents[2]
PLENTY = Budget(bytes=8 << 30, limit="memory available")
SILENT = SimpleNamespace(stage=lambda text: None, progress=lambda done, total: None, planned=lambda job, peak: None)
# Ends itself at a stage, or half way through the tensors, as the kernel or a user would.
ENDS = """
import os, sys
from pathlib import Path
from laya.lab_verb import run_verb
from laya.memory import Budget
from laya.models.files import model_at
from laya.models.library import Library
from laya.quantization.make import Asked, make

source, home, out, point, number = sys.argv[1:]
class Watcher:
    def stage(self, text):
        if text == point: os.kill(os.getpid(), int(number))
    def progress(self, done, total):
        if point == "half" and done > total / 2: os.kill(os.getpid(), int(number))
    def planned(self, job, peak): pass
asked = Asked(model_at(Path(source)), "q4_k_m", out=Path(out) if out else None)
budget = Budget(bytes=1 << 33, limit="")
sys.exit(run_verb("quantize", "all is as it was", lambda: make(asked, Library(Path(home)), budget, Watcher()) and 0))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("source") / "moe-f16.gguf", n_experts=4, n_layers=2)


@pytest.fixture
def laya(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """`laya(*words)` -> (exit code, stdout, stderr), with a store of its own and no server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LAYA_URL", "http://127.0.0.1:9")

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, " ".join(err.split())

    return run


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_variant_is_in_the_store_with_a_card_that_tells_its_origin(
    source: Path, laya: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = laya("quantize", source, "--to", "q4_k", "--json")
    assert code == 0, err
    made = json.loads(out.splitlines()[-1])
    assert made["id"] == "moe:q4_k_m"
    assert made["peak_bytes"] <= 1.05 * made["planned_peak_bytes"]
    path = resolve("moe:q4_k_m", home=tmp_path / "home").path
    card = json.loads((path.parent / "card.json").read_bytes())
    assert card == made["card"]
    assert card["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert card["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert card["recipe"]["router"] == {"F32": 2} and card["kept"]["blk.1.ffn_gate_inp.weight"] == "F32"
    assert card["quantized_share_of_f16"] < 0.4 and card["imatrix"] is None
    assert set(card["versions"]) == {"laya", "xllamacpp", "ggml"}
    assert "Never quantized" in (path.parent / "README.md").read_text()
    assert "moe:q4_k_m" in laya("list")[1]
    for tensor in read_header(path).tensors:
        assert "ffn_gate_inp" not in tensor.name or tensor.type_name == "F32"
    assert laya("quantize", source, "--to", "q4_k_m")[0] == 2  # it is there


def test_what_is_wrong_is_told_by_its_name(
    source: Path, laya: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text")
    for words, said in (
        ((source, "--to", "q4km"), "Did you mean 'q4_k_m'?"),
        ((source, "--to", "q8_0", "--head", "q8"), "--head q8: no type of a tensor. Did you mean 'q8_0'?"),
        ((text, "--to", "q8_0"), "not a GGUF file"),
        ((source, "--to", "f16"), "'moe-f16' is f16 already: there is nothing to do."),
        ((source, "--to", "q8_0", "--out", source), "is there already"),
        ((source, "--to", "q8_0", "--out", tmp_path / "none" / "a.gguf"), "there is no folder"),
        ((source, "--to", "q8_0", "--calibration", "mixed"), "models are measured on that set"),
        ((source, "--to", "q8_0", "--imatrix", text), "no importance matrix"),
        ((source, "--to", "q8_0", "--calibration", source), "no text"),
        ((source, "--to", "q8_0", "--calibration", "pyhton"), "Did you mean 'python'?"),
        ((source, "--to", "q8_0", "--name", "laya-nano"), "is a name of 'laya-nano' already"),
        ((source, "--to", "q8_0", "--out", "no-ending"), "--out no-ending: expected a name that ends in .gguf"),
        ((source, "--to", "q8_0", "--name", "+"), "Say another --name, or --out FILE"),
    ):
        code, out, err = laya("quantize", *words)
        assert code == 2 and said in err and not out, (words, err)
    assert not (tmp_path / "home" / "models").exists()


def test_no_room_is_refused_with_the_numbers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model_at(source), "q4_k_m")
    with pytest.raises(
        InsufficientMemory, match=r"takes [\d.]+ MiB of memory .*, 1.0 MiB may be used \(a test\)"
    ) as few:
        make(asked, Library(tmp_path), Budget(bytes=1 << 20, limit="a test"), SILENT)
    assert few.value.exit_code == 3 and few.value.details["need_bytes"] > 1 << 20
    monkeypatch.setattr(limits, "disk_free_bytes", lambda folder: 1000)
    with pytest.raises(InsufficientDisk) as full:
        make(asked, Library(tmp_path), PLENTY, SILENT)
    assert full.value.exit_code == 3 and full.value.details["available_bytes"] == 1000
    assert files_in(tmp_path) == []
    monkeypatch.undo()
    made = make(asked, Library(tmp_path), PLENTY, SILENT)
    assert Path(made.path).stat().st_size == full.value.details["need_bytes"]


def _hear_sigint() -> None:
    """Whoever runs the tests in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("point", "number", "is_in_store"),
    [
        ("half", signal.SIGKILL, True),
        ("checking", signal.SIGKILL, False),
        ("half", signal.SIGINT, True),
        ("checking", signal.SIGTERM, False),
    ],
)
def test_an_end_at_any_point_leaves_what_was_there(
    point: str, number: int, is_in_store: bool, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    out = "" if is_in_store else str(tmp_path / "out" / "moe.gguf")
    words = [sys.executable, "-c", ENDS, str(source), str(tmp_path / "home"), out, point, str(int(number))]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, env=environ, capture_output=True, check=False, preexec_fn=_hear_sigint)
    assert ended.returncode == (-number if number == signal.SIGKILL else 128 + number), ended.stderr
    assert list(Library(tmp_path / "home").models()) == [] and not (tmp_path / "out" / "moe.gguf").exists()
    assert bool(files_in(tmp_path)) == (number == signal.SIGKILL)
    asked = Asked(model_at(source), "q4_0", out=tmp_path / "out" / "next.gguf" if out else None)
    made = make(asked, Library(tmp_path / "home"), PLENTY, SILENT)  # clears what was left, of another name too
    assert Path(made.path).stat().st_size == made.card.file_bytes
    own = "out/next" if out else "home/models/moe%3Aq4_0/"
    ends = (".card.json", ".card.md", ".gguf") if out else ("README.md", "card.json", "manifest.json", "moe-q4_0.gguf")
    assert files_in(tmp_path) == [own + end for end in ends]


@pytest.mark.parametrize("is_in_store", [True, False])
def test_what_came_meanwhile_is_not_replaced(is_in_store: bool, source: Path, tmp_path: Path) -> None:
    out = None if is_in_store else tmp_path / "moe.gguf"
    asked, library = Asked(model_at(source), "q4_0", out=out), Library(tmp_path / "home")
    taken = out or library.folder("moe:q4_0") / "manifest.json"

    def stage(text: str) -> None:
        if text == "checking":
            taken.parent.mkdir(parents=True, exist_ok=True)
            taken.write_text("another's")

    watcher = SimpleNamespace(stage=stage, progress=SILENT.progress, planned=SILENT.planned)
    with pytest.raises(Conflict, match="is there already"):
        make(asked, library, PLENTY, watcher)
    assert files_in(tmp_path) == [str(taken.relative_to(tmp_path))] and taken.read_text() == "another's"


def test_two_at_once_make_one(source: Path, tmp_path: Path) -> None:
    asked, library = Asked(model_at(source), "q4_0"), Library(tmp_path / "home")

    def stage(text: str) -> None:
        with pytest.raises(DownloadError, match="is being made by another process"):
            make(asked, library, PLENTY, SILENT)

    made = make(asked, library, PLENTY, SimpleNamespace(stage=stage, progress=SILENT.progress, planned=SILENT.planned))
    assert made.id == "moe:q4_0" and [model.id for model in library.models()] == ["moe:q4_0"]


def test_names_are_text_of_any_script(source: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "größe ☃.gguf", tmp_path / "雪 ö.gguf"
    path.symlink_to(source)
    asked = Asked(model_at(path), "q4_0", out=out)
    made = make(asked, Library(tmp_path), PLENTY, SILENT)
    assert out.stat().st_size == made.card.file_bytes
    assert json.loads(out.with_name("雪 ö.card.json").read_bytes())["file"] == out.name
    path.rename(bytes_path := tmp_path / os.fsdecode(b"\xff.gguf"))
    out.unlink()
    for wrong in (asked._replace(model=model_at(bytes_path)), asked._replace(out=bytes_path)):
        with pytest.raises(BadModelFile, match="the name is not UTF-8, so it cannot be written down; rename the file"):
            make(wrong, Library(tmp_path), PLENTY, SILENT)


def test_ctrl_c_ends_the_command_with_130(source: Path, tmp_path: Path) -> None:
    environ = os.environ | {"LAYA_HOME": str(tmp_path), "LAYA_URL": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "laya.cli", "quantize", str(source), "--to", "iq4_xs", "--threads", "1"]
    with subprocess.Popen(words, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, preexec_fn=_hear_sigint) as command:
        deadline_s = time.monotonic() + 60
        while not files_in(tmp_path) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 130
    assert files_in(tmp_path) == []


@pytest.mark.engine
def test_the_result_is_served_and_a_servers_ledger_bounds_the_next(
    source: Path,
    start_server: Callable[..., RunningServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "moe.q4_k_m.gguf"
    make(Asked(model_at(source), "q4_k_m", out=out), Library(tmp_path), PLENTY, SILENT)
    server = start_server(
        str(out), "--max-num-seqs", "1", "--max-seq-len", "512", "--n-threads", "1", config="memory: {budget: 600MiB}"
    )
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.completions.create(model="moe.q4_k_m", prompt="abc def", max_tokens=8, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    monkeypatch.setenv("LAYA_URL", server.url)
    memory = server.state()["memory"]
    budget = _budget(msgspec.convert({}, Config), Console())
    assert budget.limit == f"the ledger of {server.url}"
    assert budget.bytes == memory["budget_bytes"] - memory["reserved_bytes"] < Machine().budget().bytes
    server.stop()
