"""Owns: the plan of a model that a program or another server serves: bytes that are declared, or were seen. Pure.

Nothing of such a model can be read, so nothing is computed: what is planned is a promise, and the ceiling keeps it. A
program of which nothing is known gets all that is free, at least half of what engines may use, for its first run.
"""

from __future__ import annotations

import msgspec

from laya.memory.machine import Budget
from laya.memory.sizes import size_text
from laya.types import ANY_LENGTH, MIB, AskedSettings, DevicePlan, Plan, PlannedSettings

CPU = "cpu"
DEFAULT_NUM_SEQS = 2
REMOTE_NUM_SEQS = 32  # requests that one address gets at once
LEARNED_MARGIN = 1.15  # of what was seen: the most of another day may be more
LEARNED_MARGIN_BYTES = 64 * MIB
KILLED_GROWTH = 1.5  # a program stopped at its ceiling wanted more than it was seen to hold
FIRST_SHARE = 0.5  # of what engines may use, that a program of which nothing is known needs at least


class ProgramBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a program's memory."""

    declared: int | None = None
    learned: int | None = None  # the most it was seen to hold


def plan_program(model_id: str, known: ProgramBytes, asked: AskedSettings, budget: Budget, *, n_cores: int) -> Plan:
    """The plan of one engine of this program."""
    term, need_bytes, reason = _need(known, budget)
    limit_bytes = min(budget.bytes, asked.memory_limit_bytes or budget.bytes)
    settings = _settings(asked, n_threads=asked.n_threads or n_cores, n_seqs=DEFAULT_NUM_SEQS)
    reasons = {}
    if asked.max_num_seqs is None:
        reasons["max_num_seqs"] = "what a program takes at once is not known: set it"
    return Plan(
        model=model_id,
        fits=need_bytes <= limit_bytes,
        devices=[DevicePlan(device=CPU, budget_bytes=limit_bytes, terms={term: need_bytes}, total_bytes=need_bytes)],
        settings=settings,
        reasons=reasons,
        suggestions=[],
        verdict=f"{size_text(need_bytes)} {reason}, of {size_text(limit_bytes)} ({budget.limit})",
        exact=known.declared is not None,
        notes=[] if known.declared is not None else [f"{reason}: declare it with memory"],
    )


def plan_remote(model_id: str, asked: AskedSettings) -> Plan:
    """The plan of a model that another server holds: no byte of it is here."""
    settings = _settings(asked, n_threads=0, n_seqs=REMOTE_NUM_SEQS)
    verdict = "another server holds it: nothing of it is counted here"
    return Plan(model=model_id, fits=True, devices=[], settings=settings, reasons={}, suggestions=[], verdict=verdict)


def _settings(asked: AskedSettings, *, n_threads: int, n_seqs: int) -> PlannedSettings:
    max_seq_len = asked.max_seq_len or ANY_LENGTH
    return PlannedSettings(
        max_seq_len=max_seq_len,
        slot_tokens=max_seq_len,
        max_num_seqs=asked.max_num_seqs or n_seqs,
        kv_cache_dtype="-",
        kv_unified=False,
        kv_pool_tokens=0,
        n_batch=ANY_LENGTH,
        n_ubatch=ANY_LENGTH,
        n_threads=n_threads,
        task=asked.task,
        mmap=False,
    )


def after_run(known_bytes: int | None, peak_bytes: int, *, was_killed: bool) -> int:
    """What is learned of a program that held so much; never less than before."""
    seen_bytes = int(peak_bytes * KILLED_GROWTH) if was_killed else peak_bytes
    return max(known_bytes or 0, seen_bytes)


def _need(known: ProgramBytes, budget: Budget) -> tuple[str, int, str]:
    if known.declared is not None:
        return "declared", known.declared, "declared"
    if known.learned is not None:
        n_bytes = int(known.learned * LEARNED_MARGIN) + LEARNED_MARGIN_BYTES
        return "learned", n_bytes, f"learned: it was seen to hold {size_text(known.learned)}"
    least_bytes = int(FIRST_SHARE * max(budget.total_bytes, budget.bytes))
    return "not_known", max(budget.bytes, least_bytes, MIB), "for a first run that shows what it takes"
