"""Owns: the grid of contexts x sequences: what each needs and whether it fits, the table a rule of thumb lacks."""

from __future__ import annotations

import msgspec

from laya.memory.limits import is_within, limits_of, totals
from laya.memory.machine import Budget
from laya.memory.planner import Choice, Model, check_asked, decide, price
from laya.types import AskedSettings

SHORTEST, LONGEST = 2048, 131072  # tokens of the first and the last column
SEQUENCES = (1, 2, 4, 8, 16)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination, in bytes over all devices."""

    max_seq_len: int
    max_num_seqs: int
    need_bytes: int
    fits: bool


def grid(model: Model, asked: AskedSettings, budget: Budget) -> list[list[Cell]]:
    """A row for each number of sequences, a column for each context; what was asked is among both.

    The KV type is the one asked, else f16. Raises ConfigError for settings that no memory could give.
    """
    check_asked(model, asked)
    limits = limits_of(model, asked, budget)
    kv_type = (asked.kv_cache_dtype or "f16").lower()
    rows = []
    for n_seqs in _with(SEQUENCES, asked.max_num_seqs):
        row = []
        for tokens in lengths(model, asked):
            choice = Choice(max_num_seqs=n_seqs, max_seq_len=tokens, kv_cache_dtype=kv_type)
            priced = price(model, decide(model, asked, choice))
            need, fits = sum(totals(priced).values()), is_within(priced, limits)
            row.append(Cell(max_seq_len=tokens, max_num_seqs=n_seqs, need_bytes=need, fits=fits))
        rows.append(row)
    return rows


def lengths(model: Model, asked: AskedSettings) -> list[int]:
    """Powers of two up to the trained length, and that length where it is short."""
    trained = min(model.shape.n_ctx_train, asked.kv_pool_tokens or LONGEST)
    longest = min(trained, LONGEST)
    powers = [1 << bits for bits in range(SHORTEST.bit_length() - 1, LONGEST.bit_length()) if 1 << bits <= longest]
    return _with(powers or [longest], asked.max_seq_len)


def _with(values: tuple[int, ...] | list[int], asked: int | None) -> list[int]:
    return sorted({*values, *([asked] if asked else [])})
