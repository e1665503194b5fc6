"""`laya experts`: a table, files and JSON of a real model file, and a sentence where nobody can tell."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from laya.bench.generated_models import GeneratedShape, generate
from laya.cli.main import main
from laya.modeling.gguf_file import write_gguf
from tests.modeling.small_model import small, write_tokenizer

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tokenizer_file = write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    write_gguf(small(), tokenizer_file, folder / "moe.gguf", kind="f32")
    generate(folder / "dense.gguf", GeneratedShape(n_layer=1), vocabulary=folder / "moe.gguf")
    return folder


@pytest.fixture
def one_core() -> Iterator[None]:
    """llama.cpp's threads wait for each other by spinning: on a busy machine one is faster than all."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def here(models_dir: Path, one_core: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts and a config that knows the models."""
    (tmp_path / "prose.txt").write_text("Nothing was said of it for a while, and then everybody spoke at once.")
    (tmp_path / "code.py").write_text("def double(x):\n    return 2 * x\n" * 8)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "config.yaml").write_text(
        f"models_dir: {models_dir}\n"
        "models:\n"
        "  there: {engine: remote, url: 'http://127.0.0.1:9/v1'}\n"
        f"  card: {{engine: vllm, source: {models_dir}}}\n"
        "peers: {box: {url: 'http://127.0.0.1:9'}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the process that counts starts in another folder
    return tmp_path


def experts(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["experts", *words])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_table_files_and_verdict(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["moe", "--text", "prose.txt", "--text", "code.py", "--window", "32", "--csv", "a.csv", "--png", "a.png"]
    assert experts(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("moe   4 experts, 2 a token, 2 layers with experts; ") and "by llama.cpp" in lines[0]
    assert [line.split()[:2] for line in lines[2:8]] == [
        [topic, layer] for topic in ("(all)", "prose", "code") for layer in "01"
    ]
    assert any(line.startswith(("Even: ", "Uneven: ")) and "The text is short" in line for line in lines)
    assert lines[-2:] == ["a.csv is written.", "a.png is written."]
    rows = list(csv.DictReader((here / "a.csv").open()))
    assert len(rows) == 3 * 2 * 4
    assert sum(float(row["share"]) for row in rows) == pytest.approx(6, abs=1e-4)
    assert (here / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not list(here.glob("*.part"))


def test_json_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experts("moe", "--text", "code.py", "--json") == 0
    fields = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (fields["model"], fields["engine"], fields["top_k"], len(fields["layers"])) == ("moe", "llama.cpp", 2, 2)
    assert fields["window_tokens"] == 256, "the model's context"
    assert all(sum(of["assignments"]) == 2 * fields["n_tokens"] for of in fields["layers"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["dense"], 2, "'dense' is a dense model (llama): it has no experts."),
        (["there"], 2, "'there' has engine: remote, which does not tell which experts it chooses. A GGUF file here"),
        (["card"], 2, "'card' has engine: vllm, which does not tell which experts it chooses. `laya experts /"),
        (["box/far"], 2, "'box/far' runs at the peer 'box', whose API does not tell which experts are chosen"),
        (["mo"], 2, "Did you mean 'moe'?"),
        (["moe", "--set", "mixt"], 2, "There is no text set 'mixt'. Did you mean 'mixed'?"),
        (["moe", "--set", "mixed", "--text", "code.py"], 2, "give one of them"),
        (["moe", "--text", "empty.txt"], 2, "empty.txt: there is no text in it."),
        (["moe", "--csv", "no/where.csv"], 2, "--csv no/where.csv: there is no folder no"),
        (["moe", "--png", "."], 2, "--png .: that is a folder"),
    ],
)
def test_what_nobody_can_tell_is_said(
    words: list[str], code: int, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert experts(*words) == code
    assert told in " ".join(capsys.readouterr().err.split())
