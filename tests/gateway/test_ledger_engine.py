"""The ledger over real engines: what runs at once, what makes room, what dies, and a pool that everybody shares."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from laya.engines.thread_share import can_follow

from .live import Serving, is_idle, model_state, plain, prompt_of, sdk, until, user

pytestmark = pytest.mark.engine
# Either model needs about 207 MiB, 160 KiB of them for each core: both do not fit, and 1.3 times one is what there is.
NARROW = """
version: 1
memory: {budget: 268MiB}
max_seq_len: 512
max_num_seqs: 1
models:
  a: {source: smollm2}
  b: {source: smollm2}
"""
WIDE = """
version: 1
models:
  a: {source: smollm2, max_seq_len: 512, max_num_seqs: 1}
  b: {source: smollm2, max_seq_len: 512, max_num_seqs: 1}
  pool: {source: smollm2, max_seq_len: 512, max_num_seqs: 4, kv_pool_tokens: auto, default_max_tokens: 16}
"""


@pytest.fixture(scope="module")
def narrow(start_server: Callable[..., Any]) -> Iterator[Serving]:
    running = start_server(config=NARROW)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def wide(start_server: Callable[..., Any]) -> Iterator[Serving]:
    running = start_server(config=WIDE)
    yield running
    running.stop()


def ledger(server: Serving) -> dict[str, Any]:
    """The accounts, checked to balance."""
    with plain(server) as client:
        accounts: dict[str, Any] = client.get("/admin/state").json()["ledger"]
    for account in accounts.values():
        assert account["free"] + account["reserved"] + account["used"] == account["total"]
    return accounts


def ask(server: Serving, model: str, text: str = "Hi", max_tokens: int = 2, **more: Any) -> Any:
    return sdk(server).chat.completions.create(model=model, messages=user(text), max_tokens=max_tokens, **more)


def post(server: Serving, path: str) -> Any:
    with plain(server) as client:
        answer = client.post(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_load_use_unload_and_load_again_within_1_3_times_the_model(narrow: Serving) -> None:
    for _ in range(2):
        assert ask(narrow, "a").choices[0].message.content is not None
        assert set(ledger(narrow)["cpu"]["owners"]) == {"a"}
        post(narrow, "/admin/models/a/unload")
        assert ledger(narrow)["cpu"]["owners"] == {}


def test_one_model_makes_room_for_the_other_and_back(narrow: Serving) -> None:
    for name in ("a", "b", "a"):
        ask(narrow, name)
        account = ledger(narrow)["cpu"]
        assert set(account["owners"]) == {name}
        assert 0 < account["owners"][name]["measured"] <= account["owners"][name]["promised"]
        assert not account["overdrawn"]


def test_killed_engine_gives_its_bytes_back_and_the_next_request_loads_it(narrow: Serving) -> None:
    ask(narrow, "a")
    os.kill(model_state(narrow, "a")["pid"], signal.SIGKILL)
    until(lambda: "a" not in ledger(narrow)["cpu"]["owners"])
    assert ask(narrow, "a").choices[0].message.content is not None
    assert set(ledger(narrow)["cpu"]["owners"]) == {"a"}
    assert model_state(narrow, "a")["restarts"] == 1


def test_request_for_a_model_that_does_not_fit_beside_a_busy_one_waits_for_it(narrow: Serving) -> None:
    with sdk(narrow).chat.completions.create(
        model="a", messages=user("Count"), stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        with ThreadPoolExecutor(1) as others:
            waiting = others.submit(ask, narrow, "b")
            until(lambda: "'a'" in (model_state(narrow, "b")["error"] or ""))  # who holds the memory
            assert set(ledger(narrow)["cpu"]["owners"]) == {"a"}
            stream.close()
            assert waiting.result().model == "b"
    assert set(ledger(narrow)["cpu"]["owners"]) == {"b"}
    until(lambda: is_idle(narrow, "b"))


@pytest.mark.skipif(not can_follow(), reason="no compiler was here when Laya was installed")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared")
def test_busy_engines_share_the_cores_and_get_them_back(wide: Serving) -> None:
    def threads() -> dict[str, int]:
        owners = ledger(wide)["threads"]["owners"]
        return {owner: holding["promised"] for owner, holding in owners.items()}

    for name in "ab":
        ask(wide, name)
    n_cores = ledger(wide)["threads"]["total"]
    more: Any = {"max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
    with sdk(wide).chat.completions.create(model="a", messages=user("Count"), **more) as first:
        next(iter(first))
        assert threads() == {"a": n_cores}
        with sdk(wide).chat.completions.create(model="b", messages=user("Count"), **more) as second:
            next(iter(second))
            shares = threads()
            assert set(shares) == {"a", "b"} and sum(shares.values()) == n_cores
            next(iter(first))
        until(lambda: threads() == {"a": n_cores})
    until(lambda: threads() == {})


def test_many_short_chats_and_one_long_document_share_a_pool_and_none_fails(wide: Serving) -> None:
    """The pool holds less than half of the worst case; all pass through it, the document with nearly a whole window."""
    jobs = [(prompt_of(370, seed="long"), 16)] + [(prompt_of(12, seed=f"s{number}"), 4) for number in range(8)]

    def one(job: tuple[str, int]) -> Any:
        text, max_tokens = job
        return ask(wide, "pool", text, max_tokens, extra_body={"ignore_eos": True})

    with ThreadPoolExecutor(len(jobs)) as clients:
        answers = list(clients.map(one, jobs))
    planned = model_state(wide, "pool")["plan"]["settings"]
    assert planned["kv_unified"] and planned["kv_pool_tokens"] < 512 * 4 / 2
    assert [answer.usage.completion_tokens for answer in answers] == [16] + [4] * 8
    until(lambda: is_idle(wide, "pool"))
