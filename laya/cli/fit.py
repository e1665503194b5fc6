"""Owns: the answer to "does it fit this machine, and at what context", for models here and for those not here yet.

The meeting place of the models room, which knows files and shapes, and the memory room, which plans. Offline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from laya.cli.gpus import with_gpus
from laya.cli.output import shown
from laya.cli.rates import kept_rates
from laya.config import Config, ResolvedModel
from laya.config.places import DATABASE
from laya.errors import LayaError, StoreError
from laya.gateway.catalogued import plan_entry
from laya.gateway.corrections import Corrections
from laya.memory import Budget, Correction, Machine, plan_file
from laya.models import CatalogueEntry, home_path, size_text
from laya.types import AskedSettings, ModelFile, Plan, Task


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict. Without a plan `error` says why there is none."""

    fits: bool | None = None
    max_num_seqs: int | None = None
    max_seq_len: int | None = None  # tokens per sequence
    need_bytes: int | None = None
    need_is: Literal["exact", "at most", "at least"] = "exact"
    budget_bytes: int | None = None
    suggestions: tuple[str, ...] = ()
    error: str | None = None


class Fitter:
    """Plans models as `laya serve` with this configuration would, against what is free now."""

    def __init__(self, config: Config, budget: Budget | None = None) -> None:
        self.config = config
        self.budget = budget or Machine().budget(config.memory.budget)
        self.rates = kept_rates()

    def file(self, model: ModelFile) -> Fit:
        """The verdict on a model on this disk, from its header."""
        if model.format != "gguf":
            return Fit(error="a Hugging Face folder; the built-in engine reads GGUF")
        try:
            asked, learned = self._asked(model.id, model.task), learned_of(self.config.for_model(model.id), model.path)
            budget = with_gpus(self.budget, self.config, self.config.for_model(model.id).engine_path)
            plan = plan_file(model.path, asked, budget, model_id=model.id, rates=self.rates, correction=learned)
        except LayaError as error:
            return Fit(error=error.message)
        return fit_of(plan)

    def entry(self, entry: CatalogueEntry) -> Fit:
        """The verdict on a model of the catalogue, from its shape: never too kind."""
        asked = self._asked(entry.id, entry.task)
        try:
            budget = with_gpus(self.budget, self.config, self.config.for_model(entry.id).engine_path)
            plan = plan_entry(entry, asked, budget, self.rates)
        except LayaError as error:
            return Fit(error=error.message)
        return msgspec.structs.replace(fit_of(plan), need_is="at most")

    def size(self, file_bytes: int) -> Fit:
        """The verdict on a file of which only the size is known: whether its weights alone would fit."""
        return Fit(
            fits=file_bytes <= self.budget.bytes,
            need_bytes=file_bytes,
            need_is="at least",
            budget_bytes=self.budget.bytes,
        )

    def _asked(self, model_id: str, task: Task | None) -> AskedSettings:
        settings = self.config.for_model(model_id)
        asked = settings.asked()
        return asked if task is None or "task" in settings.fixed else msgspec.structs.replace(asked, task=task)


def learned_of(settings: ResolvedModel, path: Path) -> Correction:
    """What engines of this build and this file's architecture were seen to take beyond their plans."""
    try:
        return Corrections(home_path() / DATABASE).of(settings, path)
    except StoreError:  # a plan needs no database
        return Correction()


def fit_of(plan: Plan) -> Fit:
    return Fit(
        fits=plan.fits,
        max_num_seqs=plan.settings.max_num_seqs,
        max_seq_len=plan.settings.max_seq_len,
        need_bytes=plan.need_bytes,
        need_is="exact" if plan.exact else "at most",
        budget_bytes=plan.budget_bytes,
        suggestions=tuple(suggestion.flags for suggestion in plan.suggestions),
    )


def fit_sentence(fit: Fit) -> str:
    """The verdict in words, with rich's colours."""
    if fit.fits is None:
        return f"not judged: {shown(fit.error or '')}"
    bound = "" if fit.need_is == "exact" else f"{fit.need_is} "
    needs = f"needs {bound}{size_text(fit.need_bytes or 0)} of {size_text(fit.budget_bytes or 0)}"
    if not fit.fits:
        return f"{needs}: [bold red]does not fit[/]"
    context = f", {fit.max_num_seqs} x {fit.max_seq_len} tokens" if fit.max_seq_len else ""
    return f"{needs}: [green]fits[/]{context}"
