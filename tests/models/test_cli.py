"""pull, list, rm, show as commands: what they print, ask and refuse. Piped, and on a real terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from laya.cli.models import ensure_pulled, list_models, pull, rm, show
from laya.errors import BadModelFile, InsufficientMemory, InvalidRequest, ModelNotFound
from laya.models import pull as pull_model
from laya.models.catalogue import entries
from laya.types import ModelFile

from .conftest import FileServer, gguf_bytes

app = typer.Typer(pretty_exceptions_enable=False)
for name, verb in (("pull", pull), ("list", list_models), ("rm", rm), ("show", show)):
    app.command(name)(verb)

PROGRAM = "from tests.models.test_cli import app; app()"


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, argv, catch_exceptions=False)


def run_json(*argv: str) -> Any:
    return json.loads(run(*argv, "--json").stdout)


@pytest.fixture
def no_memory(tmp_path: Path) -> None:
    """A budget in which nothing fits."""
    (tmp_path / "config.yaml").write_text("version: 1\nmemory:\n  budget: 1MiB\n")


def test_list_shows_the_catalogue_offline(home: Path) -> None:
    rows = run_json("list")
    assert [row["id"] for row in rows] == [entry.id for entry in entries()]
    smollm2 = rows[0]
    assert smollm2["origin"] is None
    assert smollm2["fits"] is True
    assert (smollm2["max_num_seqs"], smollm2["max_seq_len"]) == (2, 8192)
    assert smollm2["need_bytes"] < smollm2["budget_bytes"]
    assert smollm2["licence"] == "Apache-2.0"


def test_what_comes_with_laya_is_not_removed(home: Path) -> None:
    with pytest.raises(InvalidRequest, match="'laya-nano' comes with Laya"):
        run("rm", "laya-nano", "--yes")


@pytest.mark.usefixtures("no_memory")
def test_list_says_what_does_not_fit(home: Path) -> None:
    rows = run_json("list")
    assert [row["fits"] for row in rows] == [False] * len(rows)
    assert all(row["need_bytes"] > row["budget_bytes"] for row in rows)
    assert "70b" in run("list").stdout


def test_list_plans_by_the_settings_of_the_config(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("version: 1\nmax_seq_len: 2048\nmax_num_seqs: 1\n")
    rows = [row for row in run_json("list") if row["id"] != "laya-nano"]  # trained for 1024 tokens
    assert {(row["max_num_seqs"], row["max_seq_len"]) for row in rows} == {(1, 2048)}


def test_list_shows_local_files_and_what_is_wrong_with_them(home: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/broken.gguf").write_bytes(gguf_bytes(100))
    row = run_json("list")[0]
    assert (row["id"], row["origin"], row["fits"]) == ("broken", "models_dir", None)
    assert "broken.gguf" in row["error"]


def test_list_found_shows_other_stores(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "user/.lmstudio/models/pub/repo/tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(gguf_bytes(100))
    assert "lmstudio/tiny" not in run("list").stdout
    assert run_json("list", "--found")[0]["id"] == "lmstudio/tiny"
    assert "lmstudio/tiny" in run("list", "--found").stdout


def test_pull_says_verdict_and_disk_before_the_bytes(server: FileServer, home: Path) -> None:
    result = run("pull", server.serve("/tiny.gguf", gguf_bytes()))
    lines = [line.split()[0] for line in result.stderr.splitlines()]
    assert lines == ["tiny", "memory", "disk", "here", "try"]
    assert "needs at least 0.3 MiB" in result.stderr
    assert "fits" in result.stderr
    assert result.stdout == ""


def test_pull_json_is_the_model(server: FileServer, home: Path) -> None:
    model = run_json("pull", server.serve("/tiny.gguf", gguf_bytes()), "--name", "mine")
    assert (model["id"], model["file_bytes"], model["origin"]) == ("mine", 300_000, "pulled")


@pytest.mark.usefixtures("no_memory")
def test_pull_what_does_not_fit_is_refused_where_nobody_can_answer(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(2_000_000))
    with pytest.raises(InsufficientMemory, match="--yes") as caught:
        run("pull", url)
    assert caught.value.exit_code == 3
    assert caught.value.details["need_bytes"] == 2_000_000
    assert list(home.rglob("*.gguf*")) == []
    assert run_json("pull", url, "--yes")["id"] == "tiny"


@pytest.mark.usefixtures("no_memory")
def test_pull_judges_catalogue_models_by_their_shape(hub: Callable[..., None], server: FileServer, home: Path) -> None:
    entry = next(entry for entry in entries() if entry.id == "llama-3.3-70b:q4_k_m")
    repo, file = entry.source.removeprefix("hf://").split(":")
    hub(repo, {file: gguf_bytes(1000)}, sha256={file: entry.sha256})
    with pytest.raises(InsufficientMemory) as caught:
        run("pull", "llama-3.3-70b")
    assert caught.value.details["need_bytes"] > entry.file_bytes
    # huggingface_hub may ask once a process about things that are no model
    asked = [path for path, _ in server.requests if path.startswith(("/api/models", f"/{repo}"))]
    assert asked == [f"/api/models/{repo}?blobs=true"]


def test_rm_asks_and_refuses_where_nobody_can_answer(server: FileServer, home: Path) -> None:
    run("pull", server.serve("/tiny.gguf", gguf_bytes()))
    with pytest.raises(InvalidRequest, match="--yes") as caught:
        run("rm", "tiny")
    assert caught.value.exit_code == 2
    assert run_json("rm", "TINY", "--yes") == {"id": "tiny", "freed_bytes": 300_000}
    with pytest.raises(ModelNotFound):
        run("rm", "tiny", "--yes")


@pytest.mark.parametrize("verb", ["pull", "show"])
def test_a_named_pipe_is_refused_at_once(home: Path, tmp_path: Path, verb: str) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BadModelFile, match=r"pipe\.gguf: not a regular file"):
        run(verb, "./pipe.gguf")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kept", "said"), [(3000, r"cut off or corrupt: .*\(3000 bytes\)"), (-100, "cut off: 100 of .* are missing")]
)
def test_pull_links_no_file_that_is_cut_off(
    default_model: ModelFile, home: Path, tmp_path: Path, kept: int, said: str
) -> None:
    (tmp_path / "cut.gguf").write_bytes(default_model.path.read_bytes()[:kept])
    with pytest.raises(BadModelFile, match=said):
        run("pull", "cut.gguf")
    with pytest.raises(ModelNotFound):
        run("show", "cut")


def test_pull_links_no_file_whose_name_is_no_text(home: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"odd\xff.gguf")
    (tmp_path / name).write_bytes(gguf_bytes(100))
    with pytest.raises(BadModelFile, match="not UTF-8"):
        pull_model(name)


@pytest.mark.engine
def test_rm_of_a_link_says_that_the_file_stays(default_model: ModelFile, home: Path) -> None:
    run("pull", str(default_model.path), "--name", "linked")
    with pytest.raises(InvalidRequest, match=r"only the link goes, .* stays"):
        run("rm", "linked")
    assert "only the link" in run("rm", "linked", "--yes").stdout
    assert default_model.path.is_file()


def test_list_found_says_when_nothing_is_elsewhere(home: Path) -> None:
    assert "keep no other model here" in run("list", "--found").stdout
    assert "keep no other model here" not in run("list").stdout


def test_show_catalogue_model_that_is_not_here(home: Path) -> None:
    card = run_json("show", "qwen3-30b-a3b")
    assert card["path"] is None
    assert (card["shape"]["n_expert"], card["shape"]["n_expert_used"]) == (128, 8)
    assert card["fit"]["need_is"] == "at most"
    assert "laya pull qwen3-30b-a3b:q4_k_m" in run("show", "qwen3-30b-a3b").stdout


@pytest.mark.parametrize(("body", "said"), [(b"", "empty"), (b"PK\x03\x04" * 9, "zip"), (gguf_bytes(100), "x.gguf")])
def test_show_broken_file_names_it(home: Path, tmp_path: Path, body: bytes, said: str) -> None:
    (tmp_path / "x.gguf").write_bytes(body)
    with pytest.raises(BadModelFile, match=said) as caught:
        run("show", "x.gguf")
    assert "x.gguf" in caught.value.message


@pytest.mark.engine
def test_show_reads_the_header(default_model: ModelFile, home: Path) -> None:
    run("pull", str(default_model.path), "--name", "linked")
    card = run_json("show", "linked")
    assert card["path"] == str(default_model.path)
    assert card["tensors"]["Q4_1"]["count"] == 210
    assert sum(kind["count"] for kind in card["tensors"].values()) == 272
    assert card["shape"]["n_ctx_train"] == 8192
    assert card["template"] == "in the file"
    assert card["fit"]["fits"] is True
    text = run("show", "linked").stdout
    assert "30 layers of 576, 9 heads (3 KV)" in text
    assert "Q4_1 210" in text


@pytest.mark.engine
def test_planned_from_the_catalogue_is_never_less_than_from_the_file(default_model: ModelFile, home: Path) -> None:
    of_entry = run_json("list")[0]
    run("pull", str(default_model.path), "--name", "linked")
    of_file = run_json("list")[0]
    assert of_file["id"] == "linked"
    assert of_file["need_bytes"] <= of_entry["need_bytes"] <= 1.1 * of_file["need_bytes"]


def test_ensure_pulled_gives_what_is_here(home: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/tiny.gguf").write_bytes(gguf_bytes(100))
    assert ensure_pulled("tiny").origin == "models_dir"
    with pytest.raises(ModelNotFound):
        ensure_pulled("tinier-than-anything")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        ours, theirs = pty.openpty()
        root = Path(__file__).parents[2]
        env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{os.pathsep.join(sys.path)}", "TERM": "xterm"}
        command = [sys.executable, "-c", PROGRAM, *argv]
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self._terminal = ours

    def answer(self, text: str) -> tuple[int, str]:
        """Type a text, and give the exit code and all that was shown."""
        os.write(self._terminal, text.encode())
        shown = b""
        while True:
            try:
                piece = os.read(self._terminal, 65536)
            except OSError:  # Linux says so when the last writer closed its end
                break
            if not piece:
                break
            shown += piece
        os.close(self._terminal)
        return self._process.wait(), shown.decode(errors="replace")


@pytest.mark.usefixtures("no_memory")
def test_pull_on_a_terminal_asks_and_obeys(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(2_000_000))
    code, shown = Terminal("pull", url).answer("n\n")
    assert "does not fit" in shown
    assert "Pull it anyway?" in shown
    assert code != 0
    assert not (home / "models").exists()
    code, shown = Terminal("pull", url).answer("y\n")
    assert code == 0
    assert "━" in shown
    assert (home / "models/tiny/tiny.gguf").stat().st_size == 2_000_000


def test_rm_on_a_terminal_asks_and_obeys(server: FileServer, home: Path) -> None:
    run("pull", server.serve("/tiny.gguf", gguf_bytes()))
    assert Terminal("rm", "tiny").answer("n\n")[0] == 1
    assert (home / "models/tiny").exists()
    assert Terminal("rm", "tiny").answer("y\n")[0] == 0
    assert not (home / "models/tiny").exists()
