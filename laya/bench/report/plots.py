"""Owns: the report's two plots, as SVG text: verdicts, and the ratios that were found. None without matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from laya.bench.report.finding import VERDICTS
from laya.svg_figure import svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from laya.bench.report.render import Row

COLOURS = {"holds": "#2a9d6f", "differs": "#d9902f", "false": "#c8483f", "not run": "#8a8f98"}


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """File name -> SVG."""
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    found = {"report-verdicts.svg": svg_of(_verdicts(rows))}
    if any(row.finding.ratios for row in rows):
        found["report-ratios.svg"] = svg_of(_ratios(rows))
    return found


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")  # legible on a dark page too


def _verdicts(rows: Sequence[Row]) -> Figure:
    figure = _figure(7, 2)
    axes = figure.subplots()
    counts = [sum(row.finding.verdict == name for row in rows) for name in VERDICTS]
    bars = axes.barh(list(VERDICTS), counts, color=[COLOURS[name] for name in VERDICTS])
    axes.bar_label(bars, padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("rows")
    axes.margins(x=0.1)
    return figure


def _ratios(rows: Sequence[Row]) -> Figure:
    named = [(f"{row.claim.id} {name}", ratio, row) for row in rows for name, ratio in row.finding.ratios.items()]
    figure = _figure(7, 0.8 + 0.24 * len(named))
    axes = figure.subplots()
    colours = [COLOURS[row.finding.verdict] for _, _, row in named]
    bars = axes.barh([name for name, _, _ in named], [ratio for _, ratio, _ in named], color=colours)
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.axvline(1, color="#444", linewidth=0.8)
    axes.set_xscale("log")
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ratio within one run (1 = equal)")
    return figure
