"""Owns: which models `laya list` shows because the configuration names them: programs, other servers, files elsewhere.

What they are and would be started with is asked of their kind, as the server does; nothing is started or reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from laya.cli.fit import Fit, Fitter, fit_of
from laya.config import Config, ResolvedModel
from laya.config.places import DATABASE
from laya.errors import LayaError, StoreError
from laya.gateway.corrections import Corrections, nothing_learned
from laya.gateway.kinds import kind_of
from laya.models import home_path
from laya.types import ANY_LENGTH, ModelFile, Plan

_ORIGINS = {"llamacpp": "config", "command": "program"}  # other engines by their name


def entry_rows(config: Config, here: Iterable[ModelFile], fitter: Fitter) -> Iterator[dict[str, Any]]:
    """A row for each entry of the config that is none of the files here."""
    paths = {model.path.resolve() for model in here}
    for model_id in config.models:
        settings = config.for_model(model_id)
        row: dict[str, Any] = {"id": model_id, "aliases": list(settings.aliases), "task": settings.task}
        row |= {"origin": _ORIGINS.get(settings.engine, settings.engine), "file_bytes": None}
        try:
            file = kind_of(settings).find(settings, models_dir=Path(config.models_dir), home=home_path())
            if file.path.resolve() in paths and settings.engine == "llamacpp":
                continue
            fit = fitter.file(file) if settings.engine == "llamacpp" else fit_of(_plan(settings, file, fitter))
            row |= {"file_bytes": file.file_bytes or None, "what_for": _where(settings, file)}
        except LayaError as error:
            fit = Fit(error=error.message)
        if fit.max_seq_len == ANY_LENGTH:
            fit = msgspec.structs.replace(fit, max_seq_len=None)
        yield row | msgspec.to_builtins(fit)


def _plan(settings: ResolvedModel, file: ModelFile, fitter: Fitter) -> Plan:
    kind, asked = kind_of(settings), settings.asked()
    try:
        return kind.plan(settings, file, asked, fitter.budget, Corrections(home_path() / DATABASE))
    except StoreError:  # a plan needs no database
        return kind.plan(settings, file, asked, fitter.budget, nothing_learned())


def _where(settings: ResolvedModel, file: ModelFile) -> str:
    remote = settings.remote
    return ", ".join(url.text for url in remote.urls) if remote is not None else str(file.path)
