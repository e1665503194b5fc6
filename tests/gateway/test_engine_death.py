"""An engine that dies, a server that is killed, a queue that is full: what clients see, and that serving goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from .live import MODEL, Serving, busy_slots, is_idle, lines_so_far, model_state, plain, sdk, until, user

pytestmark = pytest.mark.engine

LONG: dict[str, Any] = {"model": "smollm2", "messages": user("Hi"), "max_tokens": 3000, "ignore_eos": True}
SHORT: dict[str, Any] = {"model": "smollm2", "messages": user("Hi"), "max_tokens": 1}
CONFIG = """
version: 1
n_threads: 1
models:
  smollm2-135m: {max_num_seqs: 2, max_seq_len: 4096, queue_size: 2, queue_timeout_s: 2, preload: true}
"""


@pytest.fixture(scope="module")
def mortal(start_server: Callable[..., Any]) -> Iterator[Serving]:
    """A short queue that is not waited in for long."""
    server = start_server(config=CONFIG)
    yield server
    assert server.stop() == 0


@pytest.fixture
def fresh(mortal: Serving) -> Serving:
    """Its engine has not failed before, so that it is restarted at once; asked for by hand, a back-off is over."""
    with plain(mortal) as client:
        assert client.post(f"/admin/models/{MODEL}/unload").status_code == 200
        assert client.post(f"/admin/models/{MODEL}/load").status_code == 200
    return mortal


@contextlib.contextmanager
def streaming(server: Serving, **fields: Any) -> Iterator[Iterator[str]]:
    """A long answer that has begun: its further lines."""
    with (
        plain(server) as client,
        client.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as response,
    ):
        lines = lines_so_far(response)
        while '"content":"' not in next(lines):
            pass
        yield lines


def kill_engine(server: Serving) -> int:
    pid = int(model_state(server)["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_stream_of_a_killed_engine_ends_with_an_error_event(fresh: Serving) -> None:
    restarts = model_state(fresh)["restarts"]
    with streaming(fresh) as lines:
        killed = kill_engine(fresh)
        rest = [line for line in lines if line]
    assert '"code":"engine_crashed"' in rest[-1]
    assert rest[-1].startswith('data: {"error":{')
    assert "data: [DONE]" not in rest
    answer = sdk(fresh).chat.completions.create(**SHORT)  # the next one is served, by a new engine
    assert answer.choices[0].message.content
    state = model_state(fresh)
    assert state["pid"] != killed
    assert state["restarts"] == restarts + 1
    assert state["state"] == "ready"


def test_engine_that_died_twice_is_waited_for(fresh: Serving) -> None:
    restarts = model_state(fresh)["restarts"]
    for _ in range(2):
        pid = kill_engine(fresh)
        until(lambda killed=pid: model_state(fresh)["pid"] != killed)  # type: ignore[misc]
        assert sdk(fresh).chat.completions.create(**SHORT).choices  # the second time after a back-off of a second
    state = model_state(fresh)
    assert (state["state"], state["restarts"]) == ("ready", restarts + 2)


def test_sdk_raises_on_a_stream_that_broke(fresh: Serving) -> None:
    fields = {name: value for name, value in LONG.items() if name != "ignore_eos"}
    stream = sdk(fresh).chat.completions.create(**fields, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    kill_engine(fresh)
    with pytest.raises(openai.APIError, match=MODEL):
        for _ in stream:
            pass


def test_whole_answer_of_a_killed_engine_is_a_502(fresh: Serving) -> None:
    with plain(fresh) as client, ThreadPoolExecutor(1) as other:
        asked = other.submit(client.post, "/v1/chat/completions", json=LONG)
        until(lambda: busy_slots(fresh) == 1)  # else its request goes to the next engine, from the beginning
        kill_engine(fresh)
        response = asked.result()
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "engine_crashed"


def test_waiting_requests_are_served_by_the_next_engine(fresh: Serving) -> None:
    with ThreadPoolExecutor(2) as others, streaming(fresh) as first, streaming(fresh) as second:
        waiting = others.submit(sdk(fresh).chat.completions.create, **SHORT)
        until(lambda: model_state(fresh)["queued"] == 1)
        kill_engine(fresh)
        assert "engine_crashed" in list(first)[-2] and "engine_crashed" in list(second)[-2]
        assert waiting.result().choices[0].message.content


def test_full_queue_is_429_and_a_long_wait_503_with_honest_retry_after(fresh: Serving) -> None:
    with ThreadPoolExecutor(2) as others, streaming(fresh), streaming(fresh), plain(fresh) as client:
        waiting = [others.submit(client.post, "/v1/chat/completions", json=SHORT) for _ in range(2)]
        until(lambda: model_state(fresh)["queued"] == 2)
        refused = client.post("/v1/chat/completions", json=SHORT)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/health").status_code == client.get("/v1/models").status_code == 200
        for request in waiting:
            response = request.result()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "queue_timeout"
            assert int(response.headers["retry-after"]) >= 1
    until(lambda: is_idle(fresh))
    assert sdk(fresh).chat.completions.create(**SHORT).choices


def test_client_that_leaves_the_queue_is_forgotten(fresh: Serving) -> None:
    with streaming(fresh), streaming(fresh), plain(fresh) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=SHORT, timeout=0.3)
        until(lambda: model_state(fresh)["queued"] == 0)
    until(lambda: is_idle(fresh))


def test_engine_ends_with_its_killed_server(start_server: Callable[..., Any]) -> None:
    server = start_server("smollm2", "--max-num-seqs", "1", "--max-seq-len", "512", "--n-threads", "1")
    engine = psutil.Process(model_state(server)["pid"])
    with contextlib.suppress(httpx.HTTPError, StopIteration), streaming(server):
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 10)
    assert server.stop() == -signal.SIGKILL


def test_many_first_requests_share_one_load(start_server: Callable[..., Any]) -> None:
    server = start_server("--max-num-seqs", "2", "--max-seq-len", "512", "--n-threads", "1")
    assert model_state(server)["state"] == "unloaded"
    most = [0]
    done = threading.Event()

    def count_engines() -> None:
        while not done.wait(0.02):
            most[0] = max(most[0], len(psutil.Process(server.pid).children()))

    with ThreadPoolExecutor(9) as others:
        watching = others.submit(count_engines)
        answers = list(others.map(lambda _: sdk(server).chat.completions.create(**SHORT), range(8)))
        done.set()
        watching.result()
    assert len(answers) == 8
    assert most == [1]
    assert server.stop() == 0
