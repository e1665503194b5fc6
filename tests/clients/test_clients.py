"""Programs that others wrote, as they are installed, against a real server: examples and the lines of `laya connect`.

The model that ships answers, in few tokens: what is held to is that a client speaks with Laya, not what is said.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from laya.connect import Snippet, names, snippet
from tests.conftest import ROOT

MODEL = "laya-nano"
CLIENTS = ROOT / "build" / "clients"
EXAMPLES = ROOT / "examples"
WINDOW = 128  # said to be the model's, so that answers have 32 tokens
RUN_NOTEBOOK = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(book, timeout=240, kernel_name="python3").execute()
for cell in book.cells:
    for output in cell.get("outputs", []):
        print(output.get("text") or output["data"]["text/plain"])
"""
PARSE_CONTINUE = """
import { readFileSync } from "node:fs";
import { parseConfigYaml } from "@continuedev/config-yaml";
console.log(JSON.stringify(parseConfigYaml(readFileSync(0, "utf8"))));
"""
# An answer of which the model has the choice of nothing: what aider does with an edit is seen, whoever wrote it.
EDIT = r"""
- name: openai/laya-nano
  edit_format: whole
  extra_params:
    extra_body:
      grammar: 'root ::= "calc.py\n```python\ndef add(a, b):\n    return a + b\n```\n"'
"""
AIDER = (
    "--yes-always --no-pretty --no-gitignore --no-check-update --no-show-model-warnings --analytics-disable "
    "--map-tokens 0 --message"
)
REPOSITORY = """
git init -q
git config user.name somebody
git config user.email somebody@example.org
git add calc.py long.py
git commit -q -m first
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    server = start_server(MODEL, "--max-num-seqs", "2", "--n-threads", "1")
    yield server
    assert server.stop() == 0


@pytest.fixture
def run(server: Any, tmp_path: Path) -> Run:
    """`run(words..., said=)`: what a program of the clients' environment printed, in a folder of its own."""
    environment = {
        "PATH": f"{CLIENTS / 'bin'}:{CLIENTS / 'aider' / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "LLM_USER_PATH": str(tmp_path / "llm"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else its import asks the network
        "LAYA_URL": server.url,
        "LAYA_MODEL": MODEL,
    }

    def run(*words: object, said: str = "") -> str:
        command = [str(word) for word in words]
        done = subprocess.run(
            command, input=said, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def lines(server: Any) -> Callable[[str], Snippet]:
    return lambda name: snippet(name, server.url, MODEL, context_length=WINDOW, needs_key=False)


@pytest.mark.parametrize("name", ["langchain", "llamaindex", "litellm"])
def test_an_example_runs(name: str, run: Run) -> None:
    assert run("python", EXAMPLES / name / "chat.py").strip()


def test_the_example_of_llm_runs_twice_and_registers_once(run: Run) -> None:
    for _ in range(2):
        assert run("sh", EXAMPLES / "llm" / "chat.sh").strip()
    registered = Path(run("llm", "logs", "path").strip()).parent / "extra-openai-models.yaml"
    assert len(yaml.safe_load(registered.read_text())) == 1


def test_the_notebook_runs_from_its_first_cell_to_its_last(run: Run) -> None:
    said = run("python", "-c", RUN_NOTEBOOK, EXAMPLES / "jupyter" / "laya.ipynb")
    assert MODEL in said and "{" in said


@pytest.mark.parametrize("name", ["langchain", "llamaindex", "litellm", "jupyter"])
def test_lines_in_python_run_as_they_are_printed(name: str, run: Run, lines: Callable[[str], Snippet]) -> None:
    assert run("python", "-c", lines(name).text).strip()


def test_lines_for_llm_run_as_they_are_printed(run: Run, lines: Callable[[str], Snippet]) -> None:
    assert run("sh", "-e", said=lines("llm").text).strip()


@pytest.mark.skipif(not (CLIENTS / "node_modules").is_dir(), reason="no node and npm here: Continue's parser NOT RUN")
def test_lines_for_continue_are_read_by_its_own_parser(run: Run, lines: Callable[[str], Snippet]) -> None:
    node = shutil.which("node")
    assert node is not None
    for text in (lines("continue").text, (EXAMPLES / "continue" / "config.yaml").read_text()):
        said = run("sh", "-c", f'cd "{CLIENTS}" && "{node}" --input-type=module -e \'{PARSE_CONTINUE}\'', said=text)
        assert json.loads(said) == yaml.safe_load(text)


@pytest.mark.skipif(not (CLIENTS / "aider").is_dir(), reason="aider could not be installed here: NOT RUN")
def test_lines_for_aider_have_it_edit_a_file_and_say_when_the_window_is_full(
    run: Run, server: Any, tmp_path: Path
) -> None:
    text = snippet("aider", server.url, MODEL, context_length=1024).text.strip()
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "long.py").write_text("".join(f"def f{n}(a):\n    return a + {n}\n" for n in range(120)))
    (tmp_path / ".aider.model.settings.yml").write_text(EDIT)
    run("sh", "-e", said=REPOSITORY)
    said = run("sh", "-e", said=f"{text} {AIDER} 'Make add return the sum.' calc.py < /dev/null")
    assert "Applied edit to calc.py" in said
    assert (tmp_path / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert len(run("git", "log", "--oneline").splitlines()) == 2, "the model's, with a message of its own"
    said = run("sh", "-e", said=f"{text} {AIDER} 'Make f1 shorter.' long.py < /dev/null")
    assert "has hit a token limit" in said
    assert "context_length_exceeded" in [each["error"]["code"] for each in _ended(server) if each["error"]]


def _ended(server: Any) -> list[dict[str, Any]]:
    """The requests that ended, the newest first."""
    ended: list[dict[str, Any]] = httpx.get(f"{server.url}/v1/requests?ended=20", trust_env=False).json()["ended"]
    return ended


def test_every_client_has_an_example_or_is_the_page_of_one() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} >= set(names())
