"""`laya smoke` against the real server, and what it says when something is not right."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_stub import StubServer

from laya.cli.client import ServerClient
from laya.cli.smoke import Tick, run_checks
from laya.cli.smoke_checks import CHECKS
from laya.cli.smoke_visit import Check, Skipped, Visit, Wrong, require
from laya.errors import LayaError, NoServer
from tests.conftest import ROOT, RunningServer

# The default model twice, so that there is something to embed with.
CONFIG = """
max_seq_len: 1024
n_threads: 1
models:
  small: {source: smollm2, aliases: [tiny]}
  embedder: {source: smollm2, task: embed, max_num_seqs: 1}
"""


@pytest.fixture(scope="module")
def unloaded(start_server: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """A server that has loaded nothing yet."""
    server = start_server(config=CONFIG)
    yield server
    server.stop()


def run_tool(url: str, *args: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"LAYA_URL": url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / "smoke_test.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


@pytest.mark.engine
def test_smoke_passes_on_a_server_that_has_loaded_nothing_yet(unloaded: RunningServer) -> None:
    done = run_tool(unloaded.url, "--json")
    said = json.loads(done.stdout)
    assert {tick["name"]: tick["note"] for tick in said["checks"] if tick["state"] != "passed"} == {}
    assert [tick["name"] for tick in said["checks"]] == [check.name for check in CHECKS]
    assert (said["url"], said["model"], said["passed"], done.returncode) == (unloaded.url, "small", True, 0)
    notes = {tick["name"]: tick["note"] for tick in said["checks"]}
    assert notes["load"].startswith("planned ")
    assert notes["embeddings"] == "embedder, 576 dimensions"
    assert unloaded.state()["in_flight"] == 0


@pytest.mark.engine
def test_smoke_ticks_what_it_tries_and_skips_what_is_not_there(server: RunningServer) -> None:
    done = run_tool(server.url, "smollm2-135m")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1] == f" {len(CHECKS) - 1} passed, 1 skipped"
    assert "no embed model" in lines[-2]
    assert "loaded already" in lines[2]
    assert all(" ms " in line for line in lines[:-2])


@pytest.mark.engine
def test_smoke_names_the_nearest_model_and_tries_no_more(unloaded: RunningServer) -> None:
    done = run_tool(unloaded.url, "smal")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "no chat model is named 'smal'; did you mean 'small'?" in lines[1]
    assert all("not tried, models failed" in line for line in lines[2:-1])
    assert lines[-1] == f" 1 passed, 1 failed, {len(CHECKS) - 2} skipped"


def test_smoke_without_a_server_is_exit_code_4() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = run_tool(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert done.returncode == 4
    assert done.stdout == ""
    assert "laya serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_smoke_of_another_program_fails_with_a_sentence() -> None:
    with StubServer() as stub:
        done = run_tool(stub.url, "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["passed"], said["model"]) == (1, False, None)
    assert said["checks"][0]["state"] == "failed"
    assert {tick["state"] for tick in said["checks"][1:]} == {"skipped"}


def raising(error: Exception) -> Callable[[Visit], str]:
    def run(visit: Visit) -> str:
        raise error

    return run


def ticks(*checks: Check) -> list[Tick]:
    return list(run_checks(Visit(ServerClient("http://127.0.0.1:9")), checks))


@pytest.mark.parametrize(
    ("error", "state", "note"),
    [
        (Wrong("the answer is empty"), "failed", "the answer is empty"),
        (Skipped("no embed model"), "skipped", "no embed model"),
        (LayaError("Laya failed."), "failed", "500 internal_error: Laya failed."),
        (KeyError("choices"), "failed", "the answer has not the form it should have: KeyError('choices')"),
        (NoServer("No server."), "failed", "No server."),
    ],
)
def test_run_checks_goes_on_after_a_part_that_fails(error: Exception, state: str, note: str) -> None:
    good = Check("good", lambda visit: "fine", is_essential=True)
    done = ticks(good, Check("bad", raising(error)), good)
    assert [(tick.state, tick.note) for tick in done] == [("passed", "fine"), (state, note), ("passed", "fine")]


def test_run_checks_lets_a_fault_of_our_own_be_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        ticks(Check("bug", raising(ZeroDivisionError())))
    with pytest.raises(NoServer):
        ticks(Check("first", raising(NoServer("No server."))))
    with pytest.raises(Wrong, match="why"):
        require(False, "why")


class _Frozen(ServerClient):
    """A client whose server never notices that a client left."""

    def get(self, path: str, params: Any = None, *, timeout_s: float | None = None) -> Any:
        if path.endswith("/slots"):
            return {"slots": [{"is_processing": True}]}
        models = [{"id": "m", "running": len(self.asked)}]
        return {"models": models, "outcomes": {"cancelled": 0, "served": 0}}

    def stream_events(self, path: str, body: Any) -> Iterator[tuple[str, str]]:
        self.asked.append(body)
        yield "data", '{"choices": [{"delta": {"content": "Once"}}]}'

    asked: list[Any] = []


def test_disconnect_that_frees_no_slot_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laya.cli.smoke_checks.FREE_DEADLINE_S", 0.0)
    visit = Visit(_Frozen("http://127.0.0.1:9"))
    visit.model = {"id": "m"}
    check = next(check for check in CHECKS if check.name == "disconnect")
    tick = next(run_checks(visit, [check]))
    assert tick.state == "failed"
    assert tick.note.startswith("1 running and 1 slots busy")
