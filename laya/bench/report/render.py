"""Owns: the rows as Markdown and as one HTML file, and putting files there whole. Knows nothing of how to measure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from laya.bench.report.claims import Claim
from laya.bench.report.finding import VERDICTS, Finding
from laya.bench.report.plots import plots

TITLE = "The two articles, measured again"
_HEAD = ("", "claim", "article", "here", "layer", "load", "verdict")
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --page: #fff; --ink: #1c2126 }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e4e7ea } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
  background: var(--page); color: var(--ink) }
table { border-collapse: collapse; width: 100% } th, td { border-bottom: 1px solid var(--line); padding: .4rem .5rem;
  text-align: left; vertical-align: top } code { font-size: .85em; overflow-wrap: anywhere } svg { max-width: 100%;
  height: auto; background: #fff; border-radius: 6px } .scroll { overflow-x: auto } .spread { opacity: .8 }
"""


class Row(NamedTuple):
    claim: Claim
    finding: Finding
    seconds: float


def as_json(rows: Sequence[Row], machine: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The line that ends the bench's output."""
    counts = {name: sum(row.finding.verdict == name for row in rows) for name in VERDICTS}
    return {
        "bench": "report",
        "layer": "each row's own",
        "load": "each row's own",
        "verdicts": counts,
        "seconds": round(seconds, 1),
        "rows": [
            {
                "id": row.claim.id, "says": row.claim.says, "article": row.claim.article, "layer": row.claim.layer,
                "verdict": row.finding.verdict, "here": row.finding.here, "load": row.finding.load,
                "ratios": {name: float(f"{ratio:.4g}") for name, ratio in row.finding.ratios.items()},
                "spread": row.finding.spread, "command": row.finding.command, "seconds": round(row.seconds, 1),
            }
            for row in rows
        ],
        "hardware": machine,
    }  # fmt: skip


def machine_text(machine: dict[str, Any]) -> str:
    core = "native core" if machine["native_core"] else "no native core"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['gpus']}, Linux "
        f"{machine['kernel']}; Python {machine['python']}, Laya {machine['laya']}, {core}; {machine['torch']}; other "
        f"programs: load {machine['load_average']} at the start"
    )


def markdown(report: dict[str, Any], images: Sequence[str]) -> str:
    lines = [
        f"# {TITLE}",
        "",
        "`laya bench report` made this page; it asks of every figure which layer, what load, what hardware.",
        "",
    ]
    lines += [f"**Hardware**: {machine_text(report['hardware'])}.", ""]
    lines += [f"**Verdicts**: {_counted(report)}. {_meanings()}", ""]
    lines += [f"![{Path(name).stem.replace('-', ' ')}](images/{name})\n" for name in images]
    lines += [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    for row in report["rows"]:
        cells = (row["id"], row["says"], row["article"], _here(row), row["layer"], row["load"], f"**{row['verdict']}**")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines += ["", "## By which command", "", "| | command |", "|---|---|"]
    lines += [f"| {row['id']} | `{row['command']}` |" for row in report["rows"] if row["command"]]
    return "\n".join(lines) + "\n"


def html(report: dict[str, Any], svgs: Sequence[str]) -> str:
    """One file that needs nothing else."""
    head = "".join(f"<th>{name}</th>" for name in (*_HEAD, "command"))
    body = "".join(
        f"<tr><td>{row['id']}</td><td>{escape(row['says'])}</td><td>{escape(row['article'])}</td>"
        f"<td>{escape(row['here'])}<div class=spread>{escape(row['spread'])}</div></td><td>{escape(row['layer'])}</td>"
        f"<td>{escape(row['load'])}</td><td><b>{row['verdict']}</b></td><td><code>{escape(row['command'])}</code></td></tr>"
        for row in report["rows"]
    )
    return (
        f'<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{TITLE}</title><style>{_STYLE}</style><h1>{TITLE}</h1><p>{escape(machine_text(report['hardware']))}</p>"
        f"<p>{_counted(report)}. {escape(_meanings())}</p>{''.join(svgs)}"
        f"<div class=scroll><table><tr>{head}</tr>{body}</table></div></html>\n"
    )


def write(folder: Path, report: dict[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Everything is made beside its place, then put there: what is there is whole, the JSON last."""
    drawn = plots(rows)
    texts = {f"images/{name}": text for name, text in drawn.items()}
    texts["report.html"] = html(report, list(drawn.values()))
    texts["report.md"] = markdown(report, list(drawn))
    texts["report.json"] = msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".report-", dir=folder) as staged:
        for name, text in texts.items():
            (Path(staged) / Path(name).name).write_text(text)
        for name in texts:
            (folder / name).parent.mkdir(exist_ok=True)
            os.replace(Path(staged) / Path(name).name, folder / name)
    return [folder / name for name in texts]


def _counted(report: dict[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in report["verdicts"].items())


def _meanings() -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in VERDICTS.items()) + "."


def _here(row: dict[str, Any]) -> str:
    return f"{row['here']} ({row['spread']})" if row["spread"] else str(row["here"])
