"""`laya bench prefix` on real engines: conversations that follow their prompt's beginning are not read again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from laya.bench import prefix
from laya.errors import EngineFailed

LOAD = prefix.Load(n_conversations=10, n_turns=6, n_active=10, n_in_flight=2, max_tokens=4, seed=1)
SERVE = ["--replicas=2", "--max-num-seqs=5", "--max-seq-len=1024", "--n-threads=1", "--prompt-cache=8MiB"]


def row_of(policy: str) -> prefix.Row:
    return next(row for row in prefix.ROWS if row.policy == policy and not row.has_session)


@pytest.mark.engine
def test_prompts_beginning_saves_three_fifths_of_what_round_robin_computes(
    laya_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_HOME", str(laya_home))
    asked = [row_of(policy) for policy in ("round_robin", "auto")]
    rows = [asyncio.run(prefix.measure(row, LOAD, SERVE, "smollm2")) for row in asked]
    robin, auto = prefix.with_reductions(rows)
    assert robin["requests"] == auto["requests"] == 60
    assert robin["saved"] == 0
    assert auto["saved"] >= 0.6, rows
    for engine in (*robin["engines"], *auto["engines"]):
        assert engine["measured_bytes"] <= engine["planned_bytes"]


def said(cached: int, n_tokens: int, cache_n: int, prompt_n: int) -> dict[str, Any]:
    usage = {"prompt_tokens": n_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": usage, "timings": {"cache_n": cache_n, "prompt_n": prompt_n}}


def test_count_is_of_tokens_that_were_computed() -> None:
    counted = prefix.Counted()
    counted.add(said(cached=0, n_tokens=30, cache_n=0, prompt_n=30))
    counted.add(said(cached=30, n_tokens=45, cache_n=30, prompt_n=15))
    assert (counted.requests, counted.prompt_tokens, counted.computed_tokens) == (2, 75, 45)


def test_engine_whose_two_accounts_differ_measures_nothing() -> None:
    with pytest.raises(EngineFailed, match="of one prompt"):
        prefix.Counted().add(said(cached=10, n_tokens=30, cache_n=0, prompt_n=30))
