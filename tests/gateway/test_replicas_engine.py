"""Two real engines of one model: killed, hung, unloaded together; the other one goes on, and the first comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from laya.cli.main import main

from .live import MODEL, Serving, lines_so_far, model_state, plain, until, user

pytestmark = pytest.mark.engine

CONFIG = """
version: 1
n_threads: 1
models:
  smollm2-135m: {replicas: 2, max_num_seqs: 2, max_seq_len: 4096, preload: true, progress_timeout_s: 10}
"""


@pytest.fixture(scope="module")
def pair(start_server: Callable[..., Any]) -> Iterator[Serving]:
    server = start_server(config=CONFIG)
    yield server
    assert server.stop() == 0


def replicas(server: Serving) -> dict[str, dict[str, Any]]:
    """By name."""
    return {each["name"]: each for each in model_state(server)["extra"]["replicas"]}


def are_ready(server: Serving) -> bool:
    return [each["state"] for each in replicas(server).values()] == ["ready", "ready"]


def events(server: Serving, kind: str) -> list[str]:
    with plain(server) as client:
        found = client.get("/admin/events").json()["events"]
    return [event["text"] for event in found if event["kind"] == kind]


def ask(server: Serving, number: int, n_tokens: int = 16, **fields: Any) -> httpx.Response:
    body = {
        "model": "smollm2",
        "messages": user(f"Say the number {number}."),
        "max_tokens": n_tokens,
        "ignore_eos": True,
    }
    with plain(server) as client:
        return client.post("/v1/chat/completions", json=body | fields)


def outcomes(server: Serving) -> dict[str, int]:
    """Checked to sum to arrivals, with nothing in flight."""
    with plain(server) as client:
        until(lambda: client.get("/admin/state").json()["in_flight"] == 0)
        state = client.get("/admin/state").json()
    assert state["arrivals"] == sum(state["outcomes"].values())
    found: dict[str, int] = state["outcomes"]
    return found


def test_replicas_are_one_model_to_users_and_two_in_the_ledger(pair: Serving) -> None:
    until(lambda: are_ready(pair))
    with plain(pair) as client:
        ids = [model["id"] for model in client.get("/v1/models").json()["data"]]
        state = client.get("/admin/state").json()
        slots = client.get(f"/admin/models/{MODEL}/slots").json()["slots"]
    assert ids.count(MODEL) == 1 and not [name for name in ids if "#" in name]
    owners = state["ledger"]["cpu"]["owners"]
    assert {f"{MODEL}#1", f"{MODEL}#2"} <= set(owners)
    shown = next(model for model in state["models"] if model["id"] == MODEL)
    assert shown["state"] == "ready"
    assert shown["plan"]["devices"][0]["total_bytes"] == sum(each["planned_bytes"] for each in replicas(pair).values())
    assert [slot["replica"] for slot in slots] == [f"{MODEL}#1"] * 2 + [f"{MODEL}#2"] * 2
    assert len({each["pid"] for each in replicas(pair).values()}) == 2


def test_ps_tells_how_many_are_ready(
    pair: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    until(lambda: are_ready(pair))
    monkeypatch.setenv("LAYA_URL", pair.url)
    with contextlib.suppress(SystemExit):
        main(["ps"])
    assert "ready 2/2" in capsys.readouterr().out
    with contextlib.suppress(SystemExit):
        main(["logs", "smollm2", "--replica", "2"])
    assert f"engine for {MODEL}#2 started" in capsys.readouterr().out


def test_kill_of_one_replica_under_load_fails_no_request_that_had_not_begun(pair: Serving) -> None:
    """Whole answers: nothing of them is sent before they are complete, so they are tried again, within the budget."""
    until(lambda: are_ready(pair))
    for number in range(12):  # requests that the budget of retries is a tenth of
        assert ask(pair, number, 1).status_code == 200
    before, victim = outcomes(pair), replicas(pair)[f"{MODEL}#1"]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, pair, 100 + number) for number in range(8)]
        until(lambda: model_state(pair)["running"] == 4)
        os.kill(victim["pid"], signal.SIGKILL)
        statuses = [future.result().status_code for future in asked]
    n_failed = sum(status != 200 for status in statuses)
    assert n_failed <= 1, "two ran there, one of them is in the budget; the six others had not begun"
    after = outcomes(pair)
    assert after["served"] - before["served"] == 8 - n_failed
    until(lambda: are_ready(pair))
    assert replicas(pair)[f"{MODEL}#1"]["pid"] != victim["pid"]


def test_stopped_engine_is_found_killed_and_started_anew_while_the_other_serves(pair: Serving) -> None:
    until(lambda: are_ready(pair))
    was = replicas(pair)
    lines: list[str] = []
    began = threading.Event()

    def stream(number: int) -> None:
        body = {"model": "smollm2", "messages": user(f"Count from {number}."), "max_tokens": 600, "ignore_eos": True}
        with plain(pair) as client, client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as got:
            for line in lines_so_far(got):
                began.set()
                if "error" in line:
                    lines.append(line)

    def is_running(name: str) -> bool:
        with plain(pair) as client:
            slots = client.get(f"/admin/models/{MODEL}/slots").json()["slots"]
        return any(slot["is_processing"] for slot in slots if slot["replica"] == name)

    thread = threading.Thread(target=stream, args=(1,))
    thread.start()
    assert began.wait(60)
    name = next(name for name in was if is_running(name))
    os.kill(was[name]["pid"], signal.SIGSTOP)
    until(lambda: events(pair, "engine_stuck"))
    assert model_state(pair)["state"] == "degraded"
    thread.join(40)
    assert any("is stuck: it has not answered" in line for line in lines)
    assert ask(pair, 7, 4).status_code == 200, "by the other one"
    other = next(each for each in was if each != name)
    until(lambda: are_ready(pair))
    now = replicas(pair)
    assert now[name]["pid"] != was[name]["pid"] and now[other]["pid"] == was[other]["pid"]
    assert not os.path.exists(f"/proc/{was[name]['pid']}")
    assert outcomes(pair)["failed"] >= 1


def test_reload_renews_one_after_another_while_all_requests_are_served(pair: Serving) -> None:
    until(lambda: are_ready(pair))
    was = replicas(pair)
    (pair.cwd / "config.yaml").write_text(CONFIG.replace("max_seq_len: 4096", "max_seq_len: 2048"))
    statuses: list[int] = []
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            statuses.append(ask(pair, 1, 4).status_code)

    def is_renewed() -> bool:
        now = replicas(pair)
        assert any(each["state"] == "ready" for each in now.values()), now
        return are_ready(pair) and all(now[name]["pid"] != was[name]["pid"] for name in was)

    with ThreadPoolExecutor(3) as pool, plain(pair) as client:
        asking = [pool.submit(keep_asking) for _ in range(3)]
        try:
            (change,) = client.post("/admin/reload").json()["changed"]
            assert change["is_rolling"]
            until(is_renewed)
        finally:
            is_over.set()
        for each in asking:
            each.result()
        windows = [model["context_length"] for model in client.get("/v1/models").json()["data"]]
    assert set(statuses) == {200}
    assert windows == [2048]


def test_unload_and_load_act_on_all_replicas(pair: Serving) -> None:
    until(lambda: are_ready(pair))
    with plain(pair) as client:
        assert client.post(f"/admin/models/{MODEL}/unload").json()["state"] == "unloaded"
        assert {each["state"] for each in replicas(pair).values()} == {"unloaded"}
        assert client.get("/admin/state").json()["ledger"]["cpu"]["owners"] == {}
    assert ask(pair, 1, 4).status_code == 200, "loaded by a request"
    until(lambda: are_ready(pair))
