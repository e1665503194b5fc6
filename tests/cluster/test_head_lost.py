"""The head of a Ray cluster is gone, and comes back: a real one, whose processes are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from laya.models import resolve
from laya.types import MIB
from tests.conftest import ROOT
from tests.gateway.live import model_state, plain, until

from .conftest import OBJECT_STORE_BYTES
from .test_losses import Asking, ask, engines_of

pytestmark = pytest.mark.engine

CONFIG = """
version: 1
n_threads: 1
kv_cache_dtype: f16
max_num_seqs: 2
max_seq_len: 1024
server: {{waiting_note_s: 0}}
models:
  here:
    engine: command
    cmd: [{python}, "{program}", "${{PORT}}", "{gguf}"]
    served_model_name: their-name
    memory: 300MiB
    env: {{PYTHONSAFEPATH: "1"}}
  placed: {{source: laya-nano}}
  never-loaded: {{source: laya-nano}}
"""


class Head:
    """`ray start --head`: the cluster's head, and a node on its machine. Its processes are a group of their own."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="laya-ray-")  # Ray's sockets lie there, whose paths may not be long
        self._group: int | None = None
        self.address = ""

    def start(self) -> None:
        """At the port that it had."""
        port = self.address.rpartition(":")[2] or "0"
        options = {"port": port, "node-name": "n1", "num-cpus": 1, "memory": 200 * MIB, "temp-dir": self._folder}
        options |= {"object-store-memory": OBJECT_STORE_BYTES, "include-dashboard": "false"}
        program = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--disable-usage-stats"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        starting = subprocess.Popen(
            [*program, *(f"--{name}={value}" for name, value in options.items())],
            stdout=subprocess.PIPE, text=True, cwd=self._folder, env=environment, start_new_session=True,
        )  # fmt: skip
        self._group = starting.pid
        said, _ = starting.communicate()
        assert starting.returncode == 0, said
        self.address = said.partition("ray start --address='")[2].partition("'")[0]

    def kill(self) -> None:
        """As when the power of its machine goes."""
        if self._group is not None:
            os.killpg(self._group, signal.SIGKILL)
            self._group = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    head = Head()
    head.start()
    yield head
    head.remove()


@pytest.fixture(scope="module")
def server(head: Head, start_server: Callable[..., Any]) -> Any:
    """It is stopped by its last test."""
    program, gguf = ROOT / "tests" / "engines" / "xllamacpp_program.py", resolve("laya-nano").path
    config = CONFIG.format(python=sys.executable, program=program, gguf=gguf)
    return start_server("--ray", head.address, config=config)


def ray_of(server: Any) -> dict[str, Any]:
    shown: dict[str, Any] = server.state()["ray"]
    return shown


def test_what_runs_here_is_served_without_the_head(server: Any, head: Head) -> None:
    assert ask(server, "here").status_code == ask(server, "placed").status_code == 200
    shown = {"address": head.address, "error": None, "nodes": [{"name": "n1", "memory_bytes": 200 * MIB}]}
    assert ray_of(server) == shown
    head.kill()
    # what Ray has still to place is asked for at once, and is not kept until Ray itself gives up, a minute later
    asking = Asking(server, "never-loaded")
    assert ask(server, "here").status_code == 200
    until(lambda: ray_of(server)["error"], deadline_s=15)
    assert ask(server, "here").status_code == 200
    for refused in (asking.wait(), ask(server, "never-loaded")):
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert f"The Ray cluster at {head.address} cannot be joined" in refused.json()["error"]["message"]
    told = subprocess.run(
        [sys.executable, "-m", "laya.cli", "ps"],
        capture_output=True, text=True, check=True, env=os.environ | {"LAYA_URL": server.url, "COLUMNS": "200"},
    )  # fmt: skip
    assert f"ray cluster  {head.address}  takes no engines: its head does not answer" in told.stdout
    with plain(server) as client:
        events = client.get("/admin/events").json()["events"]
    assert "ray_lost" in [event["kind"] for event in events]


def test_the_engine_that_went_with_it_is_refused_as_well(server: Any) -> None:
    until(lambda: ask(server, "placed").status_code == 503)
    assert model_state(server, "placed")["state"] == "unloaded"


def test_a_head_that_is_back_is_joined_unasked(server: Any, head: Head) -> None:
    head.start()
    print(f"joined again after {until(lambda: ray_of(server)['nodes'] and not ray_of(server)['error']):.1f} s")
    print(f"served again after {until(lambda: ask(server, 'placed').status_code == 200):.1f} s")
    assert model_state(server, "placed")["node"] == "n1"


def test_a_load_under_way_and_the_server_end_while_the_head_is_silent(server: Any, head: Head) -> None:
    asking = Asking(server, "never-loaded")
    until(lambda: engines_of("never-loaded"))
    engines_of("never-loaded")[0].suspend()  # it would be ready before the head is gone
    started = psutil.Process(server.pid).children(recursive=True)
    head.kill()
    until(lambda: ray_of(server)["error"], deadline_s=15)
    answer = asking.wait()
    assert answer.status_code == 503 and "retry-after" in answer.headers, answer.text
    assert server.stop() == 0
    _, left = psutil.wait_procs(started, timeout=10)
    assert not left
