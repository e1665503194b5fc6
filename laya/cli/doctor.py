"""Owns: `laya doctor`: what this machine gives Laya, and the command that mends what is missing. Asks no network."""

from __future__ import annotations

from typing import Annotated

import typer

from laya.memory import Machine, size_text

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def doctor(as_json: Json = False) -> None:
    """Look at this machine and say what to fix, with the command that does it."""
    facts = Machine().facts()
    print(f"CPU {facts.cpu_model}, {facts.n_cores} cores; memory {size_text(facts.memory.total_bytes)}")
