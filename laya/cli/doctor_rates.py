"""Owns: what `laya doctor` says of this machine's speed, and having it measured when it was not yet."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from laya.cli.finding import Finding, ok, warn
from laya.cli.rates import kept_rates, measure_and_keep
from laya.errors import LayaError
from laya.memory.rates import MachineRates

BUSY_SHARE = 0.5  # of the cores: with more at work than this, what was measured is too low
_SHOWN_TYPE = "Q4_K"  # what most models of the catalogue are in
_AGAIN = "laya doctor --measure"


def ensure_measured(home: Path, *, anew: bool = False) -> None:
    """Measure this machine's speed unless that was done; a fault is left for the finding to name."""
    if not anew and kept_rates(home) is not None:
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[dim]measuring what this machine computes and reads in a second, once (about 20 s)[/]")
    try:
        measure_and_keep(home)
    except LayaError as error:
        console.print(f"[yellow]{error.message}[/]")


def speed(home: Path) -> Finding:
    """What memory gives and kernels compute, as measured, and whether the machine was quiet then."""
    rates = kept_rates(home)
    if rates is None:
        return warn("speed", "the speed of this machine was not measured", _AGAIN)
    seen = f"speed {speed_text(rates)}, measured {time.strftime('%Y-%m-%d', time.localtime(rates.measured_at))}"
    if rates.load > BUSY_SHARE * rates.n_threads:
        return warn("speed", f"{seen} while the machine was busy (load {rates.load:.1f})", _AGAIN)
    return ok("speed", seen)


def speed_text(rates: MachineRates) -> str:
    """`memory 51 GB/s, 120 GFLOP/s a thread at Q4_K, 6 threads 5.2 x one`."""
    memory = rates.read_bytes_per_s(rates.reads[-1][0], rates.n_threads) / 1e9
    compute = 2e-9 * 128 / rates.weight_s(_SHOWN_TYPE, 128)
    threads = f", {rates.n_threads} threads {rates.speedup:.1f} x one" if rates.n_threads > 1 else ""
    return f"memory {memory:.0f} GB/s, {compute:.0f} GFLOP/s a thread at {_SHOWN_TYPE}{threads}"
