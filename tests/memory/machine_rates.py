"""Rates of a made-up machine, in round figures, so that a test can say what must come out."""

from __future__ import annotations

from typing import Any

import msgspec

from laya.memory.rates import BATCHES, MachineRates
from laya.types import MIB

WEIGHT_S = 1e-10  # per weight and token, one thread, in cache
WAIT_S = 5e-11  # for a byte of a lone head's keys and values that comes from memory
READ = 10e9  # bytes a second from memory
RATES = MachineRates(
    hardware="a machine, 4 cores",
    measured_at=0.0,
    n_threads=4,
    load=0.0,
    matrix_s={"Q8_0": tuple(WEIGHT_S * n for n in BATCHES), "F16": tuple(2 * WEIGHT_S * n for n in BATCHES)},
    streamed_s={"Q8_0": (2 * WEIGHT_S, 3 * WEIGHT_S), "F16": (4 * WEIGHT_S, 6 * WEIGHT_S)},
    attention_s={
        "f16": ((1e-8, 2e-10), (0.0, 1e-10), (0.0, 1e-10), (0.0, 1e-10)),
        "q8_0": ((1e-8, 3e-10), (0.0, 5e-10), (0.0, 5e-10), (0.0, 5e-10)),
    },
    kept_wait_s=((1, ((MIB, 0.0), (128 * MIB, WAIT_S))), (8, ((MIB, 0.0), (128 * MIB, 5 * WAIT_S)))),
    batch_wait_s=((1, ((MIB, 0.0), (128 * MIB, 10 * WAIT_S))), (8, ((MIB, 0.0), (128 * MIB, 50 * WAIT_S)))),
    reads=((MIB, 40e9), (128 * MIB, READ)),
    reads_all=((MIB, 160e9), (128 * MIB, 2 * READ)),
    op_s=1e-7,
    op_all_s=1e-6,
    speedup=4.0,
)


def rates_with(**changes: Any) -> MachineRates:
    return msgspec.structs.replace(RATES, **changes)
