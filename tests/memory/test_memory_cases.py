"""The planner against what public runs of llama.cpp logged: memory_cases.json, every record of it.

`kv` records hold the cache and the recurrent state to the digits the log printed. `compute` records of current builds
hold the graph of one device: never under, at most 1.35 times it. The others say what they can; see docs/memory.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.memory.caches import kv_by_layer, state_by_layer
from laya.memory.engine_facts import XLLAMACPP
from laya.memory.facts import facts_before_download
from laya.memory.graph import gpu_compute, host_compute
from laya.memory.load import Load
from laya.memory.params import shape_of
from laya.types import MIB, PlannedSettings

RECORDS: list[dict[str, Any]] = msgspec.json.decode((Path(__file__).with_name("memory_cases.json")).read_bytes())[
    "cases"
]
MOST_OVER = 1.35


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(record, id=record["id"]) for record in RECORDS if record["kind"] == kind]


def load_of(record: dict[str, Any]) -> Load:
    """The record's run as a load. `n_ctx` is what its log shows: tokens of all sequences together."""
    n_seqs, n_ctx = record["n_seq"] or 1, record["n_ctx"] or 256
    unified = bool(record["unified"])
    settings = PlannedSettings(
        max_seq_len=n_ctx,
        slot_tokens=n_ctx if unified else n_ctx // n_seqs,
        max_num_seqs=n_seqs,
        kv_cache_dtype=record["kv_type"] or "f16",
        kv_unified=unified,
        kv_pool_tokens=n_ctx,
        n_batch=2048,
        n_ubatch=record["n_ubatch"] or 512,
        n_threads=1,
        task="chat",
        mmap=True,
    )
    facts = facts_before_download(shape_of(record["arch"], record["params"]), 1, "F16")
    return Load(facts=facts, settings=settings, engine=XLLAMACPP, n_rollback=record["n_rs_seq"] or 0)


def on_gpus(record: dict[str, Any], n_gpus: int) -> Load:
    """The same with all layers on so many GPUs of one size."""
    load = load_of(record)
    settings = msgspec.structs.replace(load.settings, gpu_layers=load.facts.shape.n_layer + 1)
    return msgspec.structs.replace(load, settings=settings, gpu_free_bytes=(1,) * n_gpus)


@pytest.mark.parametrize("record", of_kind("kv"))
def test_cache_and_state_equal_the_log(record: dict[str, Any]) -> None:
    load, logged = load_of(record), record["logged"]
    caches, layers = kv_by_layer(load), load.facts.shape.layers
    windowed = sum(cache for cache, layer in zip(caches, layers, strict=True) if layer.window)
    found = {
        "kv_mib": sum(caches),
        "kv_global_mib": sum(caches) - windowed,
        "kv_swa_mib": windowed,
        "rs_mib": sum(state_by_layer(load)),
    }
    said = {name: value for name, value in logged.items() if name in found}
    assert said, "a kv record logs a cache or a state"
    for name, value in said.items():
        assert abs(found[name] / MIB - value) <= (0.005 if isinstance(value, float) else 0.6), name


@pytest.mark.parametrize("record", of_kind("compute"))
def test_gpu_compute_is_never_under_and_at_most_a_third_over_the_log(record: dict[str, Any]) -> None:
    found, logged = gpu_compute(load_of(record)) / MIB, record["logged"]["compute_mib"]
    assert logged - 0.005 <= found <= MOST_OVER * logged


@pytest.mark.parametrize("record", of_kind("compute_multi"))
def test_gpu_compute_with_layers_on_two_gpus_counts_the_pipeline_copies(record: dict[str, Any]) -> None:
    found, logged = gpu_compute(on_gpus(record, 2)) / MIB, record["logged"]["compute_mib_per_device"]
    assert logged - 0.005 <= found <= MOST_OVER * logged


@pytest.mark.parametrize("prefix", ["E1-", "E11-"])
def test_gpu_compute_holds_for_runs_it_was_not_fitted_to(prefix: str) -> None:
    record = next(each for each in RECORDS if each["id"].startswith(prefix))
    found, logged = gpu_compute(load_of(record)) / MIB, record["logged"]["compute_mib"]
    assert logged <= found <= MOST_OVER * logged


def test_host_memory_of_a_graph_on_a_gpu_holds_its_inputs() -> None:
    record = next(each for each in RECORDS if each["id"].startswith("E11-"))
    found, logged = host_compute(load_of(record)) / MIB, record["logged"]["compute_host_mib"]
    assert logged <= found <= MOST_OVER * logged


def test_every_record_is_judged_or_named_as_one_that_cannot_be() -> None:
    """Older builds reserved rows of logits that current ones do not; breakdowns lack the model's dimensions."""
    judged = {"kv", "compute", "compute_multi"}
    named = {"compute_old", "breakdown", "vllm"}  # vllm: test_memory_vllm.py
    assert {record["kind"] for record in RECORDS} == judged | named
