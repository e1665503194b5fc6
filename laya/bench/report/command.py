"""Owns: `laya bench report`: each claim of the articles measured again here, as one report with plots.

Rows are measured one after the other by the verbs, benches and tests that a reader can run alone; a row that cannot be
says why. `--against FILE` holds the ratios to those of an earlier report.json. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.report.bench_desk import Desk
from laya.bench.report.claims import CLAIMS, Claim
from laya.bench.report.finding import Finding, NotRun
from laya.bench.report.plots import COLOURS
from laya.bench.report.render import Row, as_json, write
from laya.errors import ConfigError, nearest
from laya.memory.gpu import GpuMeter

AGAIN = 0.15  # how far a ratio of a second run may lie from the first
MINUTES = 14.0


def measured(claims: Sequence[Claim], desk: Desk, console: Console) -> list[Row]:
    """Each claim's row, told as it comes."""
    rows = []
    for claim in claims:
        start_s = time.monotonic()
        try:
            finding = claim.measure(desk)
        except NotRun as reason:
            finding = Finding(verdict="not run", here=str(reason))
        except (LookupError, StopIteration, TypeError) as error:  # one row's bench must not cost the others' minutes
            lacks = f"{type(error).__name__}: {error}"
            finding = Finding(verdict="not run", here=f"what measures it lacks the figure ({lacks})")
        rows.append(Row(claim, finding, time.monotonic() - start_s))
        verdict = f"[{COLOURS[finding.verdict]}]{finding.verdict:8}[/]"
        console.print(f" {claim.id:4} {verdict} {escape(finding.here)}", soft_wrap=True)
    return rows


def moved(rows: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Ratios that lie further than AGAIN from those of the report before: what they are to them."""
    then = {(row["id"], name): ratio for row in before for name, ratio in row["ratios"].items()}
    changes = {
        f"{row['id']} {name}": ratio / then[row["id"], name]
        for row in rows
        for name, ratio in row["ratios"].items()
        if then.get((row["id"], name))
    }
    return {name: round(change, 3) for name, change in changes.items() if abs(change - 1) > AGAIN}


def machine() -> dict[str, Any]:
    torch = importlib.util.find_spec("torch") is not None
    n_cards = len(GpuMeter().read())
    return hardware() | {
        "gpus": f"{n_cards} GPUs" if n_cards else "no GPU",
        "torch": f"torch {importlib.metadata.version('torch')}" if torch else "no torch",
        "load_average": round(os.getloadavg()[0], 1),
    }


def _chosen(text: str) -> list[Claim]:
    by_id = {claim.id: claim for claim in CLAIMS}
    wanted = [word.strip().upper() for word in text.split(",")]
    for word in wanted:
        if word not in by_id:
            close = nearest(word, by_id)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(by_id)}"
            raise argparse.ArgumentTypeError(f"there is no row '{word}'; {hint}")
    return [by_id[word] for word in wanted]


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """Of an earlier report. Raises ConfigError for what is none."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())["rows"]
        moved(rows, rows)
    except OSError as error:
        raise ConfigError(f"--against {path}: {error.strerror}.", param="against") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--against {path}: expected the report.json of an earlier report.", param="against"
        ) from None
    return rows


def _check_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: no folder can be made there: {error.strerror}.", param="out") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--out {path}: it cannot be written there.", param="out")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya bench report", description=description(__doc__))
    parser.add_argument("--out", type=Path, help="folder for report.html, report.md, report.json and images")
    parser.add_argument("--only", type=_chosen, default=list(CLAIMS), metavar="A1,B5", help="these rows")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="rows after that are not run (%(default)g)")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier report.json, made on this machine")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args(argv)
    before = _rows_of(args.against) if args.against else []
    if args.out:
        _check_folder(args.out)  # before the minutes that it takes
    console = Console(highlight=False, quiet=args.json)
    found, start_s = machine(), time.monotonic()
    rows = measured(args.only, Desk(deadline_s=args.minutes * 60), console)
    report = as_json(rows, found, time.monotonic() - start_s)
    if args.against:
        report["moved"] = moved(report["rows"], before)
    if args.out:
        for path in write(args.out, report, rows):
            console.print(f" [dim]written[/] {path}")
    print(json.dumps(report))
    return 1 if report.get("moved") else 0
