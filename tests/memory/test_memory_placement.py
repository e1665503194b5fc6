"""Where layers, weights, caches and graphs lie on a machine with graphics cards, by the engine's rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_gguf import MakeGguf
from test_memory_cases import RECORDS, load_of

from laya.bench.plan_terabyte import N_EMBD, N_EXPERT, N_FF_EXPERT, write_model
from laya.errors import ConfigError
from laya.memory import Budget, refusal
from laya.memory.caches import kv_by_layer
from laya.memory.engine_facts import XLLAMACPP
from laya.memory.facts import ModelFacts, read_facts
from laya.memory.fit import fit
from laya.memory.gguf import read_header
from laya.memory.load import Load
from laya.memory.placement import layer_devices
from laya.memory.planner import Choice, Model, decide, price
from laya.memory.terms import terms_by_device
from laya.types import ALL_LAYERS, GIB, MIB, AskedSettings, Plan

CHOICE = Choice(max_num_seqs=1, max_seq_len=2048, kv_cache_dtype="f16")
LARGE = 24 * GIB
BIG: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_ff": 4096}


def record(prefix: str) -> dict[str, Any]:
    return next(each for each in RECORDS if each["id"].startswith(prefix))


def priced(
    facts: ModelFacts,
    cards: tuple[int, ...],
    *,
    projector_bytes: int = 0,
    draft: ModelFacts | None = None,
    **asked: Any,
) -> dict[str, dict[str, int]]:
    model = Model(
        id="m", facts=facts, engine=XLLAMACPP, n_cores=2, gpu_free_bytes=cards, projector_bytes=projector_bytes,
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
    alone, split = priced(facts, ()), priced(facts, (LARGE, LARGE), gpus=(0, 1))
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


# the search


def planned(facts: ModelFacts, cards: tuple[int, ...], *, draft: ModelFacts | None = None, **asked: Any) -> Plan:
    model = Model(id="m", facts=facts, engine=XLLAMACPP, n_cores=2, gpu_free_bytes=cards, draft=draft)
    asked = {"max_num_seqs": 1, "max_seq_len": 2048, "kv_cache_dtype": "f16"} | asked
    return fit(model, AskedSettings(**asked), Budget(bytes=2**41, limit="plenty", memory_bytes=2**41))


def on(plan: Plan, device: str) -> int:
    return sum(each.total_bytes for each in plan.devices if each.device == device)


@pytest.fixture(scope="session")
def terabyte(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A trillion weights in 61 layers of 384 experts."""
    return read_facts(write_model(tmp_path_factory.mktemp("terabyte")))


