"""`laya plan` on a machine with GPUs, and for cards that are only named: the split, what is read, what can't be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from machine_rates import RATES
from small_gguf import MakeGguf
from test_memory_placement import BIG

from laya.bench.plan_terabyte import write_model
from laya.cli import gpus
from laya.config import Config, with_settings
from laya.engines import llamacpp
from laya.errors import ConfigError
from laya.gateway.corrections import Corrections
from laya.gateway.kind_llamacpp import LlamaCppKind
from laya.memory import Budget, GpuMeter
from laya.memory.facts import read_facts
from laya.types import GIB, MIB, ModelFile

CARD = {"name": "NVIDIA GeForce RTX 4090", "total": 24 * GIB}


@pytest.fixture
def cards_here(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> Callable[..., None]:
    """`cards_here(free, free, why=None)`: cards of 24 GiB with so much free; why: no engine here can use them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def play(*free: int, why: str | None = None) -> None:
        nvml.play(*(CARD | {"free": n_bytes} for n_bytes in free))
        monkeypatch.setattr(gpus, "_meter", lambda: GpuMeter(nvml.library))
        monkeypatch.setattr(gpus, "why_no_gpu", lambda *_: why)

    return play


def seen(laya_plan: Any, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(laya_plan(*words, "--json")[1])
    return found


def devices(plan: dict[str, Any]) -> dict[str, Any]:
    return {device["device"]: device for device in plan["devices"]}


def test_the_cards_that_are_here_are_planned_with(laya_plan: Any, make_gguf: MakeGguf, cards_here: Any) -> None:
    cards_here(8 * GIB, 20 * GIB)
    path = make_gguf(**BIG)
    plan = seen(laya_plan, path)
    assert plan["settings"]["tensor_split"] == [0, 17]
    assert devices(plan)["gpu1"]["budget_bytes"] == 20 * GIB - round(0.03 * 24 * GIB)
    both = seen(laya_plan, path, "--gpus", "0,1", "--tensor-split", "1,3")
    assert both["settings"]["tensor_split"] == [5, 12]
    assert set(devices(both)) == {"cpu", "gpu0", "gpu1"}
    assert seen(laya_plan, path, "--gpu-layers", "0")["settings"]["gpu_layers"] == 0
    code, text = laya_plan(path)
    assert code == 0
    assert "gpu_layers 17  all, and the output matrix" in text
    assert "tensor_split 0 17  as few GPUs as hold it" in text


def test_no_card_is_planned_with_where_no_engine_can_use_it(
    laya_plan: Any, make_gguf: MakeGguf, cards_here: Any
) -> None:
    cards_here(20 * GIB, why="the engine that comes with Laya is a build for CPUs")
    path = make_gguf(**BIG)
    assert set(devices(seen(laya_plan, path))) == {"cpu"}
    with pytest.raises(Exception, match="gpu_layers is all, and no layer can lie on a GPU: the engine that comes with"):
        laya_plan(path, "--gpu-layers", "all")
    assert seen(laya_plan, path, "--gpu-memory", "24GiB")["settings"]["gpu_layers"] == 17
    assert set(devices(seen(laya_plan, path, "--memory", "64GiB"))) == {"cpu"}


def test_what_a_token_reads_is_told_by_device(
    laya_plan: Any, tmp_path: Path, cards_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trillion weights in 384 experts, 8 of which a token uses."""
    path = write_model(tmp_path)
    monkeypatch.setattr("laya.cli.plan.kept_rates", lambda: RATES)
    words = (path, "--gpu-memory", "200GiB", "--memory", "1400GiB", "--max-num-seqs", "1")
    plan = seen(laya_plan, *words)
    read, speed = plan["speed"]["bytes_per_token"], plan["speed"]
    assert set(read) == {"cpu", "gpu0"}
    n_kept, facts = plan["settings"]["experts_on_cpu"], read_facts(path)
    experts = sum(group.n_bytes for group in facts.groups if group.is_expert and group.layer < n_kept)
    assert read["cpu"] == round(experts * 8 / 384)
    per_s = RATES.read_bytes_per_s(read["cpu"], plan["settings"]["n_threads"])
    assert speed["most_per_s"] == pytest.approx(per_s / read["cpu"], rel=0.01)
    assert "on gpu0" in laya_plan(*words)[1]
    assert "tok/s by what RAM gives here" in laya_plan(*words)[1]


def test_cards_that_do_not_hold_what_was_fixed_are_told_with_what_does(laya_plan: Any, make_gguf: MakeGguf) -> None:
    flags = "--gpu-memory 1GiB,6GiB --gpu-layers all --gpus 0 --max-seq-len 32768"
    words = (make_gguf(**BIG), *flags.split())
    code, text = laya_plan(*words, "--max-num-seqs", "2")
    assert code == 3
    assert "DOES NOT FIT" in text
    plan = seen(laya_plan, *words, "--max-num-seqs", "2")
    assert plan["suggestions"][0]["flags"] == "--gpus 1"
    assert "--gpus 1" in text
    assert any("--gpu-layers" in each["flags"] for each in plan["suggestions"])
    assert devices(plan)["gpu0"]["total_bytes"] > devices(plan)["gpu0"]["budget_bytes"] == GIB - 512 * MIB


def test_the_plan_is_what_the_engine_is_started_with(make_gguf: MakeGguf, tmp_path: Path) -> None:
    """From the config to the words of a llama-server that is built for CUDA."""
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho '  CUDA0: NVIDIA (24217 MiB, 23850 MiB free)'\n")
    server.chmod(0o755)
    path = make_gguf(**BIG)
    config = with_settings(Config(), {"engine_path": str(server), "gpus": [0, 2], "tensor_split": [3, 1]})
    settings = config.for_model("m")
    file = ModelFile(id="m", path=path, format="gguf", file_bytes=0, origin="config")
    budget = Budget(bytes=64 * GIB, limit="plenty", memory_bytes=64 * GIB, gpu_bytes=(20 * GIB, 0, 20 * GIB))
    kind = LlamaCppKind()
    plan = kind.plan(settings, file, settings.asked(), budget, Corrections(tmp_path / "laya.db"))
    assert [device.device for device in plan.devices] == ["cpu", "gpu0", "gpu2"]
    started = kind.start(settings, file, plan, None)
    started.check()
    assert started.mapped_bytes == plan.ram.terms["weights"]
    words = llamacpp.flags(started)
    said = {flag: words[words.index(flag) + 1] for flag in ("--n-gpu-layers", "--tensor-split", "--split-mode")}
    assert said == {"--n-gpu-layers": "17", "--tensor-split": "13,4", "--split-mode": "layer"}
    assert llamacpp.environment(planned=plan.settings)["CUDA_VISIBLE_DEVICES"] == "0,2"
    cpu_alone = msgspec.structs.replace(settings, engine_path=None, gpus=(), tensor_split=())
    plan = kind.plan(cpu_alone, file, cpu_alone.asked(), budget, Corrections(tmp_path / "laya.db"))
    assert [device.device for device in plan.devices] == ["cpu"]


def test_flags_of_llama_cpp_are_read_whole_and_amounts_have_units(laya_plan: Any, make_gguf: MakeGguf) -> None:
    """`-ncmoe` and `-ts` begin like `-c` and `-t`."""
    path, cards = make_gguf(**BIG), ("--gpu-memory", "24GiB,24GiB")
    words = ("-ngl", 99, "-ncmoe", 3, "-ts", "3,1", "-t", 1, "-c", 4096, "-np", 2, *cards)
    plan = seen(laya_plan, path, *words)
    assert (plan["settings"]["gpu_layers"], plan["settings"]["tensor_split"]) == (17, [13, 4])
    assert (plan["settings"]["n_threads"], plan["settings"]["max_seq_len"]) == (1, 2048)
    assert "experts_on_cpu changes nothing: small has no experts" in plan["notes"]
    assert "gpu_layers 17 (of 99 asked)" in laya_plan(path, *words)[1]
    assert seen(laya_plan, path, "-cmoe", *cards)["settings"]["max_num_seqs"] == 2
    for flag, value in (("--gpu-memory", "24"), ("--gpu-memory", "24GiB,12"), ("--memory", "24"), ("--memory", "0")):
        with pytest.raises(ConfigError, match=f"^{flag} '{value}'.* less than any model: write"):
            laya_plan(path, flag, value)


def test_what_was_tried_and_given_up_again_is_no_reason(laya_plan: Any, make_gguf: MakeGguf) -> None:
    plan = seen(laya_plan, make_gguf(), "--gpu-memory", "520MiB")
    assert plan["settings"]["gpu_layers"] == 0
    assert not any(f"instead of {plan['settings'].get(name)}:" in why for name, why in plan["reasons"].items())


@pytest.mark.parametrize("value", ["-1", "", "GPU-6c1e", "7"])
def test_cards_that_the_environment_hides_are_told_so(
    laya_plan: Any, make_gguf: MakeGguf, cards_here: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    cards_here(20 * GIB, 20 * GIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    path = make_gguf(**BIG)
    assert seen(laya_plan, path)["settings"]["gpu_layers"] == 0
    for words in (("--gpu-layers", "all"), ("--gpus", "0"), ("--tensor-split", "1,1")):
        with pytest.raises(ConfigError) as refused:
            laya_plan(path, *words)
        hidden = f"CUDA_VISIBLE_DEVICES={value} names none of the GPUs here by its number or UUID (0, 1)"
        assert hidden in refused.value.message


def test_a_flag_may_stand_before_the_model(laya_plan: Any, make_gguf: MakeGguf) -> None:
    path = make_gguf(**BIG)
    after = seen(laya_plan, path, "-ngl", 4, "--gpu-memory", "24GiB")
    assert seen(laya_plan, "-ngl", 4, "--gpu-memory", "24GiB", path)["settings"] == after["settings"]
    assert seen(laya_plan, "-c", 4096, path)["settings"]["max_seq_len"] == 4096
    with pytest.raises(ConfigError, match="another: expected a flag here"):
        laya_plan("-ngl", 4, path, "another")


def test_two_configs_are_compared_beside_the_cards_that_are_named(
    laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    files = [tmp_path / "old.yaml", tmp_path / "new.yaml"]
    for file, layers in zip(files, (0, 4), strict=True):
        file.write_text(f"version: 1\nmodels: {{a: {{source: {make_gguf(**BIG)}, gpu_layers: {layers}}}}}\n")
    compared = json.loads(laya_plan("--compare", *files, "--gpu-memory", "24GiB", "--json")[1])
    assert "gpu_process" in json.dumps(compared)
