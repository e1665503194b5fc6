"""The plan is a promise: whatever is asked of an engine, its measured peak stays below what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .live import FULL, MODEL, Serving, is_idle, model_state, plain, prompt_of, sdk, until, user

pytestmark = pytest.mark.engine

MAX_NUM_SEQS, MAX_SEQ_LEN = (4, 8192) if FULL else (3, 2304)
N_LONG = 2000


@pytest.fixture(scope="module")
def planned(start_server: Callable[..., Any]) -> Iterator[Serving]:
    """A server of its own, so that nothing but these requests made its peak."""
    server = start_server(
        "smollm2", "--max-num-seqs", str(MAX_NUM_SEQS), "--max-seq-len", str(MAX_SEQ_LEN), "--n-threads", "1"
    )
    yield server
    assert server.stop() == 0


def peak_and_plan(server: Serving) -> tuple[int, int]:
    state = model_state(server)
    return state["measured_bytes"], sum(device["total_bytes"] for device in state["plan"]["devices"])


def test_peak_stays_below_the_plan(planned: Serving) -> None:
    peak, plan = peak_and_plan(planned)
    assert 0 < peak <= plan, "after the load"
    client = sdk(planned)
    fields: dict[str, Any] = {"model": "smollm2", "max_tokens": 8, "temperature": 0}

    long = client.chat.completions.create(**fields, messages=user(prompt_of(N_LONG)))
    assert long.usage is not None and long.usage.prompt_tokens > N_LONG - 10
    peak, plan = peak_and_plan(planned)
    assert peak <= plan, "after a long prompt"

    def one(index: int) -> Any:
        # what sampling can hold: candidates, their logprobs, a grammar
        schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
        more: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if index else {}
        more |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
        prompt = prompt_of(1500 if FULL else 100, seed=f"s{index}")
        return client.chat.completions.create(**fields | {"max_tokens": 40}, **more, messages=user(prompt))

    with ThreadPoolExecutor(MAX_NUM_SEQS) as clients:
        answers = list(clients.map(one, range(MAX_NUM_SEQS)))
    assert len(answers) == MAX_NUM_SEQS
    until(lambda: is_idle(planned))
    peak, plan = peak_and_plan(planned)
    assert peak <= plan, "after all sequences at once"


def test_metrics_tell_plan_and_peak(planned: Serving) -> None:
    peak, plan = peak_and_plan(planned)
    with plain(planned) as client:
        text = client.get("/metrics").text
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    reserved = [sample for sample in families["laya_memory_reserved_bytes"] if sample.labels["model"] == MODEL]
    assert sum(sample.value for sample in reserved) == plan
    assert {sample.labels["term"] for sample in reserved} >= {"weights", "kv_cache", "compute", "overhead"}
    assert [sample.value for sample in families["laya_memory_measured_bytes"]] == [peak]
    (ratio,) = families["laya_plan_to_peak_ratio"]
    assert ratio.value == pytest.approx(plan / peak)
    assert ratio.value >= 1.0


def test_reservation_is_the_plan_and_below_the_budget(planned: Serving) -> None:
    with plain(planned) as client:
        memory = client.get("/admin/state").json()["memory"]
    assert memory["reserved_bytes"] == peak_and_plan(planned)[1] <= memory["budget_bytes"]
