"""Several models and less memory than they need: loaded on demand, unloaded when idle or in the way, unless pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from .live import MODEL, Serving, is_idle, model_state, plain, sdk, until, user

pytestmark = pytest.mark.engine

CONFIG = """
version: 1
n_threads: 1
max_seq_len: 2048
max_num_seqs: 1
memory: {budget: 420MiB}
models:
  smollm2-135m: {}
  kept: {source: smollm2, pinned: true}
  brief: {source: smollm2, ttl: 1}
"""


@pytest.fixture(scope="module")
def one_at_a_time(start_server: Callable[..., Any]) -> Iterator[Serving]:
    """A budget for one engine; nothing is loaded yet, and ./models does not exist."""
    server = start_server(config=CONFIG)
    yield server
    assert server.stop() == 0


def drop(server: Serving, name: str, path: Path) -> None:
    """Put a model into models_dir, by link: to the server it is a file."""
    folder = server.cwd / "models"
    folder.mkdir(exist_ok=True)
    (folder / name).symlink_to(path)


def ask(server: Serving, model: str, **fields: Any) -> Any:
    given: dict[str, Any] = {"max_tokens": 1, "messages": user("Hi")} | fields
    return sdk(server).chat.completions.create(model=model, **given)


def loaded(server: Serving) -> list[str]:
    """Models that have an engine; there is a process for each and for nothing else."""
    with plain(server) as client:
        states = client.get("/admin/state").json()["models"]
    pids = {state["id"]: state["pid"] for state in states if state["pid"]}
    assert sorted(pids.values()) == sorted(child.pid for child in psutil.Process(server.pid).children())
    return list(pids)


def unload(server: Serving, model: str) -> None:
    with plain(server) as client:
        assert client.post(f"/admin/models/{model}/unload").json()["state"] == "unloaded"


def test_file_dropped_into_models_dir_is_served_at_once(one_at_a_time: Serving, smollm2_path: Path) -> None:
    assert loaded(one_at_a_time) == []
    with pytest.raises(openai.NotFoundError):
        ask(one_at_a_time, "dropped")
    drop(one_at_a_time, "dropped.gguf", smollm2_path)
    with plain(one_at_a_time) as client:  # a name that was missed is looked up again soon
        until(lambda: client.get("/v1/models/dropped").status_code == 200, 5)
    assert ask(one_at_a_time, "dropped").model == "dropped"
    assert ask(one_at_a_time, "dropped.gguf").model == "dropped"
    drop(one_at_a_time, "second.gguf", smollm2_path)
    assert ask(one_at_a_time, "second").model == "second"  # never asked for before: at once
    assert {"dropped", "second", MODEL, "kept"} <= {model.id for model in sdk(one_at_a_time).models.list().data}


def test_file_that_is_removed_is_listed_as_long_as_it_is_loaded(one_at_a_time: Serving, smollm2_path: Path) -> None:
    def listed() -> set[str]:
        return {model.id for model in sdk(one_at_a_time).models.list().data}

    drop(one_at_a_time, "brought.gguf", smollm2_path)
    until(lambda: "brought" in listed(), 10)  # before anybody asks for it
    drop(one_at_a_time, "SmolLM2.gguf", smollm2_path)
    until(lambda: "SmolLM2" in listed(), 10)
    assert ask(one_at_a_time, "SmolLM2").model == "SmolLM2"
    assert ask(one_at_a_time, "brought").model == "brought"
    for name in ("brought", "SmolLM2"):
        (one_at_a_time.cwd / "models" / f"{name}.gguf").unlink()
    until(lambda: "SmolLM2" not in listed(), 10)
    assert "brought" in listed()
    assert ask(one_at_a_time, "SmolLM2").model == MODEL  # again a name of it in another case
    until(lambda: "brought" not in listed(), 10)  # its engine made room


def test_idle_model_makes_room_for_the_one_that_is_asked_for(one_at_a_time: Serving) -> None:
    assert ask(one_at_a_time, "smollm2").model == MODEL
    assert loaded(one_at_a_time) == [MODEL]
    assert ask(one_at_a_time, "dropped").model == "dropped"
    assert loaded(one_at_a_time) == ["dropped"]
    with plain(one_at_a_time) as client:
        memory = client.get("/admin/state").json()["memory"]
    assert memory["reserved_bytes"] <= memory["budget_bytes"]


def test_busy_model_is_not_taken_from_its_clients(one_at_a_time: Serving) -> None:
    ask(one_at_a_time, "dropped")
    with ThreadPoolExecutor(1) as other:
        long = other.submit(ask, one_at_a_time, "dropped", max_tokens=100, extra_body={"ignore_eos": True})
        until(lambda: model_state(one_at_a_time, "dropped")["running"])
        assert ask(one_at_a_time, "smollm2").model == MODEL  # it waits
        assert long.result().usage.completion_tokens == 100


def test_pinned_model_is_never_in_the_way_of_being_kept(one_at_a_time: Serving) -> None:
    ask(one_at_a_time, "kept")
    assert loaded(one_at_a_time) == ["kept"]
    for _ in range(2):
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            ask(one_at_a_time, "smollm2")
        error: Any = refused.value.body
        assert error["need_bytes"] > error["available_bytes"]
    assert loaded(one_at_a_time) == ["kept"]
    unload(one_at_a_time, "kept")
    assert ask(one_at_a_time, "smollm2").model == MODEL


def test_model_is_unloaded_after_its_ttl_and_loaded_again(one_at_a_time: Serving) -> None:
    first = ask(one_at_a_time, "brief")
    assert loaded(one_at_a_time) == ["brief"]
    until(lambda: model_state(one_at_a_time, "brief")["state"] == "unloaded")
    assert loaded(one_at_a_time) == []
    assert ask(one_at_a_time, "brief").choices[0].finish_reason == first.choices[0].finish_reason


def test_ttl_does_not_end_what_is_running(one_at_a_time: Serving) -> None:
    answer = ask(one_at_a_time, "brief", max_tokens=120, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 120
    until(lambda: model_state(one_at_a_time, "brief")["state"] == "unloaded")


def test_ttl_counts_from_a_load_by_hand(one_at_a_time: Serving) -> None:
    with plain(one_at_a_time) as client:
        status = client.post("/admin/models/brief/load").json()
    assert status["state"] == "ready"
    assert model_state(one_at_a_time, "brief")["idle_s"] < 1
    until(lambda: model_state(one_at_a_time, "brief")["state"] == "unloaded")


def test_unload_lets_what_runs_finish_and_requests_wait_for_the_next_load(one_at_a_time: Serving) -> None:
    ask(one_at_a_time, "smollm2")
    pid = model_state(one_at_a_time)["pid"]
    with ThreadPoolExecutor(3) as others:
        running = others.submit(ask, one_at_a_time, "smollm2", max_tokens=60, extra_body={"ignore_eos": True})
        until(lambda: model_state(one_at_a_time)["running"])
        unloading = others.submit(unload_again, one_at_a_time)
        until(lambda: model_state(one_at_a_time)["state"] != "ready")
        late = others.submit(ask, one_at_a_time, "smollm2")
        assert running.result().usage.completion_tokens == 60
        assert late.result().model == MODEL
        unloading.result()
    state = model_state(one_at_a_time)
    assert (state["state"], state["restarts"]) == ("ready", 0)
    assert state["pid"] != pid
    until(lambda: is_idle(one_at_a_time))


def unload_again(server: Serving) -> None:
    with plain(server) as client:
        assert client.post(f"/admin/models/{MODEL}/unload").status_code == 200


def test_models_taking_turns_are_all_answered(one_at_a_time: Serving) -> None:
    """Requests for models that cannot coexist, all at once: each is answered when the others are done."""
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda model: ask(one_at_a_time, model).model, ["smollm2", "dropped", "second"] * 4))
    assert answers == [MODEL, "dropped", "second"] * 4
    assert len(loaded(one_at_a_time)) == 1
