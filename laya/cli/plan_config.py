"""Owns: `laya plan` without a model: every model of the config, which of them coexist, and what makes way for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from laya.cli.output import print_table, shown
from laya.cli.plan_model import Asking, Subject
from laya.cli.plan_program import ProgramSubject, any_subject
from laya.errors import ConfigError, InsufficientMemory, LayaError
from laya.memory import Budget, size_text
from laya.memory.rates import MachineRates
from laya.memory.together import MOST_MODELS, Meeting, coexisting, meetings
from laya.models import available
from laya.types import Plan

_WORDS = {"beside": "beside", "unloads": "unloads", "refused": "refused beside"}


class WholePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plans of all models, alone, and what follows from them."""

    plans: dict[str, Plan]
    errors: dict[str, str]  # model -> why it has no plan
    error_codes: list[int]  # the exit code of each
    pinned: list[str]
    replicas: dict[str, int]  # engines of each model; its plan is that of one of them
    together: list[tuple[str, ...]]
    meetings: list[Meeting]

    @property
    def fits(self) -> bool:
        """Whether each model fits alone, with one engine at least."""
        return not self.errors and all(plan.fits for plan in self.plans.values())

    def need_bytes(self, name: str) -> int:
        """Of all engines of a model together."""
        return self.plans[name].need_bytes * self.replicas[name]

    @property
    def exit_code(self) -> int:
        """2 where the config names what is not there, 1 where an address did not answer, 3 where one does not fit."""
        if self.error_codes:
            return ConfigError.exit_code if ConfigError.exit_code in self.error_codes else self.error_codes[0]
        return 0 if self.fits else InsufficientMemory.exit_code


def whole_plan(asking: Asking, budget: Budget, rates: MachineRates | None) -> WholePlan:
    """Every model under `models:`, or where there is none every model on this disk."""
    config = asking.config
    names = list(config.models) or [model.id for model in available(models_dir=Path(config.models_dir))]
    subjects: dict[str, Subject | ProgramSubject] = {}
    plans: dict[str, Plan] = {}
    errors: dict[str, LayaError] = {}
    for name in names:
        try:
            subjects[name] = any_subject(name, asking)
            plans[name] = _plan_of_one(subjects[name], config.for_model(name).replicas, budget, rates)
        except LayaError as error:
            errors[name] = error

    def plan_in(name: str, n_bytes: int) -> Plan:
        return subjects[name].plan(msgspec.structs.replace(budget, bytes=n_bytes), rates)

    pinned = [name for name in plans if config.for_model(name).pinned]
    replicas = {name: config.for_model(name).replicas for name in plans}
    needs = {name: plan.need_bytes * replicas[name] for name, plan in plans.items() if plan.fits}
    return WholePlan(
        replicas=replicas,
        plans=plans,
        errors={name: error.message for name, error in errors.items()},
        error_codes=[error.exit_code for error in errors.values()],
        pinned=pinned,
        together=coexisting(needs, budget.bytes),
        meetings=meetings(plans, pinned, budget.bytes, plan_in),
    )


def _plan_of_one(subject: Subject | ProgramSubject, n_engines: int, budget: Budget, rates: MachineRates | None) -> Plan:
    """Of the first of so many engines: in its share of the memory where it fits there, else in all of it."""
    share = msgspec.structs.replace(budget, bytes=budget.bytes // n_engines)
    plan = subject.plan(share, rates)
    return plan if plan.fits or n_engines == 1 else subject.plan(budget, rates)


def whole_fields(whole: WholePlan, budget: Budget) -> dict[str, Any]:
    """As JSON."""
    fields: dict[str, Any] = msgspec.to_builtins(whole)
    del fields["error_codes"]
    return {"fits": whole.fits, "budget_bytes": budget.bytes, "limit": budget.limit} | fields


def show_whole(console: Console, whole: WholePlan, budget: Budget, notes: tuple[str, ...] = ()) -> None:
    console.print(f" {size_text(budget.bytes)} may be used ({shown(budget.limit)})", soft_wrap=True)
    for note in notes:
        console.print(f" [dim]note[/]  {shown(note)}", soft_wrap=True)
    if not whole.plans and not whole.errors:
        console.print(
            " No model in the config and none on this disk: `laya plan smollm2` plans one that can be pulled."
        )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("MODEL", "NEEDS", "FITS", "SETTINGS", ""):
        table.add_column(title, justify="right" if title == "NEEDS" else "left", no_wrap=True)
    for name, plan in whole.plans.items():
        fits = "[green]yes[/]" if plan.fits else "[bold red]no[/]"
        pinned = "pinned" if name in whole.pinned else ""
        each = f"{whole.replicas[name]} x " if whole.replicas[name] > 1 else ""
        table.add_row(shown(name), each + size_text(plan.need_bytes), fits, plan.settings.size_words, pinned)
    print_table(console, table)
    for name, error in whole.errors.items():
        console.print(f" [red]{shown(name)}[/]: {shown(error)}", soft_wrap=True)
    _show_together(console, whole)
    if whole.meetings:
        console.print(" [dim]where one other model is loaded:[/]")
    for name in whole.plans:
        _show_meetings(console, name, whole)


def _show_together(console: Console, whole: WholePlan) -> None:
    sets = [chosen for chosen in whole.together if len(chosen) > 1]
    for chosen in sets:
        total = sum(map(whole.need_bytes, chosen))
        console.print(f" together  {' + '.join(map(shown, chosen))}   {size_text(total)}", soft_wrap=True)
    if not sets and len(whole.plans) > 1:
        console.print(" together  no two of them with these settings")
    if len(whole.plans) > MOST_MODELS:
        console.print(f" [dim](sets of the {MOST_MODELS} smallest models)[/]")


def _show_meetings(console: Console, name: str, whole: WholePlan) -> None:
    """One line for each model: what asking for it does where one other model is loaded."""
    parts: dict[str, list[str]] = {}
    for meeting in whole.meetings:
        if meeting.asked != name:
            continue
        if meeting.outcome == "smaller":
            smaller = f"{meeting.max_num_seqs} x {meeting.max_seq_len} {meeting.kv_cache_dtype}"
            parts.setdefault(f"at {smaller} beside", []).append(meeting.loaded)
        else:
            parts.setdefault(_WORDS[meeting.outcome], []).append(meeting.loaded)
    if parts:
        words = "; ".join(f"{verb} {' or '.join(map(shown, names))}" for verb, names in parts.items())
        console.print(f" [dim]asked for[/] {shown(name)}  [dim]->[/]  {words}", soft_wrap=True)
