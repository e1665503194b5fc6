"""What is lost on a cluster, one thing after another, and what comes back: engines, nodes, all nodes, the gateway."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import httpx
import psutil
import pytest

from laya.gateway.ray_actor import UNASKED_S
from tests.conftest import PlayedNvml
from tests.gateway.live import model_state, plain, until, user

from .conftest import Nodes

pytestmark = pytest.mark.engine


def ask(server: Any, model: str) -> httpx.Response:
    with plain(server) as client:
        body = {"model": model, "messages": user("Say hi"), "max_tokens": 2}
        return client.post("/v1/chat/completions", json=body)


class Asking:
    """A request under way."""

    def __init__(self, server: Any, model: str) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, model))
        self._thread.start()

    def _ask(self, server: Any, model: str) -> None:
        self.answer = ask(server, model)

    def wait(self) -> httpx.Response:
        self._thread.join()
        assert self.answer is not None
        return self.answer


def engines_of(model: str) -> list[psutil.Process]:
    """Processes of its engines on nodes."""
    all_of = psutil.process_iter(["cmdline"])
    ours = [each for each in all_of if "laya.engines.llamacpp_child" in (each.info["cmdline"] or [])]
    mine = [each for each in ours if each.info["cmdline"][-1] == model]
    return [each for each in mine if (parent := each.parent()) is not None and parent.name().startswith("ray::")]


def accounts(server: Any) -> dict[str, list[str]]:
    """Of each node that has one: who holds something there."""
    ledger: Any = server.state()["ledger"]
    return {name: sorted(ledger[name]["owners"]) for name in ledger if name.startswith("node/")}


def test_a_request_that_finds_a_dead_engine_waits_for_the_next(few: Any) -> None:
    """It came before anybody knew, and has not got a byte."""
    assert ask(few, "one").status_code == 200
    (engine,) = engines_of("one")
    engine.kill()
    answer = ask(few, "one")
    assert answer.status_code == 200, answer.text
    assert model_state(few, "one")["restarts"] == 1


def test_who_must_have_a_card_is_refused_where_no_node_has_one(few: Any) -> None:
    refused = ask(few, "on-a-card")
    assert refused.status_code >= 400
    assert "gpu_layers is all, and no layer can lie on a GPU: node n" in refused.json()["error"]["message"]
    assert not engines_of("on-a-card")


def test_what_is_unloaded_while_it_loads_leaves_nothing_on_its_node(few: Any) -> None:
    asking = Asking(few, "two")
    until(lambda: engines_of("two"))
    with plain(few) as client:
        assert client.post("/admin/models/two/unload").json()["state"] == "unloaded"
    assert asking.wait().json()["error"]["message"] == "'two' was unloaded while it was loading"
    until(lambda: not engines_of("two"))
    assert not any("two" in owners for owners in accounts(few).values())


def test_models_that_race_for_the_last_room_are_served_one_after_the_other(few: Any) -> None:
    """Room is for two, and `one` is idle in its place; nobody is promised what another has."""
    asking = [Asking(few, model) for model in ("two", "three")]
    assert [each.wait().status_code for each in asking] == [200, 200]
    state = few.state()
    held: Any = {name: account for name, account in state["ledger"].items() if name.startswith("node/")}
    assert sum(len(each["owners"]) for each in held.values()) == 2
    assert all(each["reserved"] + each["used"] <= each["total"] for each in held.values())


def test_a_node_that_is_lost_under_a_load_costs_no_request(few: Any, few_nodes: Nodes) -> None:
    with plain(few) as client:
        for model in ("one", "two", "three"):
            client.post(f"/admin/models/{model}/unload")
    asking = Asking(few, "one")
    until(lambda: engines_of("one"))
    engines_of("one")[0].suspend()  # a small model would be there before its node is gone
    node = str(model_state(few, "one")["node"])
    few_nodes.kill(node)
    answer = asking.wait()
    assert answer.status_code == 200, answer.text
    (left,) = {"n1", "n2"} - {node}
    assert model_state(few, "one")["node"] == left
    until(lambda: set(accounts(few)) == {f"node/{left}"})
    few_nodes.kill(left)


def test_without_any_node_requests_are_told_to_come_back_and_a_node_that_returns_serves(
    few: Any, few_nodes: Nodes
) -> None:
    until(lambda: "has no node" in ask(few, "one").text)  # before, it waits as one that was lost twice
    refused = ask(few, "one")
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["message"].endswith("has no node with memory to promise.")
    assert accounts(few) == {}
    few_nodes.add("n3", 180)
    until(lambda: ask(few, "one").status_code == 200)
    assert accounts(few) == {"node/n3": ["one"]}


def test_cards_are_used_as_ray_gives_them(few: Any, few_nodes: Nodes, with_cards: PlayedNvml) -> None:
    """The engine sees those that it was given and no other. Who must have one is refused where no node has any, and
    is no reason to leave out the node that has."""
    until(lambda: ask(few, "on-a-card").status_code == 200)  # the node has just come, and is heard of a moment later
    assert ask(few, "on-another").status_code == 200
    for model in ("on-a-card", "on-another"):
        assert model_state(few, model)["node"] == "cards"
    seen = [engines_of(model)[0].environ()["CUDA_VISIBLE_DEVICES"] for model in ("on-a-card", "on-another")]
    assert sorted(seen) == ["0", "1"]


def test_an_engine_ends_whose_server_is_not_heard_of_and_is_back_when_it_is(few: Any) -> None:
    """What speaks to Ray hangs, so that Ray sees a driver that is alive."""
    (engine,) = engines_of("one")
    family = psutil.Process(few.pid).children(recursive=True)
    (driver,) = [each for each in family if "laya.gateway.ray_driver" in each.cmdline()]
    driver.suspend()
    try:
        engine.wait(timeout=UNASKED_S + 10)
    finally:
        driver.resume()
    until(lambda: ask(few, "one").status_code == 200)
    assert engines_of("one")[0].pid != engine.pid


def test_engines_end_with_a_gateway_that_is_killed(few: Any) -> None:
    engines = engines_of("one") + engines_of("on-a-card") + engines_of("on-another")
    assert engines
    os.kill(few.pid, signal.SIGKILL)
    psutil.wait_procs(engines, timeout=30)
    assert not any(each.is_running() for each in engines)
