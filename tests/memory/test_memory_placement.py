"""Where layers, weights, caches and graphs lie on a machine with graphics cards, by the engine's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_gguf import MakeGguf
from test_memory_cases import RECORDS, load_of

from laya.bench.plan_terabyte import N_EMBD, N_EXPERT, N_FF_EXPERT, write_model
from laya.memory.caches import kv_by_layer
from laya.memory.engine_facts import XLLAMACPP
from laya.memory.facts import ModelFacts, read_facts
from laya.memory.gguf import read_header
from laya.memory.load import Load
from laya.memory.placement import layer_devices
from laya.memory.planner import Choice, Model, decide, price
from laya.memory.terms import terms_by_device
from laya.types import GIB, MIB, AskedSettings

CHOICE = Choice(max_num_seqs=1, max_seq_len=2048, kv_cache_dtype="f16")
LARGE = 24 * GIB


def record(prefix: str) -> dict[str, Any]:
    return next(each for each in RECORDS if each["id"].startswith(prefix))


def priced(
    facts: ModelFacts, gpus: tuple[int, ...], *, projector_bytes: int = 0, draft: ModelFacts | None = None, **asked: Any
) -> dict[str, dict[str, int]]:
    model = Model(
        id="m", facts=facts, engine=XLLAMACPP, n_cores=2, gpu_free_bytes=gpus, projector_bytes=projector_bytes,
        draft=draft,
    )  # fmt: skip
    return price(model, decide(model, AskedSettings(**asked), CHOICE))


def test_the_last_layers_go_to_the_gpu_and_the_output_is_one_more() -> None:
    assert layer_devices(4, 2, (LARGE,)) == ("cpu", "cpu", "cpu", "gpu0", "gpu0")
    assert layer_devices(4, 5, (LARGE,)) == ("gpu0",) * 5
    assert layer_devices(4, 99, (LARGE,)) == ("gpu0",) * 5
    assert layer_devices(4, 0, (LARGE,)) == layer_devices(4, 3, ()) == ("cpu",) * 5


def test_several_gpus_take_layers_in_order_and_in_proportion_to_their_free_memory() -> None:
    assert layer_devices(7, 8, (LARGE, LARGE)) == ("gpu0",) * 4 + ("gpu1",) * 4
    assert layer_devices(7, 8, (3 * LARGE, LARGE)) == ("gpu0",) * 6 + ("gpu1",) * 2
    assert layer_devices(7, 4, (LARGE, LARGE)) == ("cpu",) * 4 + ("gpu0",) * 2 + ("gpu1",) * 2
    assert layer_devices(3, 4, (LARGE, 0)) == ("gpu0",) * 4


@pytest.mark.parametrize(
    ("prefix", "gpu_layers", "host", "gpu"), [("G1-", 26, "kv_cpu_mib", "kv_cuda_mib"), ("H2-", 20, 0, 1)]
)
def test_the_cache_is_split_as_public_runs_logged_it(prefix: str, gpu_layers: int, host: Any, gpu: Any) -> None:
    run = record(prefix)
    load, logged = load_of(run), run["logged"]
    devices = layer_devices(load.facts.shape.n_layer, gpu_layers, (LARGE,))
    split = {"cpu": 0, "gpu0": 0}
    for device, n_bytes in zip(devices, kv_by_layer(load), strict=False):
        split[device] += n_bytes
    said = logged if isinstance(host, str) else logged["kv_host_or_dev_split"]
    assert (split["cpu"] / MIB, split["gpu0"] / MIB) == (said[host], said[gpu])


def test_weights_are_exact_on_each_device(make_gguf: MakeGguf) -> None:
    path = make_gguf(n_layer=4, tied=False)
    tensors = {tensor.name: tensor.n_bytes for tensor in read_header(path).tensors}
    terms = priced(read_facts(path), (LARGE,), gpu_layers=3)
    on_gpu = sum(size for name, size in tensors.items() if name.startswith(("blk.2.", "blk.3.", "output")))
    assert terms["gpu0"]["weights"] == on_gpu
    assert terms["cpu"]["weights"] == sum(tensors.values()) - on_gpu


def test_an_embedding_that_is_the_output_too_is_copied_to_the_gpu(make_gguf: MakeGguf) -> None:
    path = make_gguf(n_layer=4)
    tensors = {tensor.name: tensor.n_bytes for tensor in read_header(path).tensors}
    embedding = tensors["token_embd.weight"]
    whole = priced(read_facts(path), (LARGE,))
    assert whole["gpu0"]["weights"] == sum(tensors.values())
    assert whole["cpu"]["weights"] == embedding
    assert priced(read_facts(path), ())["cpu"]["weights"] == sum(tensors.values())


def test_experts_of_the_first_layers_stay_in_host_memory(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path))
    experts = 3 * N_EXPERT * N_EMBD * N_FF_EXPERT // 32 * 34
    gpu = (LARGE,)
    kept = priced(facts, gpu, experts_on_cpu=61)["cpu"]["weights"] - priced(facts, gpu)["cpu"]["weights"]
    assert kept == 61 * experts
    assert (
        priced(facts, gpu, experts_on_cpu=10)["cpu"]["weights"] == priced(facts, gpu)["cpu"]["weights"] + 10 * experts
    )


def test_caches_and_graphs_follow_the_layers(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(n_layer=4))
    alone, split = priced(facts, ()), priced(facts, (LARGE, LARGE))
    assert set(split) == {"cpu", "gpu0", "gpu1"}
    assert "kv_cache" not in split["cpu"]
    assert split["gpu0"]["kv_cache"] + split["gpu1"]["kv_cache"] == alone["cpu"]["kv_cache"]
    assert min(split[gpu]["compute"] for gpu in ("gpu0", "gpu1")) > 0
    assert split["gpu0"]["gpu_process"] == split["gpu1"]["gpu_process"] > 0
    assert set(alone) == {"cpu"}


def test_a_batch_takes_weights_of_host_layers_to_the_gpu_with_it(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(n_layer=4))
    largest = max(group.largest_bytes for group in facts.groups if group.layer == 0)
    part, whole = priced(facts, (LARGE,), gpu_layers=2), priced(facts, (LARGE,))
    assert part["gpu0"]["compute"] == whole["gpu0"]["compute"] + largest
    assert part["cpu"]["compute"] >= whole["cpu"]["compute"]


def test_nothing_is_repacked_beside_a_gpu(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(weights="Q4_0"))
    assert "repack" in priced(facts, ())["cpu"]
    assert "repack" not in priced(facts, (LARGE,), gpu_layers=1)["cpu"]


def test_draft_and_projector_lie_where_the_output_lies(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(n_layer=4))
    terms = priced(facts, (LARGE,), projector_bytes=10 * MIB, draft=read_facts(make_gguf("draft")))
    assert terms["gpu0"]["projector"] == 14 * MIB
    assert terms["gpu0"]["draft"] > 0


def test_layers_that_predict_further_tokens_have_a_cache_of_their_own() -> None:
    for prefix in ("G3-", "G6-"):
        run = record(prefix)
        load = msgspec.structs.replace(load_of(run), mtp=True)
        assert terms_by_device(load)["cpu"]["draft"] / MIB == run["logged"]["draft_kv_mib"]


def test_prompt_cache_and_checkpoints_are_nothing_until_they_are_asked_for() -> None:
    load: Load = load_of(record("B1-"))
    terms = terms_by_device(load)["cpu"]
    assert "prompt_cache" not in terms
    assert "checkpoints" not in terms
    asked = terms_by_device(msgspec.structs.replace(load, prompt_cache_bytes=GIB, n_checkpoints=2))["cpu"]
    windows = sum(n for n, layer in zip(kv_by_layer(load), load.facts.shape.layers, strict=True) if layer.window)
    assert asked["checkpoints"] == 2 * windows
    assert asked["prompt_cache"] == GIB
