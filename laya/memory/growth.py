"""Owns: when more sequences at once than the default are worth their memory. Pure.

A step of the engine reads the weights once for all sequences, so more of them give more tokens a second in all, until
computing takes longer than reading: the speed model says where. Each one makes every other slower, and costs a cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from laya.memory.limits import is_within, limits_of
from laya.memory.machine import Budget
from laya.memory.planner import Choice, Model, decide, price
from laya.memory.rates import MachineRates
from laya.memory.speed import predict_speed
from laya.types import AskedSettings

LARGER_NUM_SEQS = (4, 8)
GAIN = 1.4  # times the tokens a second, for twice the sequences; below, each waits more than all gain
SPARE_SHARE = 0.5  # of each device: the rest is for other models
NOT_MEASURED = "whether more would gain is not known: `laya doctor` measures this machine's speed"


class Growth(NamedTuple):
    """The choice with more sequences, or the one before, and why."""

    choice: Choice
    reason: str


def grown(model: Model, asked: AskedSettings, choice: Choice, budget: Budget, rates: MachineRates | None) -> Growth:
    """The most sequences that gain and for which memory is spare, from a choice that fits."""
    if rates is None:
        return Growth(choice, NOT_MEASURED)
    limits = {device: round(SPARE_SHARE * n_bytes) for device, n_bytes in limits_of(model, asked, budget).items()}
    reason = ""
    for n_seqs in LARGER_NUM_SEQS:
        larger = msgspec.structs.replace(choice, max_num_seqs=n_seqs)
        gain = _per_s(model, asked, larger, rates) / _per_s(model, asked, choice, rates)
        if gain < GAIN:
            return Growth(choice, reason or f"{n_seqs} would get {gain:.1f} x the tokens/s of {choice.max_num_seqs}")
        if not is_within(price(model, decide(model, asked, larger)), limits):
            return Growth(choice, reason or f"{n_seqs} would take more than half of the memory")
        reason = f"{n_seqs} get {gain:.1f} x the tokens/s of {choice.max_num_seqs}, and memory is spare"
        choice = larger
    return Growth(choice, reason)


def _per_s(model: Model, asked: AskedSettings, choice: Choice, rates: MachineRates) -> float:
    settings = decide(model, asked, choice)
    speed = predict_speed(model.facts, settings, rates, sessions=choice.max_num_seqs)
    return math.sqrt(speed.tokens_per_s.low * speed.tokens_per_s.high)
