"""Reload, drain and the end of a server, on the real engine: no stream is dropped, no process is left."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from test_serve import MODEL, chat_once, command, ended, engine_of, environment, get, laya, stream_from, until

from laya.config.places import DATABASE
from laya.store import Store

pytestmark = pytest.mark.engine


def config(**more: Any) -> str:
    settings = {"max_seq_len": 512, "max_num_seqs": 2, "n_threads": 1, "preload": "true"} | more
    lines = "".join(f"    {name}: {value}\n" for name, value in settings.items())
    return f"models:\n  {MODEL}:\n    source: smollm2\n{lines}"


def verb(server: Any, home: Path, *words: str) -> Any:
    environ = environment(home) | {"LAYA_URL": server.url}
    return subprocess.run(command(*words), capture_output=True, text=True, env=environ, timeout=120, check=False)


def state_of(server: Any) -> dict[str, Any]:
    models: list[dict[str, Any]] = get(server, "/admin/state").json()["models"]
    return next(each for each in models if each["id"] == MODEL)


@pytest.fixture(scope="module")
def served(start_server: Callable[..., Any]) -> Any:
    return start_server(config=config())


def test_reload_lets_a_stream_finish_and_the_next_request_has_the_new_settings(served: Any, laya_home: Path) -> None:
    assert verb(served, laya_home, "reload").stdout.startswith("nothing changed: ")
    engine, stream = engine_of(served), stream_from(served, max_tokens=60)
    (served.cwd / "config.yaml").write_text(config(max_seq_len=1024, aliases="[mine]"))
    dry = verb(served, laya_home, "reload", "--dry-run")
    assert "max_seq_len 512 -> 1024" in dry.stdout and "dry run" in dry.stdout
    assert state_of(served)["state"] == "ready"
    done = verb(served, laya_home, "reload")
    assert done.returncode == 0 and "loaded anew after its requests" in done.stdout, done.stderr
    late = chat_once(served)  # waits for the new engine
    assert late.status_code == 200, late.text
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    until(lambda: get(served, "/v1/models/mine").json()["context_length"] == 1024)
    until(lambda: not engine.is_running())
    assert len(psutil.Process(served.pid).children()) == 1
    assert verb(served, laya_home, "reload").stdout.startswith("nothing changed: ")


def test_wrong_file_changes_nothing_and_says_what_config_check_says(served: Any, laya_home: Path) -> None:
    before = (served.cwd / "config.yaml").read_text()
    try:
        (served.cwd / "config.yaml").write_text(before + "    max_sequence: 3\n")
        refused, checked = verb(served, laya_home, "reload"), laya(laya_home, served.cwd, "config", "check")
        assert (refused.returncode, checked.returncode) == (2, 2)
        assert "max_sequence" in refused.stderr and refused.stderr == checked.stderr
        os.kill(served.pid, signal.SIGHUP)
        until(lambda: any(each["kind"] == "reload_failed" for each in get(served, "/admin/events").json()["events"]))
        assert state_of(served)["state"] == "ready"
    finally:
        (served.cwd / "config.yaml").write_text(before)


def test_hangup_and_watch_read_the_file_and_many_edits_leave_one_engine(served: Any) -> None:
    file = served.cwd / "config.yaml"
    file.write_text(config(max_seq_len=1024, ttl="10m") + "server:\n  watch_config: true\n")
    os.kill(served.pid, signal.SIGHUP)
    until(lambda: state_of(served)["ttl_s"] == 600)
    for tokens in range(600, 610):
        file.write_text(config(max_seq_len=tokens, ttl="10m") + "server:\n  watch_config: true\n")
        os.kill(served.pid, signal.SIGHUP)
    until(lambda: (state_of(served)["plan"] or {}).get("settings", {}).get("max_seq_len") == 609)
    until(lambda: state_of(served)["state"] == "ready" and len(psutil.Process(served.pid).children()) == 1)
    assert chat_once(served).status_code == 200


def test_drained_model_finishes_and_takes_nothing_new_until_it_is_loaded(served: Any, laya_home: Path) -> None:
    stream = stream_from(served, max_tokens=60)
    assert httpx.post(f"{served.url}/admin/models/{MODEL}/drain", trust_env=False).json()["state"] == "draining"
    refused = chat_once(served)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_draining")
    assert int(refused.headers["retry-after"]) > 0
    assert "draining" in verb(served, laya_home, "ps").stdout
    assert list(stream)[-1].choices[0].finish_reason == "length"
    waited = verb(served, laya_home, "drain", "smollm2")
    assert waited.returncode == 0 and "unloaded" in waited.stdout
    assert psutil.Process(served.pid).children() == []
    assert chat_once(served).status_code == 503
    assert verb(served, laya_home, "load", "smollm2").returncode == 0
    assert chat_once(served).status_code == 200


def test_removed_model_finishes_what_it_has_and_is_not_known(served: Any, laya_home: Path) -> None:
    stream = stream_from(served, max_tokens=60)
    (served.cwd / "config.yaml").write_text("models:\n  other:\n    source: smollm2\n    max_seq_len: 512\n")
    assert verb(served, laya_home, "reload").returncode == 0  # the server watches the file, and may have been first
    events = get(served, "/admin/events").json()["events"]
    told = next(each["text"] for each in reversed(events) if each["kind"] == "reloaded")
    assert f"removed {MODEL}" in told and "added other" in told
    assert list(stream)[-1].choices[0].finish_reason == "length"
    until(lambda: psutil.Process(served.pid).children() == [])
    assert get(served, "/v1/models/other").status_code == 200
    assert served.stop() == 0


def test_answers_past_the_drain_timeout_are_cut_with_a_word(start_server: Callable[..., Any]) -> None:
    server = start_server(config=config(max_seq_len=8192) + "server:\n  drain_timeout_s: 0.5\n")
    engine, stream = engine_of(server), stream_from(server, max_tokens=8000)
    os.kill(server.pid, signal.SIGTERM)
    with pytest.raises(openai.APIError, match="stopping"):
        for _ in stream:
            pass
    assert server.stop() == 0 and not engine.is_running()


def test_second_signal_ends_within_moments_and_leaves_no_process(start_server: Callable[..., Any]) -> None:
    server = start_server(config=config(max_seq_len=8192))
    engine, stream = engine_of(server), stream_from(server, max_tokens=8000)
    os.kill(server.pid, signal.SIGTERM)
    until(lambda: any("finishing 1 answer" in line for line in server.said))
    os.kill(server.pid, signal.SIGTERM)
    start_s = time.monotonic()
    ended(server)
    print(f"{time.monotonic() - start_s:.2f} s after the second signal")
    assert server.stop() == 0
    until(lambda: not engine.is_running(), 5)
    with pytest.raises(openai.APIError):
        list(stream)


def test_usage_outlives_a_server_that_is_killed(start_server: Callable[..., Any], laya_home: Path) -> None:
    server = start_server(config=config())

    def used() -> int:
        with Store(laya_home / DATABASE) as store:
            return sum(row.served for row in store.usage() if row.model == MODEL)

    before = used()
    assert chat_once(server).status_code == 200
    until(lambda: used() == before + 1, 10)  # written by itself
    asked = verb(server, laya_home, "usage", "--by", "model", "--json")
    rows = {row["model"]: row for row in json.loads(asked.stdout)["usage"]}
    assert rows[MODEL]["served"] == before + 1 and rows[MODEL]["prompt_tokens"] > 0 and rows[MODEL]["ttft_sum_s"] > 0
    told = httpx.get(f"{server.url}/metrics/engines", trust_env=False).text
    assert f'engine="{MODEL}",model="{MODEL}"' in told and "prompt_tokens_total" in told
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    assert MODEL in laya(laya_home, server.cwd, "usage", "--since", "7d").stdout
    assert laya(laya_home, server.cwd, "usage", "--by", "hour").returncode == 2
    assert laya(laya_home, server.cwd, "usage", "--since", "soon").returncode == 2


def test_hangup_is_a_reload_until_the_terminal_itself_is_closed(tmp_path: Path) -> None:
    environ = environment(tmp_path / "home")
    ours, theirs = os.openpty()
    server = subprocess.Popen(
        command("serve", "--port", "0"),
        cwd=tmp_path,
        env=environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    said = b""
    while b"laya list" not in said:
        said += os.read(ours, 4096)
    server.send_signal(signal.SIGHUP)
    url = re.search(rb"http://[\d.:]+", said)
    assert url is not None
    for _ in range(3):
        assert httpx.get(f"{url[0].decode()}/health", trust_env=False).status_code == 200
    os.close(ours)
    assert server.wait(20) == 0


def test_flags_stay_over_the_file(start_server: Callable[..., Any], laya_home: Path, smollm2_path: Path) -> None:
    server = start_server("-m", str(smollm2_path), "--max-seq-len", "512", "--n-threads", "1", "--alias", "mine")
    assert verb(server, laya_home, "reload").stdout.startswith("nothing changed: ")
    (server.cwd / "config.yaml").write_text("max_seq_len: 1024\nmax_num_seqs: 1\nserver: {port: 1}\n")
    done = verb(server, laya_home, "reload", "--json")
    report = json.loads(done.stdout)
    changed = {each["id"]: {setting["name"] for setting in each["settings"]} for each in report["changed"]}
    assert changed["SmolLM2-135M-Instruct.Q4_1"] == {"max_num_seqs"}, done.stdout
    assert report["needs_server_restart"] == []  # --port 0 stays
    until(lambda: get(server, "/v1/models/mine").json()["loaded"])
    assert get(server, "/v1/models/mine").json()["context_length"] == 512
    assert server.stop() == 0
