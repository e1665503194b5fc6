"""examples/tasks/ against a real engine: what is held to is how they work, not how clever a small model is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.gateway.live import until

TASKS = ROOT / "examples" / "tasks"


def loaded(name: str) -> ModuleType:
    spec = spec_from_file_location(name, TASKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TASKS / f"{name}.py"), *words, "--url", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notes")
    (folder / "a.txt").write_text("one two three")
    (folder / "b.md").write_text("four five")
    return folder


@pytest.mark.engine
def test_an_agents_every_step_is_a_call_that_was_run_and_the_last_is_its_answer(server: Any, notes: Path) -> None:
    done = run("small_agent", server.url, str(notes), "How many words has a.txt?", "--steps", "2")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    known = ("1. count_words(file='a.txt') = 3", "1. count_words(file='b.md') = 2", "1. calculate(a=")
    assert all(line.startswith(known) for line in done.stderr.splitlines()), done.stderr


@pytest.mark.engine
def test_functions_are_written_tried_and_told_apart(server: Any) -> None:
    done = run("code_generation", server.url, "--tries", "1", "--max-tokens", "24")
    if done.returncode == 0:
        assert done.stdout.startswith("def double(number):") and "its examples hold" in done.stdout
    else:
        assert done.stderr.startswith("try 1: ") and "no function in 1 tries" in done.stderr, done.stderr


def test_an_agents_tools_are_real(notes: Path) -> None:
    agent = loaded("small_agent")
    assert agent.run_tool(notes, "count_words", {"file": "a.txt"}) == "3"
    assert agent.run_tool(notes, "calculate", {"a": 3, "do": "multiply", "b": -2}) == "-6"
    (count, *_) = agent.tools_for(["a.txt"])
    assert json.loads(json.dumps(count))["function"]["parameters"]["properties"]["file"]["enum"] == ["a.txt"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("    return number + number\n", None),
        ("    return number\n", "Test Failed"),
        ("    while True: pass\n", "stopped by signal|not done after"),
        ("    return bytearray(2**34)\n", "MemoryError"),
        ("    open('big', 'wb').write(bytes(2**20))\n", "File too large"),
        ("    import os; return os.environ['HOME']\n", "KeyError"),
    ],
    ids=["right", "wrong", "endless", "memory", "file", "environment"],
)
def test_what_a_model_wrote_runs_under_limits(body: str, why: str | None) -> None:
    code = loaded("code_generation")
    fault = code.fault_of(code.STUB + body)
    assert fault is None if why is None else re.search(why, fault or ""), fault


def test_what_a_model_wrote_leaves_no_process(tmp_path: Path) -> None:
    code = loaded("code_generation")
    pid = str(tmp_path / "pid")
    write = f"open({pid!r} + '.new', 'w').write(str(os.getpid())); os.rename({pid!r} + '.new', {pid!r})"
    lines = (
        "import os, time", f"if os.fork() == 0: {write}; time.sleep(600)",
        f"while not os.path.exists({pid!r}): time.sleep(0.01)", "return number + number\n",
    )  # fmt: skip
    body = "".join(f"    {line}\n" for line in lines)
    assert code.fault_of(code.STUB + body) is None
    left = int((tmp_path / "pid").read_text())
    until(lambda: left not in [each.pid for each in psutil.process_iter(["status"]) if each.info["status"] != "zombie"])
