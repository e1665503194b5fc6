"""Owns: how fast each variant is and what it answers, asked through Laya's gateway; and what memory its engine takes.

One Laya of its own has all variants as its models. In each round every variant is asked once, forwards and backwards in
turn, so that what drifts, drifts against all; what is told is the median over rounds with its quartiles. Memory is the
bench's: the engine alone, filled as far as its plan allows.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from laya.bench.both_ways import BothWays, both_ways, set_priority
from laya.bench.memory import in_band
from laya.bench.memory_drive import drive
from laya.bench.token_streams import Answer, Side, ask, together
from laya.errors import EngineFailed
from laya.memory import Machine, plan_file, refusal
from laya.quantization.answers import Answered, Server, ask_all
from laya.quantization.tasks import Task
from laya.types import AskedSettings, Plan

SERVED_TOKENS = 1024  # of one sequence, where the model was trained for so many
PROMPT_WORDS, ANSWER_TOKENS = 160, 48
WAKING_WORDS = 16


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table as it is served: a file and the type of its KV cache (None = f16)."""

    name: str
    path: Path
    kv_cache_dtype: str | None = None
    is_chat: bool = True
    is_unpacked: bool = False  # stands for a folder that no engine here runs: what it takes is not what that would
    max_seq_len: int = SERVED_TOKENS

    def asked(self, n_threads: int) -> AskedSettings:
        kv = self.kv_cache_dtype or "f16"
        return AskedSettings(max_num_seqs=1, max_seq_len=self.max_seq_len, kv_cache_dtype=kv, n_threads=n_threads)


class Spread(msgspec.Struct, frozen=True):
    """A median over rounds, and the quartiles."""

    median: float
    low: float
    high: float


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Through the gateway, one chat at a time."""

    prefill_tokens_per_s: Spread
    decode_tokens_per_s: Spread
    prompt_tokens: int
    answer_tokens: int
    n_rounds: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one sequence of `max_seq_len` tokens. The plan is `laya plan`'s, without what was learned on this machine."""

    max_seq_len: int
    planned_bytes: int
    peak_bytes: int
    ratio: float
    is_in_band: bool
    weights_bytes: int
    kv_bytes: int
    load_s: float  # what the file's pages had been read before


def planned(row: Row, n_threads: int) -> Plan:
    """Raises InsufficientMemory with both figures where the variant does not fit."""
    budget = Machine().budget()
    plan = plan_file(row.path, row.asked(n_threads), budget, model_id=row.name)
    if not plan.fits:
        raise refusal(plan, budget)
    return plan


def memory_of(row: Row, n_threads: int) -> Memory:
    """Load, fill, measure. Raises what the planner or the engine raises."""
    plan = planned(row, n_threads)
    driven = asyncio.run(drive(row.path, plan))
    terms = plan.ram.terms
    return Memory(
        max_seq_len=plan.settings.max_seq_len,
        planned_bytes=plan.need_bytes,
        peak_bytes=driven.peak_bytes,
        ratio=round(plan.need_bytes / driven.peak_bytes, 4),
        is_in_band=in_band(plan.need_bytes, driven.peak_bytes),
        weights_bytes=terms.get("weights", 0),
        kv_bytes=terms.get("kv_cache", 0),
        load_s=driven.load_s,
    )


