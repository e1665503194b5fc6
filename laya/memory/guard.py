"""Owns: the ladder that gives memory back before the system has to take it: readings in, steps out. Pure.

A step at a time, gentlest first; the next one only when the one before did not help within its settling time. What is
given up for good (an engine that works) needs a worse state than what costs nothing (admitting, caches, idle engines).
The marks are shares of what engines and free memory make up together, so that a model that fits the budget (80 % of
that) never trips them by itself.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from laya.types import GIB, MIB, Plan

Step = Literal["stop_admitting", "drop_caches", "unload_idle", "stop_youngest", "admit_again"]

# Share of the usable memory, and the most it comes to in bytes on a large machine.
EASY = (0.15, 2 * GIB)  # above it nothing is wrong; while programs stall or the system swaps, below it is tight
TIGHT = (0.07, GIB)
CRITICAL = (0.03, 384 * MIB)
STALL_SHARE = 0.10  # of the time, some task waited for memory
FULL_STALL_SHARE = 0.10  # of the time, every task did
SWAP_OUT_BYTES_PER_S = 4 * MIB
SETTLING_S: dict[Step, float] = {
    "stop_admitting": 0.0,
    "drop_caches": 0.5,
    "unload_idle": 2.0,
    "stop_youngest": 3.0,
    "admit_again": 0.0,
}
CALM_S = 5.0  # before anything is admitted again

CEILING_SHARE = 1.10  # of the plan
CEILING_MARGIN_BYTES = 32 * MIB  # page tables, pipes and what else the kernel charges to the group


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine looks like at one moment."""

    at_s: float  # monotonic
    available_bytes: int  # without swapping, and without dropping the mapped weights of running engines
    usable_bytes: int  # `available_bytes` and what our engines hold
    stall_share: float = 0.0  # of the time since the reading before, some task waited for memory (PSI)
    full_stall_share: float = 0.0  # the same, every task
    swap_out_bytes_per_s: float = 0.0

    def is_below(self, mark: tuple[float, int]) -> bool:
        share, most_bytes = mark
        return self.available_bytes < min(share * self.usable_bytes, most_bytes)

    @property
    def is_strained(self) -> bool:
        """Programs wait for memory, or the system swaps."""
        return self.stall_share >= STALL_SHARE or self.swap_out_bytes_per_s >= SWAP_OUT_BYTES_PER_S

    @property
    def is_tight(self) -> bool:
        return self.is_below(TIGHT) or (self.is_strained and self.is_below(EASY))

    @property
    def is_critical(self) -> bool:
        return self.is_below(CRITICAL) or (self.full_stall_share >= FULL_STALL_SHARE and self.is_below(TIGHT))


class Ladder:
    """Where on the ladder this machine is. `climb` is called with each reading."""

    def __init__(self) -> None:
        self.is_admitting = True
        self._last: Step | None = None  # taken since it became tight
        self._last_at_s = 0.0
        self._calm_since_s: float | None = None

    def climb(self, reading: Reading) -> Step | None:
        """The step to take now, if any."""
        step = self._worse(reading) if reading.is_tight else self._better(reading)
        if step is not None:
            self._last, self._last_at_s = step, reading.at_s
            self.is_admitting = step == "admit_again"
        return step

    def _worse(self, reading: Reading) -> Step | None:
        self._calm_since_s = None
        if self.is_admitting:
            return "stop_admitting"
        assert self._last is not None, "admission was stopped by a step"
        if reading.at_s - self._last_at_s < SETTLING_S[self._last]:
            return None
        if self._last == "stop_admitting":
            return "drop_caches"
        if self._last == "drop_caches" or not reading.is_critical:
            return "unload_idle"  # again and again: engines become idle one by one
        return "stop_youngest"

    def _better(self, reading: Reading) -> Step | None:
        if self.is_admitting:
            return None
        if reading.is_below(EASY):  # neither tight nor easy: stay where we are
            self._calm_since_s = None
            return None
        if self._calm_since_s is None:
            self._calm_since_s = reading.at_s
        return "admit_again" if reading.at_s - self._calm_since_s >= CALM_S else None


def ceiling_bytes(plan: Plan, limit_bytes: int | None = None) -> int:
    """The hard limit, a whole number of MiB, on the RAM of an engine that is started with this plan.

    limit_bytes: the model's own memory_limit, which the margin does not pass either. An engine that does not fit and
    is loaded all the same gets what there is, and not a byte of what others need.
    """
    ram = next(device for device in plan.devices if device.device == "cpu")
    if ram.total_bytes > ram.budget_bytes:
        return max(ram.budget_bytes // MIB * MIB, CEILING_MARGIN_BYTES)
    wanted = -(-(int(ram.total_bytes * CEILING_SHARE) + CEILING_MARGIN_BYTES) // MIB) * MIB
    return wanted if limit_bytes is None else min(wanted, limit_bytes)


def plan_bytes_within(limit_bytes: int) -> int:
    """The largest plan whose ceiling is no higher than this limit."""
    return max(0, int((limit_bytes // MIB * MIB - CEILING_MARGIN_BYTES) / CEILING_SHARE))
