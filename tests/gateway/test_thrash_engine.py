"""Two models that do not fit together, asked for at once, on the real engine: served model by model, all of it."""

from __future__ import annotations

import threading
import time
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


class Loads:
    """What was loaded since this was made, and when."""

    def __init__(self, server: Serving) -> None:
        self._server = server
        self._after = max((event["id"] for event in self._events(0)), default=0)

    def _events(self, after: int) -> list[dict[str, Any]]:
        with plain(self._server) as client:
            events: list[dict[str, Any]] = client.get(f"/admin/events?after={after}").json()["events"]
        return events

    def all(self) -> list[tuple[str, float]]:
        """(model, Unix time) of each load."""
        found = self._events(self._after)
        return [(event["model"], event["at"]) for event in found if event["kind"] == "ready"]


def unload_both(server: Serving) -> None:
    with plain(server) as client:
        for name in "ab":
            assert client.post(f"/admin/models/{name}/unload").json()["state"] == "unloaded"


def loaded(server: Serving) -> str:
    """The model that is loaded, "" while none is."""
    return "".join(name for name in "ab" if model_state(server, name)["state"] == "ready")


def test_two_models_that_do_not_fit_together_do_not_thrash(narrow: Serving) -> None:
    """40 requests for one and the other in turn, from 8 clients at once: each is served in the turn of its model that
    is next when it comes, or in the one that it came in."""

    def client(number: int) -> list[tuple[str, float, float]]:
        asked = []
        for turn in range(N_EACH):
            start_s = time.time()
            asked.append((ask(narrow, "ab"[(number + turn) % 2]).model, start_s, time.time()))
        return asked

    loads = Loads(narrow)
    with ThreadPoolExecutor(N_CLIENTS) as clients:
        served = [each for asked in clients.map(client, range(N_CLIENTS)) for each in asked]
    assert sorted(name for name, _, _ in served) == ["a"] * 20 + ["b"] * 20
    assert 2 <= len(loads.all()) <= MOST_LOADS
    for name, start_s, end_s in served:
        assert sum(model == name and start_s < at_s < end_s for model, at_s in loads.all()) <= 1, "it was passed over"


def test_ten_first_requests_at_once_are_one_load(narrow: Serving) -> None:
    unload_both(narrow)
    loads, all_here = Loads(narrow), threading.Barrier(10)

    def client(_: int) -> str:
        all_here.wait()
        return str(ask(narrow, "a").model)

    with ThreadPoolExecutor(10) as clients:
        assert list(clients.map(client, range(10))) == ["a"] * 10
    assert [name for name, _ in loads.all()] == ["a"]
    assert (model_state(narrow, "a")["restarts"], loaded(narrow)) == (0, "a")


def test_load_outlives_who_asked_for_it(narrow: Serving) -> None:
    unload_both(narrow)
    loads = Loads(narrow)
    body = {"model": "a", "messages": user("Hi"), "max_tokens": 2}
    with plain(narrow) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=0.1)
    assert ask(narrow, "a").model == "a"
    assert [name for name, _ in loads.all()] == ["a"]


def test_model_that_was_loaded_for_a_request_serves_it_before_it_leaves(narrow: Serving) -> None:
    """`b` is asked for while `a` still loads (a lease): both are served, each by one load."""
    unload_both(narrow)
    loads = Loads(narrow)
    with ThreadPoolExecutor(2) as clients:
        a = clients.submit(ask, narrow, "a")
        until(lambda: model_state(narrow, "a")["state"] == "loading")
        b = clients.submit(ask, narrow, "b")
        assert (a.result(60).model, b.result(60).model) == ("a", "b")
    assert [name for name, _ in loads.all()] == ["a", "b"]
