"""What was used: counted as requests end, on disk in batches, told by model, key and day."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from laya.config import StoreConfig
from laya.config.cost import Cost
from laya.config.places import DATABASE
from laya.gateway import usage as module
from laya.gateway.usage import KEYS_LABELLED, OTHERS, Meter, grouped, today
from laya.store import Store, Usage

from .front import CHAT, chat, front, request
from .keyed import chat_as, get_as, grant, keep

pytestmark = pytest.mark.anyio


def ended(key: str = "", model: str | None = "m", outcome: str = "served", **more: Any) -> Any:
    endpoint = SimpleNamespace(model_id=model) if model else None
    fields = {"sent_s": 1.0, "first_token_s": 0.0, "arrived_s": 0.0, "n_tokens_out": 0, "prompt_tokens": 0}
    fields |= {"prefill_done": 0} | more
    return cast(Any, SimpleNamespace(endpoint=endpoint, key_name=key or None, outcome=outcome, **fields))


async def test_requests_of_a_key_are_summed_and_kept(tmp_path: Path) -> None:
    keep(tmp_path, grant("me", role="admin"), grant("you"))
    async with front(tmp_path) as gate:
        for _ in range(2):
            assert (await gate.ask(chat_as("me"))).status == 200
        assert (await gate.ask(chat_as("you", stream=True))).status == 200
        assert (await gate.ask(chat_as("you", model="nowhere"))).status == 404
        await gate.settled()
        answer = await gate.ask(get_as("me", "/admin/usage?by=key"))
        rows = {row["key"]: row for row in answer.json["usage"]}
        assert (rows["me"]["requests"], rows["me"]["served"], rows["me"]["prompt_tokens"]) == (2, 2, 18)
        assert rows["me"]["generated_tokens"] == 4
        assert (rows["you"]["served"], rows["you"]["refused"]) == (1, 1)
        text = (await gate.ask(get_as("me", "/metrics"))).body.decode()
        assert 'laya_key_requests_total{key="me",outcome="served"} 2.0' in text
        assert (await gate.ask(get_as("you", "/admin/usage"))).status == 403
        assert (await gate.ask(get_as("me", "/admin/usage?by=hour"))).status == 400
        assert (await gate.ask(get_as("me", "/admin/usage?since=soon"))).status == 400
    with Store(tmp_path / DATABASE) as store:  # the endpoint wrote what it told
        assert sum(row.requests for row in store.usage()) == 4
        assert {row.model for row in store.usage()} == {"stub", ""}


async def test_looking_is_not_use(tmp_path: Path) -> None:
    async with front(tmp_path, keys=False) as gate:
        await gate.ask(chat())
        before_s = gate.endpoint.last_used_s
        for path in ("/metrics", "/health", "/ready", "/v1/models", "/admin/state", "/admin/usage", "/v1/models/stub"):
            assert (await gate.ask(request(method="GET", path=path))).status == 200, path
        assert gate.endpoint.last_used_s == before_s
        assert [row.requests for row in await gate.gateway.operating.meter.since("")] == [1]


async def test_store_that_cannot_be_written_loses_nothing_that_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    path.mkdir()
    meter = Meter(StoreConfig(), path)
    for _ in range(3):
        meter.count(ended(prompt_tokens=5))
        await meter.write()
    path.rmdir()
    (row,) = await meter.since("")
    assert (row.requests, row.prompt_tokens, row.day) == (3, 15, today())


async def test_labels_are_bounded_and_the_store_has_every_key(tmp_path: Path) -> None:
    meter = Meter(StoreConfig(), tmp_path / "laya.db")
    for number in range(KEYS_LABELLED + 20):
        meter.count(ended(f"k{number}"))
    requests, _ = meter.collect()
    keys = {sample.labels["key"] for sample in requests.samples}
    assert len(keys) == KEYS_LABELLED + 1 and OTHERS in keys
    assert len(await meter.since("")) == KEYS_LABELLED + 20


async def test_only_what_an_engine_did_is_tokens(tmp_path: Path) -> None:
    meter = Meter(StoreConfig(), tmp_path / "laya.db")
    meter.count(ended(outcome="refused", sent_s=0.0, prompt_tokens=9))
    meter.count(ended(outcome="failed", prompt_tokens=9, n_tokens_out=4))
    meter.count(ended(outcome="cancelled", prompt_tokens=0, prefill_done=7))
    (row,) = await meter.since("")
    assert (row.requests, row.refused, row.failed, row.cancelled) == (3, 1, 1, 1)
    assert (row.prompt_tokens, row.generated_tokens) == (7, 0)


async def test_costs_are_those_of_when_it_was_used_and_summed_by_currency(tmp_path: Path) -> None:
    prices = {"m": Cost(input_per_million=2, output_per_million=10, currency="EUR")}
    meter = Meter(StoreConfig(), tmp_path / "laya.db", prices.get)
    for _ in range(2):
        meter.count(ended("a", prompt_tokens=500_000, n_tokens_out=100_000))
    await meter.write()
    prices["m"] = Cost(input_per_million=1)
    meter.count(ended("a", prompt_tokens=500_000, n_tokens_out=100_000))
    meter.count(ended("b", prompt_tokens=1_000_000))
    await meter.write()
    prices.clear()
    meter.count(ended("c", prompt_tokens=1_000_000))
    rows = await meter.since("")
    assert {row.key: row.costs for row in rows} == {"a": {"EUR": 4.0, "USD": 0.5}, "b": {"USD": 1.0}, "c": {}}
    (whole,) = grouped(rows, "model")
    assert whole.costs == {"EUR": 4.0, "USD": 1.5}
    with Store(tmp_path / "laya.db") as store:
        store.prune_usage("9999-01-01")
        store.add_usage([Usage(day=today(), model="m", key="a", requests=1)])
        assert [row.costs for row in store.usage()] == [{}]


def test_sums_are_added_to_what_is_there_and_old_days_are_forgotten(tmp_path: Path) -> None:
    with Store(tmp_path / "laya.db") as store:
        for day in ("2026-01-01", "2026-01-02"):
            for _ in range(2):
                store.add_usage([Usage(day=day, model="m", key=key, requests=1, ttft_sum_s=0.5) for key in "ab"])
        assert [row.requests for row in store.usage()] == [2, 2, 2, 2]
        (by_model,) = grouped(store.usage(), "model")
        assert (by_model.requests, by_model.ttft_sum_s, by_model.day, by_model.key) == (8, 4.0, "", "")
        assert store.prune_usage("2026-01-02") == 2
        assert {row.day for row in store.usage()} == {"2026-01-02"}
        assert store.usage("2026-01-03") == []


async def test_what_is_kept_is_as_old_as_the_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "laya.db"
    with Store(path) as store:
        store.add_usage([Usage(day="2020-01-01", model="m", key="", requests=1)])
    Meter(StoreConfig(keep_usage=None), path)._prune()
    Meter(StoreConfig(keep_usage=-1), path)._prune()
    with Store(path) as store:
        assert len(store.usage()) == 1
    Meter(StoreConfig(), path)._prune()
    with Store(path) as store:
        assert store.usage() == []
    assert module.WRITE_EVERY_S <= 5 and CHAT["model"] == "stub"


METRICS = b"""# HELP llamacpp:prompt_tokens_total Prompt tokens.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 12
"""


async def test_what_engines_say_of_themselves_is_told_with_their_names(tmp_path: Path) -> None:
    keep(tmp_path, grant("me", role="admin"), grant("scraper", role="metrics"), grant("you"))
    async with front(tmp_path, model={"replicas": 2}) as gate:
        for engine in gate.engines:
            engine.metrics = METRICS
        before_s = [each.last_used_s for each in gate.endpoints]
        answer = await gate.ask(get_as("scraper", "/metrics/engines"))
        lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
        assert sorted(lines) == [
            f'llamacpp:prompt_tokens_total{{engine="stub#{number}",model="stub"}} 12.0' for number in (1, 2)
        ]
        assert [each.last_used_s for each in gate.endpoints] == before_s
        gate.engines[0].metrics, gate.engines[1].metrics = b"{]", b"no metrics here at all {"
        assert (await gate.ask(get_as("scraper", "/metrics/engines"))).body == b""
        assert (await gate.ask(get_as("you", "/metrics/engines"))).status == 403