def test_as_few_gpus_as_hold_it_are_used_and_the_roomiest_first(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(**BIG))
    settings = planned(facts, (8 * GIB, 24 * GIB, 12 * GIB)).settings
    assert (settings.gpu_layers, settings.tensor_split, settings.gpus) == (17, (0, 17, 0), (1,))
    need = on(planned(facts, (24 * GIB,)), "gpu0")
    settings = planned(facts, (need // 2, need - 1, need - 2)).settings
    assert settings.gpu_layers == 17
    assert settings.gpus == (1, 2)


def test_gpus_of_different_sizes_are_filled_by_the_same_share(terabyte: ModelFacts) -> None:
    """The nearest that whole layers allow: each is within one layer of the others."""
    cards = (400 * GIB, 300 * GIB, 500 * GIB)
    plan = planned(terabyte, cards, gpus=(0, 1, 2))
    assert plan.fits
    layer = on(plan, "gpu1") / plan.settings.tensor_split[1]
    shares = [on(plan, f"gpu{number}") / n_bytes for number, n_bytes in enumerate(cards)]
    assert max(shares) - min(shares) < layer / min(cards) * 1.5
    assert sum(plan.settings.tensor_split) == plan.settings.gpu_layers == 62


def test_experts_stay_in_ram_before_layers_do_and_as_few_as_needed(terabyte: ModelFacts) -> None:
    plan = planned(terabyte, (200 * GIB,), max_seq_len=None)
    settings = plan.settings
    assert plan.fits
    assert settings.gpu_layers == 62
    assert 0 < settings.experts_on_cpu < 61
    assert settings.max_seq_len == 32768
    assert plan.reasons["experts_on_cpu"].startswith("instead of 0: 1 x 4096 tokens at f16 would need")
    one_less = planned(
        terabyte, (200 * GIB,), max_seq_len=32768, experts_on_cpu=settings.experts_on_cpu - 1, gpu_layers=62
    )
    assert not one_less.fits
    small = planned(terabyte, (12 * GIB,), max_seq_len=4096)
    assert small.fits
    assert small.settings.experts_on_cpu == 61
    assert 0 < small.settings.gpu_layers < 62


def test_each_gpu_that_was_named_has_a_layer(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(n_layer=4))
    assert planned(facts, (24 * GIB, 2 * GIB), gpus=(0, 1)).settings.tensor_split == (4, 1)
    assert planned(facts, (24 * GIB, 2 * GIB), gpus=(0, 1), gpu_layers=1).settings.gpu_layers == 1


def test_shares_that_were_asked_are_kept(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(**BIG))
    settings = planned(facts, (24 * GIB, 24 * GIB, 24 * GIB), gpus=(0, 2), tensor_split=(3.0, 1.0)).settings
    assert settings.tensor_split == (13, 0, 4)
    assert planned(facts, (24 * GIB,), tensor_split=(1.0,)).settings.tensor_split == (17,)


def test_the_draft_lies_whole_on_the_gpus_however_few_layers_of_the_model_do(make_gguf: MakeGguf) -> None:
    facts, draft = read_facts(make_gguf(**BIG)), read_facts(make_gguf("draft"))
    settings = planned(facts, (24 * GIB,), gpu_layers=3, draft=draft).settings
    assert settings.draft_gpu_layers == draft.shape.n_layer + 1
    assert planned(facts, (24 * GIB,), gpu_layers=0, draft=draft).settings.draft_gpu_layers == 0


@pytest.mark.parametrize(
    ("cards", "asked", "words"),
    [
        ((), {"gpu_layers": 33}, "gpu_layers is 33, and no layer can lie on a GPU: no GPU was found. Leave it out"),
        ((), {"gpu_layers": ALL_LAYERS}, "gpu_layers is all"),
        ((0,), {"gpu_layers": 1}, "no layer can lie on a GPU"),
        ((GIB, 0, GIB), {"gpus": (1,)}, "gpus names GPU 1, which can't be used: there are 0, 2."),
        ((GIB,), {"tensor_split": (1.0, 1.0)}, "tensor_split names GPU 1, which can't be used: there is 0."),
        ((GIB, GIB), {"gpus": (0, 1), "tensor_split": (1.0,)}, "tensor_split has 1 shares for 2 GPUs"),
    ],
)
def test_gpus_that_are_not_there_are_an_error(
    make_gguf: MakeGguf, cards: tuple[int, ...], asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        planned(read_facts(make_gguf()), cards, **asked)


def test_nothing_of_a_gpu_is_in_a_plan_without_one(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf())
    for cards in ((), (0,), (300 * MIB,)):
        plan = planned(facts, cards)
        assert [device.device for device in plan.devices] == ["cpu"]
        assert (plan.settings.gpu_layers, plan.settings.gpus, plan.settings.n_batch) == (0, (), 128)
    assert planned(facts, (GIB,), gpu_layers=0).settings.tensor_split == (0,)


def test_copies_of_a_pipeline_are_counted_where_the_engine_makes_them(make_gguf: MakeGguf) -> None:
    """It does where all layers lie on several GPUs, and not where one stays in RAM."""
    facts = read_facts(make_gguf(n_layer=4))
    whole = priced(facts, (LARGE, LARGE), gpus=(0, 1))["gpu1"]["compute"]
    largest = max(group.largest_bytes for group in facts.groups if group.layer == 0)
    assert priced(facts, (LARGE, LARGE), gpus=(0, 1), gpu_layers=4)["gpu1"]["compute"] - largest < whole


def test_layers_of_multi_token_prediction_are_beyond_those_that_are_planned() -> None:
    load = load_of(record("G3-"))
    model = Model(id="m", facts=load.facts, engine=XLLAMACPP, n_cores=2, gpu_free_bytes=(LARGE,))
    settings = decide(model, AskedSettings(), CHOICE)
    assert settings.gpu_layers == load.facts.shape.n_layer + 1
    assert settings.mtp_layers == load.facts.shape.n_layer_nextn > 0
    assert decide(model, AskedSettings(gpu_layers=3), CHOICE).mtp_layers == 0


# refusals


def test_a_split_of_the_users_own_that_does_not_fit_is_told_with_one_that_does(terabyte: ModelFacts) -> None:
    plan = planned(terabyte, (200 * GIB, 300 * GIB), gpus=(0,), experts_on_cpu=0, gpu_layers=62)
    assert not plan.fits
    found = {each.note: each.flags for each in plan.suggestions}
    experts = planned(terabyte, (200 * GIB,), gpu_layers=62).settings.experts_on_cpu
    layers = planned(terabyte, (200 * GIB,), experts_on_cpu=0).settings.gpu_layers
    assert found["more experts in RAM"] == f"--experts-on-cpu {experts}"
    assert found["the other layers in RAM"] == f"--gpu-layers {layers}"
    error = refusal(plan, Budget(bytes=2**41, limit="plenty"))
    assert (error.details["limit"], error.details["available_bytes"]) == ("free on gpu0", 200 * GIB)
    assert error.details["need_bytes"] == on(plan, "gpu0") < plan.need_bytes
    assert "on gpu0 for 1 x 2048 tokens" in error.message
    assert f"`models.m.experts_on_cpu: {experts}`" in error.message


def test_other_gpus_are_suggested_where_those_that_were_named_are_full(make_gguf: MakeGguf) -> None:
    facts = read_facts(make_gguf(**BIG))
    plan = planned(facts, (600 * MIB, 24 * GIB), gpus=(0,), gpu_layers=17)
    assert not plan.fits
    assert plan.suggestions[0].flags == "--gpus 1"
    assert "`models.m.gpus: [1]`" in refusal(plan, Budget(bytes=2**41, limit="plenty")).message


def test_ram_that_is_short_beside_gpus_is_told_as_that(terabyte: ModelFacts) -> None:
    model = Model(id="m", facts=terabyte, engine=XLLAMACPP, n_cores=2, gpu_free_bytes=(24 * GIB,))
    budget = Budget(bytes=64 * GIB, limit="memory available", total_bytes=64 * GIB, memory_bytes=64 * GIB)
    plan = fit(model, AskedSettings(max_num_seqs=1), budget)
    assert not plan.fits
    error = refusal(plan, budget)
    assert error.details["limit"] == "memory available"
    assert "of RAM for 1 x" in error.message
