"""Rates of this machine as if they had been measured, in round figures."""

from __future__ import annotations

from pathlib import Path

import msgspec

from laya.memory import Machine
from laya.memory.rates import BATCHES, MachineRates, hardware_key
from laya.store import Store
from laya.types import MIB


def some_rates(load: float = 0.0) -> MachineRates:
    return MachineRates(
        hardware=hardware_key(Machine()),
        measured_at=1.8e9,
        n_threads=4,
        load=load,
        matrix_s={"Q4_K": tuple(2e-11 * n for n in BATCHES)},
        streamed_s={"Q4_K": (4e-11, 6e-11)},
        attention_s={"f16": ((1e-8, 2e-10), (0.0, 1e-10), (0.0, 1e-10), (0.0, 1e-10))},
        kept_wait_s=((1, ((MIB, 0.0), (128 * MIB, 5e-11))),),
        batch_wait_s=((1, ((MIB, 0.0), (128 * MIB, 5e-11))),),
        reads=((MIB, 40e9), (128 * MIB, 10e9)),
        reads_all=((MIB, 160e9), (128 * MIB, 51e9)),
        op_s=1e-7,
        op_all_s=1e-6,
        speedup=3.5,
    )


def keep(home: Path, kept: MachineRates) -> None:
    with Store(home / "laya.db") as store:
        store.keep_rates(kept.hardware, msgspec.json.encode(kept).decode())
