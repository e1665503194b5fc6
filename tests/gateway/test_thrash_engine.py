"""Two models that do not fit together, asked for at once, on the real engine: served model by model, all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .live import Serving, model_state, plain, sdk, until, user

pytestmark = pytest.mark.engine
# Either model needs about 170 MiB, so both do not fit.
NARROW = """
version: 1
memory: {budget: 225MiB}
max_seq_len: 512
max_num_seqs: 2
n_threads: 1
queue_timeout_s: 120
models:
  a: {source: smollm2}
  b: {source: smollm2}
"""
N_CLIENTS, N_EACH, MOST_LOADS = 8, 5, 8


@pytest.fixture(scope="module")
def narrow(start_server: Callable[..., Any]) -> Iterator[Serving]:
    running = start_server(config=NARROW)
    yield running
    running.stop()


def ask(server: Serving, model: str, max_tokens: int = 2, **more: Any) -> Any:
    return sdk(server).chat.completions.create(model=model, messages=user("Hi"), max_tokens=max_tokens, **more)


def n_evicted(server: Serving) -> int:
    """Models that left for another one, so far: each stands for a load."""
    with plain(server) as client:
        events = client.get("/admin/events").json()["events"]
    return sum(event["kind"] == "evicted" for event in events)


def loaded(server: Serving) -> str:
    """The model that is loaded, "" while none is."""
    return "".join(name for name in "ab" if model_state(server, name)["state"] == "ready")


def test_two_models_that_do_not_fit_together_do_not_thrash(narrow: Serving) -> None:
    """40 requests for one and the other in turn, from 8 clients at once."""

    def client(number: int) -> list[str]:
        names = ["ab"[(number + turn) % 2] for turn in range(N_EACH)]
        return [ask(narrow, name).model for name in names]

    before = n_evicted(narrow)
    with ThreadPoolExecutor(N_CLIENTS) as clients:
        served = list(clients.map(client, range(N_CLIENTS)))
    n_loads = 1 + n_evicted(narrow) - before
    assert sorted(name for names in served for name in names) == ["a"] * 20 + ["b"] * 20
    assert n_loads <= MOST_LOADS


def test_ten_first_requests_at_once_are_one_load_that_outlives_who_asked_for_it(narrow: Serving) -> None:
    for name in "ab":
        with plain(narrow) as client:
            client.post(f"/admin/models/{name}/unload")
    with ThreadPoolExecutor(10) as clients:
        body = {"model": "a", "messages": user("Hi"), "max_tokens": 2}
        with plain(narrow) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body, timeout=0.1)
        until(lambda: model_state(narrow, "a")["pid"] is not None)
        pids = {model_state(narrow, "a")["pid"]}
        answers = list(clients.map(lambda _: ask(narrow, "a").model, range(10)))
    assert answers == ["a"] * 10
    pids.add(model_state(narrow, "a")["pid"])
    assert len(pids) == 1
    assert model_state(narrow, "a")["restarts"] == 0
    assert loaded(narrow) == "a"


def test_model_that_was_loaded_for_a_request_serves_it_before_it_leaves(narrow: Serving) -> None:
    """`b` is asked for while `a` still loads (a lease): both are served, each by one load."""
    for name in "ab":
        with plain(narrow) as client:
            client.post(f"/admin/models/{name}/unload")
    before = n_evicted(narrow)
    with ThreadPoolExecutor(2) as clients:
        a = clients.submit(ask, narrow, "a")
        until(lambda: model_state(narrow, "a")["state"] == "loading")
        b = clients.submit(ask, narrow, "b")
        assert (a.result(60).model, b.result(60).model) == ("a", "b")
    assert n_evicted(narrow) - before == 1
