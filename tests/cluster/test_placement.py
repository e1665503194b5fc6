"""Engines on a Ray cluster: real ones, placed by their bytes, moved when their node is killed. In order: nodes go."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from laya.types import MIB
from tests.gateway.live import model_state, plain, sdk, until, user

from .conftest import Nodes

pytestmark = pytest.mark.engine


def node_of(server: Any, model: str) -> str | None:
    node: str | None = model_state(server, model)["node"]
    return node


def ask(server: Any, model: str) -> int:
    """How many tokens were the answer."""
    answer = sdk(server).chat.completions.create(model=model, messages=user("Say hi"), max_tokens=2)
    assert answer.usage is not None
    return answer.usage.completion_tokens


def test_engines_go_where_they_fit(placed: Any) -> None:
    assert ask(placed, "wide")
    assert node_of(placed, "wide") == "n2"
    assert ask(placed, "short")
    assert node_of(placed, "short") == "n1"
    state = placed.state()
    # each node has its account; nothing of them is counted here
    assert state["memory"]["reserved_bytes"] == 0
    ledger = state["ledger"]
    assert set(ledger["node/n2"]["owners"]) == {"wide"} and set(ledger["node/n1"]["owners"]) == {"short"}
    wide = model_state(placed, "wide")
    assert wide["pid"] is None and wide["measured_bytes"] > 0
    assert ledger["node/n2"]["reserved"] >= wide["plan"]["devices"][0]["total_bytes"]


def test_ps_shows_nodes(placed: Any) -> None:
    command = [sys.executable, "-m", "laya.cli", "ps"]
    environ = os.environ | {"LAYA_URL": placed.url, "COLUMNS": "200"}
    said = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    rows = {line.split()[0]: line.split() for line in said.stdout.splitlines() if line}
    assert "NODE" in rows["MODEL"] and "n2" in rows["wide"] and "n1" in rows["short"]


def test_what_fits_nowhere_is_refused_with_the_bytes_of_each_node(placed: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        ask(placed, "vast")
    error = refused.value.body
    assert isinstance(error, dict) and error["code"] == "insufficient_memory"
    assert set(error["nodes"]) == {"n0", "n1", "n2"}
    assert error["nodes"]["n0"]["total_bytes"] == 340 * MIB
    assert "n0: 340" in error["message"]


def test_a_killed_node(placed: Any, nodes: Nodes) -> None:
    """Streams elsewhere go on, its own end with an error, what had no byte yet is served by the next engine."""
    heard: dict[str, Any] = {}

    def stream(name: str, model: str, n_tokens: int) -> None:
        lines: list[str] = []
        heard[name] = lines
        body = {"model": model, "messages": user("Count to 100"), "stream": True, "max_tokens": n_tokens}
        body |= {"ignore_eos": True}
        with (
            contextlib.suppress(httpx.RemoteProtocolError),  # what breaks off ends without the last chunk
            plain(placed) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                lines += [line] if line else []

    def whole(name: str) -> None:
        heard[name] = None
        body = {"model": "wide", "messages": user("Count to 1000"), "max_tokens": 24, "ignore_eos": True}
        with plain(placed) as client:
            heard[name] = client.post("/v1/chat/completions", json=body)

    jobs = [
        threading.Thread(target=stream, args=("elsewhere", "short", 80)),
        threading.Thread(target=stream, args=("broken", "wide", 2000)),
        threading.Thread(target=whole, args=("unsent",)),
        threading.Thread(target=whole, args=("queued",)),  # behind the two that run
    ]
    for job in jobs[:2]:
        job.start()
    until(lambda: all(heard.get(name) for name in ("elsewhere", "broken")))
    for job in jobs[2:]:
        job.start()
    until(lambda: model_state(placed, "wide")["queued"] == 1 and model_state(placed, "wide")["running"] == 2)
    assert model_state(placed, "short")["running"] == 1
    nodes.kill("n2")
    killed_s = time.monotonic()
    until(lambda: model_state(placed, "wide")["state"] == "loading")
    until(lambda: model_state(placed, "wide")["state"] == "ready")
    moved_s, state = time.monotonic() - killed_s, model_state(placed, "wide")
    print(f"back after {moved_s:.1f} s, of which it loaded {state['extra']['load_s']:.1f} s")
    assert state["node"] == "n1" and state["restarts"] == 1
    for job in jobs:
        job.join()
    assert heard["elsewhere"][-1] == "data: [DONE]"
    last = json.loads(heard["broken"][-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_crashed" and len(heard["broken"]) > 2
    for name in ("unsent", "queued"):
        assert isinstance(heard[name], httpx.Response), name
        assert heard[name].status_code == 200, heard[name].text
        assert heard[name].json()["usage"]["completion_tokens"] == 24


def test_idle_models_leave_the_node_that_another_needs(placed: Any) -> None:
    assert ask(placed, "broad")
    assert node_of(placed, "broad") == "n1" and node_of(placed, "wide") is None
    with plain(placed) as client:
        assert client.post("/admin/models/broad/unload").json()["state"] == "unloaded"
    assert "broad" not in placed.state()["ledger"]["node/n1"]["owners"]


def test_server_outlives_what_speaks_to_ray(placed: Any) -> None:
    """As when the cluster's head is gone: its engines end, and are placed again as soon as it can be reached."""
    assert ask(placed, "short")
    engine = node_engine("short")
    driver = next(each for each in psutil.Process(placed.pid).children() if "ray_driver" in " ".join(each.cmdline()))
    driver.kill()
    engine.wait(10)
    assert ask(placed, "short")
    assert node_engine("short").pid != engine.pid


def node_engine(model: str) -> psutil.Process:
    """The process of its engine, which is no child of the server."""
    all_of = psutil.process_iter(["cmdline"])
    ours = [each for each in all_of if "laya.engines.llamacpp_child" in (each.info["cmdline"] or [])]
    (found,) = [each for each in ours if each.info["cmdline"][-1] == model and each.parent().name().startswith("ray::")]
    return found
