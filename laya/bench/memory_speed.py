"""Owns: the predicted speed of a cell beside the measured one: time to first token, one sequence, all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from laya.bench.memory_drive import Speed
from laya.memory import read_facts
from laya.memory.rates import MachineRates
from laya.memory.speed import Range, predict_speed
from laya.types import PlannedSettings


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: what was measured, the range that was predicted, and whether the one lies in the other."""

    measured: float
    low: float
    high: float
    is_within: bool


def judge(model: Path, settings: PlannedSettings, rates: MachineRates, speed: Speed) -> dict[str, Judged]:
    """The prediction for what the drive did: a prompt to full depth, its last tokens, all sequences at once."""
    facts, n_seqs = read_facts(model), settings.max_num_seqs
    deep = predict_speed(facts, settings, rates, kept_tokens=settings.max_seq_len, prompt_tokens=speed.prompt_tokens)
    together = predict_speed(facts, settings, rates, sessions=n_seqs, kept_tokens=speed.short_tokens)
    return {
        "first_token_s": _judged(speed.first_token_s, deep.first_token_s),
        "decode_tokens_per_s": _judged(speed.decode_tokens_per_s, deep.tokens_per_s),
        "decode_all_tokens_per_s": _judged(speed.decode_all_tokens_per_s, together.tokens_per_s),
    }


def _judged(measured: float, predicted: Range) -> Judged:
    low, high = round(predicted.low, 4), round(predicted.high, 4)
    return Judged(measured=measured, low=low, high=high, is_within=predicted.holds(measured))


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all figures of all cells: how many there are, how many lie in their range, and their share."""
    judged = [each.is_within for row in rows for each in (row["speed"] or {}).values()]
    share = round(sum(judged) / len(judged), 3) if judged else None
    return {"speeds": len(judged), "speeds_within": sum(judged), "speed_within_range": share}


def words(speed: dict[str, Judged]) -> str:
    """`3.26 s to the first token (2.27-4.25)`, and so on; what lies outside its range is marked."""
    units = {
        "first_token_s": "s to the first token",
        "decode_tokens_per_s": "tok/s",
        "decode_all_tokens_per_s": "tok/s all at once",
    }
    return ", ".join(
        f"{each.measured:.4g} {units[name]} ({each.low:.4g}-{each.high:.4g}{'' if each.is_within else ', OUTSIDE'})"
        for name, each in speed.items()
    )
