"""Owns: the rates of this machine: reading what was kept, and having them measured by a child, once.

The meeting place of the bench that times kernels, the store that keeps and the memory room that predicts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from laya.config.places import DATABASE
from laya.errors import EngineFailed
from laya.gateway.rates import kept_rates as read_rates
from laya.memory.rates import MachineRates
from laya.models import home_path
from laya.store import Store

BENCH = "laya.bench.rates"
TIMEOUT_S = 180


def kept_rates(home: Path | None = None) -> MachineRates | None:
    """What was measured on this hardware with this engine build, or None."""
    return read_rates((home or home_path()) / DATABASE)


def measure_and_keep(home: Path | None = None) -> MachineRates:
    """Measure now, in a child that ends with a fault of its own, and keep it. Raises EngineFailed, StoreError."""
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, "-m", BENCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineFailed(f"The speed of this machine was not measured: {error}") from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineFailed(f"The speed of this machine was not measured: {words}")
    rates = msgspec.json.decode(lines[-1], type=MachineRates)
    with Store((home or home_path()) / DATABASE) as store:
        store.keep_rates(rates.hardware, lines[-1])
    return rates
