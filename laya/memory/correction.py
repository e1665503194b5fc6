"""Owns: what was learned of plans that were too small, and how the next plan is made larger by it. Pure.

An error of the formulas grows with the model, so it is kept as a share of the plan; what a small model was over by is
mostly the process itself and is kept in bytes. The engine, its build and the architecture share one correction.
"""

from __future__ import annotations

import msgspec

from laya.types import MIB, Plan

SMALL_PLAN_BYTES = 160 * MIB  # below it, what an engine is over by says nothing of larger models
MOST_SHARE = 1.0  # one engine that lies must not make every model of its architecture unloadable
KILLED_GROWTH = 0.25  # an engine stopped at its ceiling wanted more than it was seen to hold: so much more is guessed
TERM = "correction"


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """How much more than planned an engine was measured to take."""

    share: float = 0.0  # of the plan
    flat_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.share or self.flat_bytes)

    def bytes_of(self, planned_bytes: int) -> int:
        return max(int(self.share * planned_bytes), self.flat_bytes)

    def words(self) -> str:
        """What was learned, as a note of a plan that counts it."""
        at_least = f", and at least {self.flat_bytes / MIB:.0f} MiB" if self.flat_bytes >= MIB else ""
        return (
            f"correction: engines of this build and architecture were measured to take up to {self.share:.0%}"
            f"{at_least} more than planned"
        )

    def after(self, plan: Plan, peak_bytes: int, *, was_killed: bool = False) -> Correction:
        """What is known after an engine of this plan was seen to hold `peak_bytes` of RAM; never less than before.

        was_killed: it was stopped at its ceiling, so nobody knows what it would have come to.
        """
        ram = next(device for device in plan.devices if device.device == "cpu")
        planned_bytes = ram.total_bytes - ram.terms.get(TERM, 0)
        if was_killed:
            peak_bytes = max(peak_bytes, ram.total_bytes) + int(KILLED_GROWTH * planned_bytes)
        over_bytes = peak_bytes - planned_bytes
        if over_bytes <= self.bytes_of(planned_bytes):
            return self
        if planned_bytes < SMALL_PLAN_BYTES:
            return msgspec.structs.replace(self, flat_bytes=min(over_bytes, SMALL_PLAN_BYTES))
        return msgspec.structs.replace(self, share=min(over_bytes / planned_bytes, MOST_SHARE))


NOTHING_LEARNED = Correction()
