"""Owns: what an engine is started with, out of a model's settings, its file and its plan. Starts nothing."""

from __future__ import annotations

from laya.config import ResolvedModel
from laya.engines.settings import EngineSettings, Pooling
from laya.errors import NotSupported
from laya.memory import ceiling_bytes, read_facts, read_header
from laya.types import ModelFile, Plan


def check_servable(file: ModelFile) -> None:
    """Raise NotSupported for a format that no engine here runs."""
    if file.format != "gguf":
        raise NotSupported(f"'{file.id}' is a Hugging Face folder; no engine that is installed here can run it.")


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


def engine_settings(
    settings: ResolvedModel,
    file: ModelFile,
    plan: Plan,
    pooling: Pooling | None,
    threads_file: str | None = None,
    *,
    name: str = "",
) -> EngineSettings:
    """The settings of one start. threads_file: where the engine reads how many threads it may use now. name: of the
    engine, where its model has several."""
    return EngineSettings(
        model_id=file.id,
        name=name,
        path=file.path,
        planned=plan.settings,
        args=settings.args,
        mmproj=settings.mmproj,
        draft=settings.draft,
        lora=settings.lora,
        pooling=pooling,
        chat_template=settings.chat_template or file.chat_template,
        engine_path=settings.engine_path,
        ceiling_bytes=ceiling_bytes(plan, settings.memory_limit_bytes),
        threads_file=threads_file,
        load_timeout_s=settings.load_timeout_s,
    )