class Served:
    """A Laya with all rows, by name."""

    def __init__(self, ways: BothWays, rows: Sequence[Row], tell: Callable[[str], None], nice: int | None) -> None:
        self._ways, self._rows, self._tell, self._nice = ways, rows, tell, nice
        self._n_words = 0  # of a timed prompt
        laya = ways.sides["laya"]
        self._sides = {row.name: msgspec.structs.replace(laya, model=_model(at)) for at, row in enumerate(rows)}

    def server(self, row: Row) -> Server:
        side = self._sides[row.name]
        url = f"http://{side.host}:{side.port}/v1"
        return Server(name=row.name, base_url=url, model=side.model, key=side.key, is_chat=row.is_chat)

    async def speeds(self, n_rounds: int) -> dict[str, Speed]:
        """Of all rows that are run as they are, in rounds after one that is not counted."""
        rows = [row for row in self._rows if not row.is_unpacked]
        seen: dict[str, list[tuple[float, float, int, int]]] = {row.name: [] for row in rows}
        for number in range(-1, n_rounds):
            for row in rows if number % 2 else rows[::-1]:
                self._tell(f"speed: round {max(0, number + 1)} of {n_rounds}, {row.name}")
                figures = await self._one(self._sides[row.name], row)
                if number >= 0:
                    seen[row.name].append(figures)
        return {
            name: Speed(
                prefill_tokens_per_s=_spread([each[0] for each in figures]),
                decode_tokens_per_s=_spread([each[1] for each in figures]),
                prompt_tokens=round(statistics.median(each[2] for each in figures)),
                answer_tokens=round(statistics.median(each[3] for each in figures)),
                n_rounds=n_rounds,
            )
            for name, figures in seen.items()
        }

    async def _one(self, side: Side, row: Row) -> tuple[float, float, int, int]:
        words_there = await self._wake(side, WAKING_WORDS)
        # a vocabulary of bytes makes six tokens of a word; what stands around the words is counted as words too
        room = row.max_seq_len - ANSWER_TOKENS - 64
        self._n_words = self._n_words or min(PROMPT_WORDS, int(room * WAKING_WORDS / words_there))
        _, (answer,) = await together(side, [self._ways.chat(self._n_words, ANSWER_TOKENS)])
        if answer.engine is None:
            raise EngineFailed(f"An answer of {row.name} did not come through Laya: it has no x-laya-engine.")
        return *_rates(answer), answer.prompt_tokens, answer.n_tokens

    async def _wake(self, side: Side, n_words: int = 2) -> int:
        """Have it loaded: another variant may have made it leave memory. Gives the tokens of so many words.

        An engine that starts steps back behind other programs anew.
        """
        body = self._ways.chat(n_words, 2) | {"model": side.model}
        status, said, _ = await ask(side, f"{side.base_path}/chat/completions", body)
        if status != 200:
            raise EngineFailed(f"Laya answered {status}: {said[:300].decode(errors='replace')}")
        if self._nice is not None and self._ways.pid is not None:
            set_priority(self._nice, self._ways.pid)
        return int(json.loads(said)["usage"]["prompt_tokens"])

    async def answers(self, tasks: Sequence[Task]) -> dict[str, Answered]:
        found = {}
        for row in self._rows:
            self._tell(f"tasks: {row.name}")
            await self._wake(self._sides[row.name])
            found[row.name] = await asyncio.to_thread(ask_all, self.server(row), tasks)
        return found


@asynccontextmanager
async def served(
    rows: Sequence[Row], n_threads: int, folder: Path, tell: Callable[[str], None], nice: int | None = None
) -> AsyncIterator[Served]:
    """folder: where its configuration is written. nice: see `both_ways`.

    Raises EngineFailed where the first variant does not get ready.
    """
    models: dict[str, Any] = {
        _model(at): {
            "source": str(row.path),
            "max_num_seqs": 1,
            "max_seq_len": row.max_seq_len,
            "kv_cache_dtype": row.kv_cache_dtype or "f16",
            "n_threads": n_threads,
        }
        for at, row in enumerate(rows)
    }
    config = folder / "config.yaml"
    config.write_text(json.dumps({"version": 1, "models": models}))  # which is YAML too
    async with both_ways(_model(0), ["--config", str(config)], nice=nice) as ways:
        yield Served(ways, rows, tell, nice)


def _rates(answer: Answer) -> tuple[float, float]:
    """Prefill and decode, tokens/s.

    A model whose tokens are no text of their own (bytes of characters) streams few pieces: there the engine's own word
    says when the prompt was done.
    """
    timings = answer.timings or {}
    first_s = answer.first_s
    if len(answer.content_s) < answer.n_tokens // 2 and "prompt_ms" in timings:
        first_s = timings["prompt_ms"] / 1000
    n_computed = round(timings.get("prompt_n", answer.prompt_tokens))
    return n_computed / first_s, (answer.n_tokens - 1) / (answer.end_s - first_s)


def _model(at: int) -> str:
    return f"variant-{at}"


def _spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(*(round(values[0], 2) for _ in range(3)))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(round(statistics.median(values), 2), round(low, 2), round(high, 2))
