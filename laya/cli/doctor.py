"""Owns: `laya doctor`: everything that is looked at, in order, how it is shown, and the exit code.

The probes are in `doctor_machine`, `_memory`, `_power`, `_gpu` and `_setup`. Nothing is changed, no network is asked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from laya.cli import doctor_machine, doctor_memory, doctor_power, doctor_setup
from laya.cli.bundle import write_bundle
from laya.cli.doctor_gpu import ask_nvidia_smi, gpu, gpu_strain
from laya.cli.doctor_rates import ensure_measured, speed
from laya.cli.finding import Finding
from laya.cli.output import printable
from laya.config import data_dir

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Bundle = Annotated[bool, typer.Option("--bundle", help="Pack what a helper needs into one file, without secrets.")]
Measure = Annotated[bool, typer.Option("--measure", help="Measure this machine's speed again, when it is quiet.")]
Output = Annotated[Path | None, typer.Option("--output", help="The file of --bundle.")]

_STYLES = {"ok": "green", "warn": "yellow", "FIX": "bold red"}
_SEEN_CHARS = 56  # a shorter line has its command beside it, a longer one below


def doctor(as_json: Json = False, bundle: Bundle = False, output: Output = None, measure: Measure = False) -> None:
    """Look at this machine and say what to fix, with the command that does it. Exit code 1 when something is."""
    if not bundle and output is None:
        ensure_measured(data_dir(os.environ).absolute(), anew=measure)
    findings = examine(Path("/"), os.environ)
    if bundle or output is not None:
        _write_bundle(output or Path(time.strftime("laya-bundle-%Y%m%d-%H%M%S.tar.gz")), findings, as_json)
        return
    if as_json:
        print(json.dumps(msgspec.to_builtins(findings)))
    else:
        _print(findings)
    if any(finding.level == "FIX" for finding in findings):
        raise typer.Exit(1)


def _write_bundle(path: Path, findings: list[Finding], as_json: bool) -> None:
    names = write_bundle(path, findings, os.environ)
    if as_json:
        print(json.dumps({"bundle": str(path), "files": names}))
        return
    print(f"{printable(str(path))}: {', '.join(map(printable, names))}")
    print("Secrets, prompts and your paths are taken out. Look through it before you send it: tar xzf FILE")


def examine(root: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Every finding about the machine whose file system begins at `root`, and about Laya's set-up here."""
    config_finding, config = doctor_setup.config(environ)
    home = data_dir(environ).absolute()
    cards, build = ask_nvidia_smi(), doctor_setup.build(home)
    return [
        doctor_machine.cpu(root, config),
        doctor_memory.memory(root, config),
        doctor_memory.ceiling(root, config),
        doctor_memory.swap(root),
        doctor_memory.zram(root),
        doctor_memory.pressure(root),
        doctor_memory.oom_daemon(root),
        doctor_power.power(root),
        doctor_power.temperature(root),
        speed(home),
        doctor_machine.disk(home),
        gpu(root, config, lambda: cards, home=home, build=build),
        *gpu_strain(config, lambda: cards, build=build),
        doctor_setup.python(),
        doctor_setup.engine(config, build),
        doctor_setup.router(),
        config_finding,
        doctor_setup.port(config, environ.get("LAYA_URL")),
        doctor_setup.models(config, home),
        *doctor_setup.found(home),
        doctor_setup.hub(environ),
    ]


def summary(findings: list[Finding]) -> str:
    """`1 to fix, 3 to consider.`"""
    n_fix = sum(finding.level == "FIX" for finding in findings)
    n_warn = sum(finding.level == "warn" for finding in findings)
    return f"{n_fix} to fix, {n_warn} to consider."


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        seen = printable(finding.seen)
        line = Text.assemble(" ", (f"{finding.level:5}", _STYLES[finding.level]), " ", seen)
        if finding.fix is not None:
            is_short = len(seen) <= _SEEN_CHARS
            line.append(" " * (_SEEN_CHARS + 2 - len(seen)) if is_short else "\n" + " " * 11)
            line.append(printable(finding.fix), style="cyan")
        console.print(line)
    console.print(f" {summary(findings)}")
