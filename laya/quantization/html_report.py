"""Owns: an evaluation as one HTML file that needs nothing else: the tables, and quality against memory and speed.

The plots are SVG inside it. Written under another name first, so that there is a whole file or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from laya.quantization.answers import Against
from laya.quantization.report import Report, cost_rows, quality_rows
from laya.quantization.statistics import Interval
from laya.svg_figure import svg_of

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#1c2330;background:#fff}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}
th,td{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #d8dde6;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{font-weight:600}
.broken{color:#a80f1f}.note{color:#7a5200}small{color:#5b6575}svg{max-width:100%;height:auto}
"""


def html_of(report: Report) -> str:
    broken = {variant.name for variant in report.variants if variant.is_broken}
    parts = [f"<h1>{escape(report.model)}: what each variant costs, and what is left</h1>"]
    parts += [_table(rows, broken) for rows in (cost_rows(report.variants), quality_rows(report.variants)) if rows[1:]]
    flags = [
        f'<li class="{"broken" if flag.is_broken else "note"}">{escape(", ".join(names))}: {escape(flag.what)}</li>'
        for flag, names in report.flags.items()
    ]
    parts += ["<h2>Flags</h2><ul>", *flags, "</ul>"] if flags else []
    parts += [f"<figure>{plot}</figure>" for plot in _plots(report)]
    parts += [_against(report.against)] if report.against else []
    hardware = ", ".join(f"{name} {value}" for name, value in report.hardware.items())
    words = [f"reference: {report.reference_note}", f"text: {report.text}" if report.text else "", *report.definitions]
    words += [f"tasks: {report.task_set}" if report.task_set else "", f"{report.n_threads} threads; {hardware}"]
    parts += [f"<p><small>{escape(each)}</small></p>" for each in words if each]
    head = f'<meta charset="utf-8"><title>{escape(report.model)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _table(rows: Sequence[Sequence[str]], broken: set[str]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        f"<tr{' class=broken' if row[0] in broken else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows[1:]
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _plots(report: Report) -> list[str]:
    """Quality against what it costs; a plot needs two variants that have both figures."""
    whole = Interval(100.0, 100.0, 100.0)
    quality_of = {
        each.name: whole if each.name == report.reference else each.quality_percent for each in report.variants
    }
    points_of = [(each, quality) for each in report.variants if (quality := quality_of[each.name]) is not None]
    memory = [(each.memory.peak_bytes / 2**20, quality, each.name) for each, quality in points_of if each.memory]
    files = [(each.file_bytes / 2**20, quality, each.name) for each, quality in points_of]
    speed = [(each.speed.decode_tokens_per_s.median, quality, each.name) for each, quality in points_of if each.speed]
    plots = []
    for label, points in (
        ("peak memory, MiB" if memory else "file, MiB", memory or files),
        ("decode speed, tokens/s", speed),
    ):
        if len(points) < 2:
            continue
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for x, quality, name in points:
            low, high = max(0.0, quality.value - quality.least), max(0.0, quality.most - quality.value)
            axes.errorbar([x], [quality.value], yerr=[[low], [high]], fmt="o", capsize=3)
            axes.annotate(
                name, (x, quality.value), textcoords="offset points", xytext=(6, -14 if " kv " in name else 6)
            )
        axes.set(
            xlabel=label, ylabel=f"quality, % of {report.reference}", title=f"Quality against {label.split(',')[0]}"
        )
        axes.grid(alpha=0.3)
        axes.margins(x=0.15, y=0.15)  # for the names
        plots.append(svg_of(figure))
    return plots


def _against(found: Against) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.prompt)}</td><td>{escape(each.ours)}</td><td>{escape(each.theirs)}</td></tr>"
        for each in found.examples
    )
    said = (
        f"{found.n} tasks: right {found.our_accuracy.n_right} and {found.their_accuracy.n_right}; won {found.n_wins}, "
        f"lost {found.n_losses} (sign test p = {found.p_value:.2g}). {found.note}."
    )
    head = f"<tr><th>task</th><th>{escape(found.ours)}</th><th>{escape(found.theirs)}</th></tr>"
    title = f"<h2>{escape(found.ours)} against {escape(found.theirs)}</h2>"
    return f"{title}<p>{escape(said)}</p><table>{head}{rows}</table>"
