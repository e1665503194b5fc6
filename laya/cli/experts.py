"""Owns: `laya experts MODEL`: which engine can tell which experts a model chooses, on what text, and what is written.

A model file is counted by llama.cpp, without torch; a Hugging Face folder in torch. Both in a process of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from laya.cli.experts_show import print_use
from laya.cli.fit import Fitter
from laya.cli.lab import check_torch, interruptible
from laya.config import Config, load_config
from laya.errors import ConfigError, InsufficientMemory, InvalidRequest
from laya.experts.asking import Engine, ask
from laya.experts.counting import WINDOW_TOKENS, Counted, Job
from laya.experts.use import ExpertUse
from laya.lab_progress import Progressing
from laya.memory import Machine, read_facts
from laya.models import home_path, resolve, size_text
from laya.result_file import check_result_file, write_result_file
from laya.texts import DEFAULT_SET, load_files, load_set
from laya.types import ModelFile


def experts(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model id, alias, file name or path; a Hugging Face folder.")
    ],
    text: Annotated[
        list[Path] | None, typer.Option(help="A text, a topic of its own; .jsonl: lines of topic and text. Repeatable.")
    ] = None,
    set_name: Annotated[
        str | None, typer.Option("--set", help=f"A text set that ships. Default: {DEFAULT_SET}.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write every share to this file.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Draw a heat map into this file.")] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help=f"Tokens at once. Default: the model's context, at most {WINDOW_TOKENS}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in one line.")] = False,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Default: ./config.yaml if there is one.")
    ] = None,
) -> None:
    """Show how a Mixture-of-Experts model uses its experts on a text: shares per layer and topic, how even."""
    if text and set_name:
        raise InvalidRequest("--text and --set are two texts: give one of them.")
    documents = load_files(text) if text else load_set(set_name or DEFAULT_SET)
    for option, file in (("--csv", csv_file), ("--png", png_file)):
        if file is not None:
            check_result_file(option, file)
    if window is not None and window > WINDOW_TOKENS:
        raise InvalidRequest(f"--window {window}: a window has at most {WINDOW_TOKENS} tokens.")
    if png_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib, which this Python does not have: pip install 'laya-llm[torch]'")
    config = load_config(config_file, os.environ)
    model = _model(name, config)
    n_experts, context = _shape(model)
    engine: Engine = "llama.cpp" if model.format == "gguf" else "torch"
    job = Job(
        path=str(model.path),
        documents=documents,
        window_tokens=min(window or WINDOW_TOKENS, context or sys.maxsize),
        n_threads=Machine().cores(),
        n_experts=n_experts,
    )
    use = ExpertUse(_counted(engine, job))
    if csv_file is not None:
        write_result_file(csv_file, use.as_csv().encode())
    if png_file is not None:
        from laya.experts.heat_map import draw, png

        write_result_file(
            png_file, png(draw(use, f"{model.id}: {use.n_experts} experts, {use.top_k} a token, by {engine}"))
        )
    if as_json:
        print(json.dumps({"model": model.id, "engine": engine, **use.as_json()}))
        return
    print_use(use, model.id, engine)
    for file in (csv_file, png_file):
        if file is not None:
            print(f"{file} is written.")


def _model(name: str, config: Config) -> ModelFile:
    """Raises InvalidRequest where the model runs in a place or an engine that does not tell, or does not fit."""
    settings = config.for_model(name)
    can = "A GGUF file here does by llama.cpp, a Hugging Face folder in torch."
    if settings.peer is not None:
        raise InvalidRequest(
            f"'{name}' runs at the peer '{settings.peer}', whose API does not tell which experts are chosen: "
            f"run `laya experts` there. {can}"
        )
    if settings.engine in ("command", "remote", "vllm"):
        folder = Path(settings.source).expanduser() if settings.source else None
        instead = f"`laya experts {folder}` runs its folder in torch." if folder and folder.is_dir() else can
        raise InvalidRequest(
            f"'{name}' has engine: {settings.engine}, which does not tell which experts it chooses. {instead}"
        )
    model = resolve(settings.source or name, models_dir=Path(config.models_dir), home=home_path())
    fit = Fitter(config).size(model.file_bytes)
    if fit.fits is False:
        raise InsufficientMemory(
            f"'{model.id}' does not fit: its weights are {size_text(model.file_bytes)}, "
            f"{size_text(fit.budget_bytes or 0)} may be used.",
            need_bytes=model.file_bytes,
            available_bytes=fit.budget_bytes or 0,
            limit="memory",
            suggestions=[],
        )
    return model


def _shape(model: ModelFile) -> tuple[int | None, int | None]:
    """Experts and context, from a GGUF file's header; a folder's are told by torch."""
    if model.format != "gguf":
        check_torch("experts")
        return None, None
    shape = read_facts(model.path).shape
    if not shape.n_expert:
        raise InvalidRequest(f"'{model.id}' is a dense model ({shape.architecture}): it has no experts.", param="model")
    return shape.n_expert, shape.n_ctx_train or None


def _counted(engine: Engine, job: Job) -> Counted:
    with (
        interruptible("experts", "nothing is written"),
        Progressing(Console(stderr=True)) as progress,
    ):
        progress.stage(f"counting, by {engine}", unit="tokens")
        return ask(engine, job, progress.update)
