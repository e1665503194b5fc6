"""The verbs that ask a running server, against a real one: ps, load, unload, logs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from laya.cli.main import main

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"
CONFIG = f"""
version: 1
n_threads: 1
max_seq_len: 4096
max_num_seqs: 1
models:
  {MODEL}: {{}}
  other: {{source: smollm2, max_seq_len: 512, pinned: true}}
  giant: {{source: smollm2, max_seq_len: 8192, max_num_seqs: 256}}
memory: {{budget: 1GiB}}
"""


@pytest.fixture(scope="module")
def running(start_server: Callable[..., Any]) -> Iterator[Any]:
    """Three models, none loaded yet."""
    server = start_server(config=CONFIG)
    yield server
    assert server.stop() == 0


@pytest.fixture
def laya(
    running: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`laya(verb, ...)`: (exit code, stdout, stderr) of a command against the running server."""
    monkeypatch.setenv("LAYA_URL", running.url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LAYA_API_KEY", raising=False)

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


Laya = Callable[..., tuple[int, str, str]]


def long_request(server: Any, stop: list[bool], **fields: Any) -> None:
    """A stream that is read until it is told to stop."""
    body = {"model": MODEL, "max_tokens": 3000, "ignore_eos": True, "stream": True} | fields
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120, trust_env=False) as response:
        for _ in response.iter_bytes():
            if stop:
                return


def until_said(laya: Laya, pattern: str, deadline_s: float = 200.0) -> str:
    """What `laya ps` printed when it first matched."""
    end_s = time.monotonic() + deadline_s
    while True:
        _, out, _ = laya("ps")
        if re.search(pattern, out):
            return out
        assert time.monotonic() < end_s, out


def test_ps_of_an_idle_server_tells_memory_and_what_can_be_loaded(laya: Laya) -> None:
    laya("unload", MODEL), laya("unload", "other")
    code, out, err = laya("ps")
    assert (code, err) == (0, "")
    assert "0 of 1024 MiB reserved (memory.budget)" in out
    assert "3 more can be loaded" in out


def test_load_and_unload_say_the_state(laya: Laya) -> None:
    assert laya("load", "smollm2") == (0, f"{MODEL}: ready\n", "")
    assert laya("load", MODEL) == (0, f"{MODEL}: ready\n", "")
    assert laya("load", MODEL, "--anyway") == (0, f"{MODEL}: ready\n", "")
    code, out, _ = laya("load", "other", "--json")
    status = json.loads(out)
    assert (code, status["id"], status["state"]) == (0, "other", "ready")
    assert 0 < status["measured_bytes"] <= sum(device["total_bytes"] for device in status["plan"]["devices"])
    _, out, _ = laya("ps")
    assert re.search(rf"{MODEL} +ready +\d+ MiB +\d+ MiB +\d+ MiB +1 x 4096 +0 +0 +\d+ s", out)
    assert re.search(r"other +ready +\d+ MiB +\d+ MiB +\d+ MiB +1 x 512 +0 +0 +\d+ s", out)
    assert "1 more can be loaded" in out
    code, out, _ = laya("unload", "smollm2", "--json")
    assert (code, json.loads(out)["state"]) == (0, "unloaded")
    assert laya("unload", "other") == (0, "other: unloaded\n", "")
    assert laya("unload", "other") == (0, "other: unloaded\n", "")


def test_ps_json_is_the_state(running: Any, laya: Laya) -> None:
    code, out, _ = laya("ps", "--json")
    state = json.loads(out)
    assert code == 0
    assert {model["id"] for model in state["models"]} == {MODEL, "other", "giant"}
    assert set(state["outcomes"]) == {"served", "refused", "failed", "cancelled"}
    assert state["native_core"] in (True, False)


def test_ps_shows_prefill_decode_and_who_waits(running: Any, laya: Laya) -> None:
    laya("load", MODEL)
    stop: list[bool] = []
    with ThreadPoolExecutor(2) as others:
        prompt = [{"role": "user", "content": "tree " * 400}]
        try:
            asked = [others.submit(long_request, running, stop, messages=prompt)]
            until_said(laya, rf"{MODEL} .* 1 +0 .*prefill \d+ %")
            asked.append(others.submit(long_request, running, stop, messages=[{"role": "user", "content": "Hi"}]))
            until_said(laya, rf"{MODEL} .* 1 +1 .*queued \d+ s")
            until_said(laya, rf"{MODEL} .* 1 +1 .*decode \d+ s, queued \d+ s")
        finally:
            stop.append(True)
        for request in asked:
            request.result()
    until_said(laya, rf"{MODEL} +ready .* 0 +0 +\d+ s")


def test_load_of_what_does_not_fit_ends_with_3_and_the_figures(laya: Laya) -> None:
    code, out, err = laya("load", "giant")
    assert (code, out) == (3, "")
    assert "'giant' needs" in err and "may be used (memory.budget). What fits: --" in err
    assert "`laya serve --" in err and "in config.yaml" in err


def test_unknown_model_ends_with_2_and_the_nearest(laya: Laya) -> None:
    for verb in ("load", "unload", "logs"):
        code, _, err = laya(verb, "smolm2")
        assert code == 2
        assert "Did you mean 'smollm2'?" in err


def test_logs_show_what_the_engine_wrote(laya: Laya) -> None:
    laya("load", MODEL)
    code, out, err = laya("logs", "smollm2")
    assert (code, err) == (0, "")
    assert f"engine for {MODEL} started, pid" in out
    assert "llama" in out
    assert laya("logs", "giant") == (0, "", "giant has not been loaded, so its engine wrote nothing yet.\n")


def test_logs_follow_a_load(running: Any, laya: Laya) -> None:
    laya("unload", "other")
    environ = os.environ | {"LAYA_URL": running.url, "PYTHONPATH": str(Path(__file__).parents[2])}
    following = subprocess.Popen(
        [sys.executable, "-m", "laya.cli", "logs", "other", "-f"], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert following.stdout is not None
    lines = [following.stdout.readline()]  # of its last run: from here on it follows
    laya("load", "other")
    laya("unload", "other")
    while not (any("engine for other started" in line for line in lines) and "engine ended" in lines[-1]):
        lines.append(following.stdout.readline())
        assert lines[-1], "the log ended"
    following.send_signal(2)
    following.communicate(timeout=30)
    assert following.returncode == 130


def test_without_a_server_verbs_end_with_4(laya: Laya, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_URL", "http://127.0.0.1:1")
    for words in (("ps",), ("load", MODEL), ("unload", MODEL), ("logs", MODEL)):
        code, out, err = laya(*words)
        assert (code, out) == (4, "")
        assert "No server at http://127.0.0.1:1" in err and "laya serve" in err
