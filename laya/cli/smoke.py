"""Owns: `laya smoke`: every part of a running server once, as a tick list with milliseconds, and the exit code.

What is tried is in `smoke_checks`. Exit code 0 when everything passed, 1 when something did not, 4 without a server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from laya.cli.client import ServerClient
from laya.cli.output import knows_unicode, printable
from laya.cli.smoke_checks import CHECKS
from laya.cli.smoke_visit import Check, Skipped, Visit, Wrong
from laya.errors import LayaError, NoServer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
State = Literal["passed", "failed", "skipped"]

_MARKS = {"passed": ("✓", "ok", "green"), "failed": ("✗", "FAIL", "bold red"), "skipped": ("-", "-", "dim")}


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """A part, how it went, and how long it took."""

    name: str
    state: State
    ms: float
    note: str


def smoke(
    model: Annotated[str | None, typer.Argument(help="A chat model; default: a loaded one, else smollm2.")] = None,
    as_json: Json = False,
) -> None:
    """Use every part of the running server once and say what works."""
    visit = Visit(ServerClient(), model)
    console = Console(highlight=False, soft_wrap=True)
    ticks = []
    for tick in run_checks(visit):
        ticks.append(tick)
        if not as_json:
            console.print(_line(tick, console))
    counts = {state: sum(tick.state == state for tick in ticks) for state in _MARKS}
    if as_json:
        said = {"url": visit.client.url, "model": visit.model_id or None, "passed": not counts["failed"]}
        print(json.dumps(said | {"checks": msgspec.to_builtins(ticks)}))
    else:
        console.print(f" {', '.join(f'{count} {state}' for state, count in counts.items() if count)}")
    if counts["failed"]:
        raise typer.Exit(1)


def run_checks(visit: Visit, checks: Iterable[Check] = CHECKS) -> Iterator[Tick]:
    """Try one after the other. Raises NoServer when the first finds none."""
    missing: str | None = None  # the essential part that is not there
    for index, check in enumerate(checks):
        start_s = time.perf_counter()
        state: State = "skipped"
        note = f"not tried, {missing} failed"
        if missing is None:
            state, note = _try(check, visit, is_first=not index)
        if state == "failed" and check.is_essential:
            missing = check.name
        yield Tick(name=check.name, state=state, ms=round(1000 * (time.perf_counter() - start_s), 1), note=note)


def _try(check: Check, visit: Visit, *, is_first: bool) -> tuple[State, str]:
    try:
        return "passed", check.run(visit)
    except Skipped as why:
        return "skipped", str(why)
    except Wrong as what:
        return "failed", str(what)
    except NoServer as error:
        if is_first:
            raise
        return "failed", error.message
    except LayaError as error:
        return "failed", f"{error.http_status} {error.code}: {error.message}"
    except (KeyError, IndexError, TypeError, StopIteration) as error:
        return "failed", f"the answer has not the form it should have: {error!r}"


def _line(tick: Tick, console: Console) -> Text:
    mark, plain_mark, style = _MARKS[tick.state]
    shown = mark if knows_unicode(console) else f"{plain_mark:4}"
    took = f"{'':10}" if tick.state == "skipped" else f"{tick.ms:7.0f} ms"
    return Text.assemble(" ", (shown, style), f" {tick.name:<16}{took}   {printable(tick.note)}")
