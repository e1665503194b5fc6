"""Owns: models that llama.cpp runs: found as files, planned from their headers, started by what was planned."""

from __future__ import annotations

from pathlib import Path

import msgspec

from laya.config import ResolvedModel
from laya.engines.builds import packages_for, used
from laya.engines.gpu_build import VULKAN, gpu_build, why_no_gpu
from laya.engines.settings import EngineSettings, Pooling
from laya.errors import NotSupported
from laya.gateway.corrections import Corrections
from laya.gateway.rates import kept_rates
from laya.gateway.variants import find_model
from laya.memory import LLAMA_SERVER, Budget, ceiling_bytes, plan_file, read_facts, read_header
from laya.models import home_path
from laya.types import AskedSettings, ModelFile, Plan

UNTOLD = ("rocm", "vulkan")  # builds for cards whose memory NVML does not tell


class LlamaCppKind:
    """See kinds.Kind."""

    def find(self, settings: ResolvedModel, *, models_dir: Path, home: Path) -> ModelFile:
        return find_model(settings, models_dir=models_dir, home=home)

    def check(self, settings: ResolvedModel, file: ModelFile) -> None:
        check_servable(file)
        check_task(settings, file)
        pooling_of(settings, file)

    def plan(
        self, settings: ResolvedModel, file: ModelFile, asked: AskedSettings, budget: Budget, learned: Corrections
    ) -> Plan:
        packages, unplanned = packages_for(settings.engine_path, home_path()), unplanned_layers(settings, asked)
        if unplanned:
            asked = msgspec.structs.replace(asked, gpu_layers=None, gpus=(), tensor_split=())
        budget = budget_for(settings, budget)
        plan = plan_file(
            file.path,
            asked,
            budget,
            model_id=settings.id,
            engine=LLAMA_SERVER if settings.engine_path or packages else None,  # it may repack more
            rates=kept_rates(learned.path),
            correction=learned.of(settings, file.path),
        )
        if not unplanned:
            return plan
        note = "gpu_layers as you say: what they take of the card is not planned, and RAM is planned as without them"
        chosen = msgspec.structs.replace(plan.settings, gpu_layers=unplanned)
        return msgspec.structs.replace(plan, settings=chosen, notes=[*plan.notes, note])

    def start(
        self, settings: ResolvedModel, file: ModelFile, plan: Plan, threads_file: str | None, *, name: str = ""
    ) -> EngineSettings:
        packages = packages_for(settings.engine_path, home_path())
        on_gpus = bool(plan.settings.gpus)
        return EngineSettings(
            model_id=file.id,
            name=name,
            path=file.path,
            planned=plan.settings,
            args=settings.args,
            mmproj=settings.mmproj,
            draft=settings.draft,
            lora=settings.lora,
            pooling=pooling_of(settings, file),
            chat_template=settings.chat_template or file.chat_template,
            engine_path=settings.engine_path,
            packages=packages,
            mapped_bytes=plan.ram.terms.get("weights", 0) if on_gpus else None,
            sees_all_gpus=on_gpus and gpu_build(settings.engine_path, packages).kind == VULKAN,
            why_no_gpu=why_on_cpu(settings, plan),
            ceiling_bytes=ceiling_bytes(plan, settings.memory_limit_bytes),
            threads_file=threads_file,
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
        learned.learn(settings, file.path, plan, peak_bytes, was_killed=was_killed)


def budget_for(settings: ResolvedModel, budget: Budget) -> Budget:
    """The budget without GPUs that the engine of this model cannot use."""
    packages = packages_for(settings.engine_path, home_path())
    is_asked = any(budget.gpu_bytes) and not budget.is_elsewhere
    why_not = why_no_gpu(settings.engine_path, packages, len(budget.gpu_bytes)) if is_asked else None
    return budget if why_not is None else msgspec.structs.replace(budget, gpu_bytes=(), why_no_gpu=why_not)


def unplanned_layers(settings: ResolvedModel, asked: AskedSettings) -> int:
    """Layers that the user wants on a card whose memory nothing tells here: with a build for ROCm or Vulkan."""
    is_untold = settings.engine_path is None and used(home_path()).kind in UNTOLD
    return (asked.gpu_layers or 0) if is_untold else 0


def why_on_cpu(settings: ResolvedModel, plan: Plan) -> str | None:
    """Why all of it is computed by the CPU, where a build for a GPU was chosen and nobody asked for the CPU."""
    if plan.settings.gpu_layers or settings.engine_path is not None or settings.gpu_layers == 0:
        return None
    build = used(home_path())
    if build.kind == "cpu":
        return None
    if build.kind in UNTOLD:
        return (
            f"what a card holds is not known to a build for {build.hardware}; gpu_layers: all puts them there unplanned"
        )
    return plan.reasons.get("gpu_layers") or why_no_gpu(None, build.folder) or "no GPU was found"


def check_servable(file: ModelFile) -> None:
    """Raise NotSupported for a format that no engine here runs."""
    if file.format != "gguf":
        raise NotSupported(f"'{file.id}' is a Hugging Face folder, which llama.cpp can't run; engine: vllm can.")


def check_task(settings: ResolvedModel, file: ModelFile) -> None:
    """Raise NotSupported for a model that is said to decide and does not know how."""
    if settings.task == "decide":
        metadata = read_header(file.path).metadata
        key = f"{metadata.get('general.architecture')}.decision.type"
        if key not in metadata:
            raise NotSupported(f"'{file.id}' is no decision model: its file states no '{key}'. Use `task: chat`.")


def pooling_of(settings: ResolvedModel, file: ModelFile) -> Pooling | None:
    """How token vectors become one, where the file does not say. Raises NotSupported for what is no reranker."""
    if settings.task in ("chat", "decide"):
        return None
    own = read_facts(file.path).shape.pooling
    if settings.task == "rerank" and own != "rank":
        raise NotSupported(f"'{file.id}' is not a reranker: its file states no rank pooling. Use `task: embed`.")
    return None if own else "mean"
