"""Owns: `laya plan --table` and `--compare`: the grid of contexts and sequences, and two configs side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from laya.cli.output import print_table, shown
from laya.cli.plan_model import Asking, Subject
from laya.cli.plan_program import any_subject
from laya.config import Config
from laya.errors import ConfigError, InsufficientMemory, LayaError
from laya.memory import Budget, size_text
from laya.memory.grid import Cell, grid
from laya.memory.limits import model_budget
from laya.models import default_model
from laya.types import Plan

_SHOWN_SETTINGS = ("max_seq_len", "max_num_seqs", "kv_cache_dtype", "kv_pool_tokens", "n_threads", "gpu_layers")


def table_fields(subject: Subject, budget: Budget) -> dict[str, Any]:
    """The grid as JSON."""
    rows = grid(subject.model, subject.asked, budget)
    budget = model_budget(subject.asked, budget)
    cells = [msgspec.to_builtins(cell) for row in rows for cell in row]
    return {
        "model": subject.model.id,
        "budget_bytes": budget.bytes,
        "limit": budget.limit,
        "cells": cells,
        "notes": list(subject.notes),
    }


def show_table(console: Console, subject: Subject, budget: Budget) -> None:
    """The grid for people: what fits is marked, and what the rule of thumb would have said stands below."""
    rows = grid(subject.model, subject.asked, budget)
    budget = model_budget(subject.asked, budget)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("sequences", justify="right")
    for cell in rows[0]:
        table.add_column(f"{cell.max_seq_len}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row[0].max_num_seqs), *map(_cell_text, row))
    kv_type = (subject.asked.kv_cache_dtype or "f16").lower()
    limit = f"{size_text(budget.bytes)} may be used ({budget.limit})"
    about = f"{limit}, {kv_type} cache; columns: tokens a sequence"
    console.print(f" [bold]{shown(subject.model.id)}[/]   {about}", soft_wrap=True)
    print_table(console, table)
    console.print(f" [green]+[/] fits   [red]-[/] does not{_weights_text(subject)}", soft_wrap=True)
    for note in subject.notes:
        console.print(f" [dim]note[/]     {shown(note)}", soft_wrap=True)


def _cell_text(cell: Cell) -> str:
    mark, style = ("+", "green") if cell.fits else ("-", "red")
    return f"[{style}]{size_text(cell.need_bytes)} {mark}[/]"


def _weights_text(subject: Subject) -> str:
    weights = subject.model.facts.weights_bytes
    return f'   weights alone {size_text(weights)}; 1.5 to 2 times them, the usual guess, is one figure for all cells'


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A model under one of two configs: its plan, or why there is none; neither where this config has no such model."""

    plan: Plan | None = None
    error: str | None = None
    exit_code: int = 0

    def value(self, name: str) -> str:
        return str(getattr(self.plan.settings, name)) if self.plan else ""


Compared = dict[str, tuple[Side, Side]]


def compared(
    configs: tuple[Config, Config],
    model: str | None,
    settings: dict[str, Any],
    budget_of: Callable[[Config], Budget],
    card_bytes: tuple[int, ...] = (),
    is_elsewhere: bool = False,
) -> Compared:
    """Each model's plan under both configs, beside the same cards. No model: all of either, or the default one."""
    every = list(dict.fromkeys([*configs[0].models, *configs[1].models])) or [default_model()]
    found: Compared = {}
    for name in [model] if model is not None else every:
        is_named = any(name in config.models for config in configs)
        old, new = (
            _side(
                Asking(config=config, settings=settings, card_bytes=card_bytes, is_elsewhere=is_elsewhere),
                name,
                budget_of(config),
                is_named=is_named,
            )
            for config in configs
        )
        found[name] = (old, new)
    return found


def _side(asking: Asking, name: str, budget: Budget, *, is_named: bool) -> Side:
    """is_named: one of the configs has the model, so that to the other it may be unknown."""
    try:
        made = any_subject(name, asking).plan(budget)
    except LayaError as error:
        if is_named and name not in asking.config.models:
            return Side()
        return Side(error=error.message, exit_code=error.exit_code)
    return Side(plan=made, exit_code=0 if made.fits else InsufficientMemory.exit_code)


def compare_code(found: Compared) -> int:
    """The exit code: that of a side that could not be planned, else whether all models of the new config fit."""
    failed = [side.exit_code for sides in found.values() for side in sides if side.error]
    return min(failed, key=lambda code: code != ConfigError.exit_code, default=0) or max(
        (new.exit_code for _, new in found.values()), default=0
    )


def compare_fields(found: Compared, files: tuple[Path, Path]) -> dict[str, Any]:
    """Both plans of each model as JSON."""
    models = {name: [msgspec.to_builtins(side) for side in sides] for name, sides in found.items()}
    return {"configs": [str(file) for file in files], "models": models}


def show_compare(console: Console, found: Compared, files: tuple[Path, Path]) -> None:
    """What differs and what each comes to, a block for each model."""
    for name, sides in found.items():
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column(shown(name))
        for file in files:
            table.add_column(shown(file.name), justify="right", no_wrap=True)
        table.add_column("")
        for row in _rows(sides):
            table.add_row(*row)
        print_table(console, table)
        for side, file in zip(sides, files, strict=True):
            if side.error:
                console.print(f" [red]{shown(file.name)}[/]: {shown(side.error)}", soft_wrap=True)


def _rows(sides: tuple[Side, Side]) -> list[tuple[str, ...]]:
    old, new = sides
    rows: list[tuple[str, ...]] = []
    for name in _SHOWN_SETTINGS:
        values = tuple(side.value(name) for side in sides)
        if any(value not in ("", "0") for value in values):
            rows.append((name, *values, "" if values[0] == values[1] else "changed"))
    for name in dict.fromkeys(term for side in sides for term in _terms(side)):
        amounts = [_terms(side).get(name, 0) for side in sides]
        rows.append((name, *(size_text(n_bytes) if n_bytes else "" for n_bytes in amounts), ""))
    if old.plan and new.plan:
        rows.append(("total", *(_total_text(side) for side in sides), _ratio_text(old.plan, new.plan)))
    else:
        rows.append(("total", *(_total_text(side) for side in sides), ""))
    return rows


def _terms(side: Side) -> dict[str, int]:
    terms: dict[str, int] = {}
    for device in side.plan.devices if side.plan else ():
        for name, n_bytes in device.terms.items():
            terms[name] = terms.get(name, 0) + n_bytes
    return terms


def _total_text(side: Side) -> str:
    if side.plan is None:
        return "no plan" if side.error else "not in it"
    return f"{size_text(side.plan.need_bytes)} {'fits' if side.plan.fits else 'DOES NOT FIT'}"


def _ratio_text(old: Plan, new: Plan) -> str:
    if old.need_bytes == new.need_bytes:
        return "the same"
    ratio = max(old.need_bytes, new.need_bytes) / min(old.need_bytes, new.need_bytes)
    return f"{ratio:.1f} x {'less' if new.need_bytes < old.need_bytes else 'more'}"
