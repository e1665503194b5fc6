"""Owns: what `laya eval` tells: one row a variant, and the table of them on a console. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from laya.cli.output import print_table, printable, shown
from laya.memory import size_text
from laya.quantization.answers import Accuracy, Against
from laya.quantization.inspection import Flag
from laya.quantization.serving import Memory, Speed, Spread
from laya.quantization.statistics import Interval
from laya.quantization.verdict import Likelihood

QUALITY = "quality = perplexity of the reference / perplexity of the variant, on the same tokens"
INTERVALS = "intervals are of 95 %: windows of the text drawn again (bootstrap), Wilson's for tasks"
NO_INTERVALS = "no intervals but those of tasks (Wilson's, 95 %): they are drawn of windows, and the text gave one"
CHOICES = "choices by likelihood a byte, other tasks as answers through the gateway"


class Variant(msgspec.Struct, kw_only=True):
    """A row of the table. What was not measured is None."""

    name: str
    path: Path
    kv_cache_dtype: str
    file_bytes: int
    bits: float  # of a weight, on average over matrices
    types: dict[str, int]  # tensor type -> bytes
    memory: Memory | None = None
    speed: Speed | None = None
    likelihood: Likelihood | None = None
    tasks: Accuracy | None = None
    quality_percent: Interval | None = None
    flags: list[Flag] = []

    @property
    def is_broken(self) -> bool:
        return any(flag.is_broken for flag in self.flags)


class Report(msgspec.Struct, kw_only=True):
    """All of an evaluation."""

    model: str
    reference: str | None
    reference_note: str
    text: str
    task_set: str | None
    n_threads: int
    variants: list[Variant]
    against: Against | None = None
    hardware: dict[str, Any] = {}
    definitions: tuple[str, ...] = (QUALITY, INTERVALS, CHOICES)
    seconds: float = 0.0

    @property
    def flags(self) -> dict[Flag, list[str]]:
        """Each with the variants that have it."""
        told: dict[Flag, list[str]] = {}
        for variant in self.variants:
            for flag in variant.flags:
                told.setdefault(flag, []).append(variant.name)
        return told


def definitions(likelihoods: Iterable[Likelihood]) -> tuple[str, ...]:
    """What the words of a table mean."""
    return (QUALITY, NO_INTERVALS if any(each.n_windows == 1 for each in likelihoods) else INTERVALS, CHOICES)


def scored_words(n_tokens: int, n_windows: int, n_asked: int) -> str:
    """How much of a text was scored, and why that is not what was asked for."""
    told = f"{n_tokens} tokens scored in {n_windows} window{'s' if n_windows > 1 else ''}"
    if n_tokens > n_asked:
        return f"{told} ({n_asked} were asked for; windows are whole)"
    return f"{told} ({n_asked} were asked for; the text has no more whole windows)" if n_tokens < n_asked else told


def show(report: Report, console: Console) -> None:
    """The tables, what is flagged, and what the words mean."""
    costs, quality = cost_rows(report.variants), quality_rows(report.variants)
    for title, rows in (("what it costs", costs), ("what is left", quality)):
        if rows[1:]:
            print_table(console, _table(f"{report.model}: {title}", rows, report.variants))
    console.print(f"reference: {shown(report.reference_note)}", soft_wrap=True)
    if report.text:
        console.print(f"text: {shown(report.text)}", soft_wrap=True)
    for words in report.definitions:
        console.print(words, soft_wrap=True, style="dim")
    for flag, names in report.flags.items():
        mark, style = ("BROKEN", "bold red") if flag.is_broken else ("note", "yellow")
        console.print(f"[{style}]{mark}[/]  {shown(', '.join(names))}: {shown(flag.what)}", soft_wrap=True)
    if report.against is not None:
        _show_against(report.against, console)


def cost_rows(variants: Sequence[Variant]) -> list[list[str]]:
    """Words of a table, its head first; only columns that any row has."""
    columns: list[tuple[str, list[str]]] = [
        ("variant", [each.name for each in variants]),
        ("file", [size_text(each.file_bytes) for each in variants]),
        ("bits", [f"{each.bits:.2f}" for each in variants]),
        ("load", [f"{each.memory.load_s:.2f} s" if each.memory else "" for each in variants]),
        ("KV cache", [size_text(each.memory.kv_bytes) if each.memory else "" for each in variants]),
        ("planned", [size_text(each.memory.planned_bytes) if each.memory else "" for each in variants]),
        ("peak", [size_text(each.memory.peak_bytes) if each.memory else "" for each in variants]),
        ("planned/peak", [f"{each.memory.ratio:.3f}" if each.memory else "" for each in variants]),
        ("prefill tok/s", [_spread(each.speed.prefill_tokens_per_s) if each.speed else "" for each in variants]),
        ("decode tok/s", [_spread(each.speed.decode_tokens_per_s) if each.speed else "" for each in variants]),
    ]
    return _rows(columns)


def quality_rows(variants: Sequence[Variant]) -> list[list[str]]:
    found = [each.likelihood for each in variants]
    columns: list[tuple[str, list[str]]] = [
        ("variant", [each.name for each in variants]),
        ("perplexity", [_interval(each.perplexity, ".2f") if each else "" for each in found]),
        ("ratio", [_interval(each.ppl_ratio if each else None, ".4f") for each in found]),
        ("mean KL", [_interval(each.mean_kl if each else None, ".2g") for each in found]),
        ("99 %", [_number(each.kl_p99 if each else None, ".3g") for each in found]),
        ("max", [_number(each.max_kl if each else None, ".3g") for each in found]),
        ("same top", [_interval(each.same_top_share if each else None, ".1%") for each in found]),
        ("RMS Δp", [_number(each.rms_p_change if each else None, ".2%") for each in found]),
        ("same experts", [_number(each.same_experts_share if each else None, ".2%") for each in found]),
        ("tasks", [_accuracy(each.tasks) for each in variants]),
        ("quality", [_interval(each.quality_percent, ".1f", " %") for each in variants]),
    ]
    return _rows(columns)


def _rows(columns: list[tuple[str, list[str]]]) -> list[list[str]]:
    """A table of those columns that say anything, the head first; no row where only names would be left."""
    kept = [(name, cells) for name, cells in columns if any(cells)]
    if len(kept) < 2:
        return [[name for name, _ in kept]]
    return [[name for name, _ in kept], *(list(cells) for cells in zip(*(cells for _, cells in kept), strict=True))]


def _table(title: str, rows: list[list[str]], variants: Sequence[Variant]) -> Table:
    table = Table(title=title, box=None, header_style="dim", title_justify="left")
    for at, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if at else "left")
    for row, variant in zip(rows[1:], variants, strict=True):
        first = f"{printable(row[0])} !" if variant.is_broken else printable(row[0])
        table.add_row(shown(first), *row[1:], style="red" if variant.is_broken else None)
    return table


def _show_against(found: Against, console: Console) -> None:
    ours, theirs = shown(found.ours), shown(found.theirs)
    same, verdict = found.same_answers_share, found.same_verdict_share
    console.print(
        f"{ours} against {theirs}, {found.n} tasks: right {found.our_accuracy.n_right} and "
        f"{found.their_accuracy.n_right}; only {ours} {found.n_wins}, only {theirs} {found.n_losses} "
        f"(sign test p = {found.p_value:.2g}); the same answer {_interval(same, '.0%')}, both right or both wrong "
        f"{_interval(verdict, '.0%')}",
        soft_wrap=True,
    )
    for each in found.examples:
        console.print(f"  {each.id}: {shown(each.prompt)}", soft_wrap=True)
        for name, text, is_right in (
            (ours, each.ours, each.is_ours_right),
            (theirs, each.theirs, each.is_theirs_right),
        ):
            console.print(f"    {'right' if is_right else 'wrong'}  {name}: {shown(text[:200])}", soft_wrap=True)
    console.print(found.note, style="dim", soft_wrap=True)


def _spread(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.low:.1f}-{spread.high:.1f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(interval: Interval | None, form: str, unit: str = "") -> str:
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{interval.value:{form}}{unit}"
    return f"{interval.value:{form}}{unit} ({interval.low:{form}}-{interval.high:{form}})"


def _accuracy(found: Accuracy | None) -> str:
    if found is None:
        return ""
    return f"{found.n_right}/{found.n} ({found.share.least:.0%}-{found.share.most:.0%})"
