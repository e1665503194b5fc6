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
        "PATH": f"{CLIENTS / 'bin'}:{os.environ['PATH']}",
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


def test_every_client_has_an_example_or_is_the_page_of_one() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} >= set(names())
