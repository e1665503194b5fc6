"""Owns: `laya bench NAME`: the door to the benches; their own options are passed on."""

from __future__ import annotations

import importlib

import typer

from laya.cli.lab import check_torch
from laya.errors import ConfigError, nearest

BENCHES = {
    "concurrency": "what an engine gives to 1 to 32 sessions, through Laya and asked directly",
    "expert-router": "what choosing the experts of a token costs, kernel by kernel (needs laya-llm[torch])",
    "fuzz": "malformed requests by the ten thousand, and whether the gateway minds",
    "gateway": "what passing through Laya adds, against a stub engine asked directly",
    "latency": "where the time of a request and of a token goes, through Laya and asked directly",
    "memory": "planned bytes against the measured peak of real engines",
    "page": "how long the page takes in a real browser, until the memory is shown",
    "prefix": "prompt tokens computed again in conversations over several engines, by policy",
    "rates": "what this machine computes and reads in a second, by the engine's own kernels",
    "report": "the figures of the two articles, measured again here, as one page with plots",
    "router": "what one routing decision costs",
    "soak": "everything at once for a long time, and whether anything is left of it",
}
_HELP = (
    "Measure: "
    + "; ".join(f"{name} ({text})" for name, text in BENCHES.items())
    + ". Options are the bench's own: `laya bench NAME --help` shows them."
)


def bench(context: typer.Context, name: str = typer.Argument(help=", ".join(BENCHES) + ".")) -> None:
    """Run a bench; the last line it prints is JSON."""
    if name in ("-h", "--help"):
        print(context.get_help())
        return
    if name not in BENCHES:
        close = nearest(name, BENCHES)
        hint = f" Did you mean '{close}'?" if close else ""
        raise ConfigError(f"There is no bench '{name}'.{hint} There are: {', '.join(BENCHES)}.")
    if name == "expert-router":
        check_torch("bench expert-router", ("torch",))
    code = importlib.import_module(f"laya.bench.{name.replace('-', '_')}").main(list(context.args))
    raise typer.Exit(code or 0)


bench.__doc__ = _HELP
