"""Owns: `laya plan` of a model that a program or another server serves: nothing of it can be read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from laya.cli.output import print_json, shown
from laya.cli.plan_model import Asking, Subject, subject_named
from laya.cli.plan_show import show_choices, show_devices
from laya.config import ResolvedModel, with_settings
from laya.config.places import DATABASE
from laya.errors import ConfigError, StoreError
from laya.gateway.corrections import Corrections, nothing_learned
from laya.gateway.kinds import kind_of
from laya.gateway.variants import Candidate, candidates, choose, is_choosing
from laya.memory import Budget
from laya.memory.rates import MachineRates
from laya.models import home_path
from laya.types import AskedSettings, ModelFile, Plan


class ProgramSubject(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the config that no file is."""

    settings: ResolvedModel
    asked: AskedSettings
    file: ModelFile
    variants: tuple[Candidate, ...] = ()  # where `quantization` is said: the best quality first

    def plan(self, budget: Budget, rates: MachineRates | None = None) -> Plan:
        """What its engine would be started with."""
        learned = Corrections(home_path() / DATABASE)
        try:
            return self._plan(budget, learned)
        except StoreError:  # a plan needs no database
            return self._plan(budget, nothing_learned())

    def _plan(self, budget: Budget, learned: Corrections) -> Plan:
        settings, kind = self.settings, kind_of(self.settings)

        def plan_of(file: ModelFile) -> Plan:
            return kind.plan(settings, file, self.asked, budget, learned)

        return choose(self.variants, plan_of, settings) if self.variants else plan_of(self.file)


def any_subject(name: str, asking: Asking) -> Subject | ProgramSubject:
    """What can be planned under this name. Raises ConfigError, and what `subject_named` raises."""
    settings = with_settings(asking.config, asking.settings, name).for_model(name)
    if settings.engine == "llamacpp":
        return subject_named(name, asking)
    kind, models_dir, home = kind_of(settings), Path(asking.config.models_dir), home_path()
    file = kind.find(settings, models_dir=models_dir, home=home)
    variants: list[Candidate] = []
    if is_choosing(settings):
        variants = candidates(settings, file, partial(kind.check, settings), models_dir=models_dir, home=home)
    return ProgramSubject(settings=settings, asked=settings.asked(), file=file, variants=tuple(variants))


def show_program_plan(
    subject: ProgramSubject, budget: Budget, asking: Asking, *, as_table: bool, as_json: bool
) -> bool:
    """Print it; whether it fits. Raises ConfigError for what can't be told of a program."""
    if as_table or asking.card_bytes:
        raise ConfigError(f"Laya does not run '{subject.settings.id}' itself and cannot compute its memory")
    made = subject.plan(budget)
    if as_json:
        print_json(msgspec.to_builtins(made) | {"limit": budget.limit})
        return made.fits
    console = Console(highlight=False)
    if made.devices:
        show_devices(console, made, budget)
    else:
        console.print(f" {shown(made.verdict)}")
    show_choices(console, made, asking.settings)
    remote = subject.settings.remote
    places = [str(subject.file.path)] if remote is None else [url.text for url in remote.urls]
    for place in places:
        console.print(f" [dim]{subject.file.format}[/]  {shown(place)}", soft_wrap=True)
    return made.fits
