"""Owns: the sums of what is used: added to in memory as requests end, written to the store in batches beside the loop.

What is counted since the last write is lost by a kill -9 and nothing else is: `WRITE_EVERY_S` at most. A store that
cannot be written makes the sums wait in memory, which grows by days, models and keys and never by requests. Models and
keys that are not this server's are never labels.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from laya.config import StoreConfig
from laya.config.cost import Cost
from laya.errors import LayaError
from laya.store import Store, Usage

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

logger = logging.getLogger(__name__)
WRITE_EVERY_S = 2.0
PRUNE_EVERY_S = 3600.0
KEYS_LABELLED = 100  # in the metrics; those that come later are one, OTHERS
OTHERS = "(others)"


class Meter(Collector):
    """What is used of one server. `count` is on the hot path: a dictionary's entry and a few additions."""

    def __init__(
        self, config: StoreConfig, database: Path, cost_of: Callable[[str], Cost | None] = lambda model: None
    ) -> None:
        """cost_of: what a model's tokens cost now; asked when sums are written, never for a request."""
        self._cost_of = cost_of
        self._config = config
        self._database = database
        self._sums: dict[tuple[str, str], Usage] = {}  # (model, key); since the last write, of today
        self._unwritten: list[Usage] = []  # of a day that is over, or of a write that failed
        self._by_key: dict[str, Usage] = {}  # since the start, up to the last write
        self._day = today()
        self._writing = asyncio.Lock()

    def count(self, exchange: Exchange) -> None:
        """A request has its outcome."""
        model = exchange.endpoint.model_id if exchange.endpoint is not None else ""
        key = exchange.key_name or ""
        sums = self._sums.get((model, key))
        if sums is None:
            sums = self._sums[model, key] = Usage(day=self._day, model=model, key=key)
        _add(sums, exchange)

    async def run(self) -> None:
        """Write and forget, for as long as the server runs; the last sums when it ends."""
        prune_s = float("-inf")
        try:
            while True:
                await asyncio.sleep(WRITE_EVERY_S)
                await self.write()
                if time.monotonic() - prune_s > PRUNE_EVERY_S:
                    prune_s = time.monotonic()
                    await asyncio.to_thread(self._prune)
        finally:
            self._flush()

    async def write(self) -> None:
        """What was counted is on disk when this returns, or waits for the next time where the store cannot be had."""
        async with self._writing:
            rows = self._take()
            if rows and not await asyncio.to_thread(self._keep, rows):
                self._unwritten = _summed([*rows, *self._unwritten])

    async def since(self, day: str) -> list[Usage]:
        """From this day (UTC) on, what is not written yet too. Raises StoreError."""
        await self.write()
        return await asyncio.to_thread(self._read, day)

    def collect(self) -> Iterator[Metric]:
        """Requests and tokens by key, since the start."""
        requests = CounterMetricFamily("laya_key_requests", "Requests by key", labels=("key", "outcome"))
        tokens = CounterMetricFamily("laya_key_tokens", "Tokens by key", labels=("key", "kind"))
        found = {key: msgspec.structs.replace(own) for key, own in self._by_key.items()}
        _fold(found, self._sums.values())
        for key, own in found.items():
            for outcome in ("served", "refused", "failed", "cancelled"):
                requests.add_metric((key, outcome), getattr(own, outcome))
            tokens.add_metric((key, "prompt"), own.prompt_tokens)
            tokens.add_metric((key, "generated"), own.generated_tokens)
        yield from (requests, tokens)

    def _take(self) -> list[Usage]:
        for row in self._sums.values():
            if cost := self._cost_of(row.model):
                row.costs = {cost.currency: cost.amount(row.prompt_tokens, row.generated_tokens)}
        rows = [*self._unwritten, *self._sums.values()]
        _fold(self._by_key, self._sums.values())
        self._sums, self._unwritten, self._day = {}, [], today()
        return rows

    def _flush(self) -> None:
        """The last write; the loop ends, so nothing waits for it."""
        rows = self._take()
        if rows:
            self._keep(rows)

    def _keep(self, rows: list[Usage]) -> bool:
        try:
            with Store(self._database) as store:
                store.add_usage(rows)
        except LayaError as error:
            logger.warning("usage is not written yet: %s", error.message)
            return False
        return True

    def _read(self, day: str) -> list[Usage]:
        if not self._database.exists():
            return []
        with Store(self._database) as store:
            return store.usage(day)

    def _prune(self) -> None:
        keep_s = self._config.keep_usage
        if keep_s is None or keep_s < 0 or not self._database.exists():
            return
        try:
            with Store(self._database) as store:
                store.prune_usage((datetime.now(timezone.utc) - timedelta(seconds=keep_s)).strftime("%Y-%m-%d"))
        except LayaError as error:
            logger.warning("old usage could not be forgotten: %s", error.message)


def today() -> str:
    """The day that usage is counted for: UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def grouped(rows: list[Usage], by: str) -> list[Usage]:
    """Sums by one of day, model and key; the fields that rows were put together over are empty."""
    return _summed([_only(row, by) for row in rows])


def _only(row: Usage, by: str) -> Usage:
    return msgspec.structs.replace(row, **{name: "" for name in ("day", "model", "key") if name != by})


def _summed(rows: list[Usage]) -> list[Usage]:
    sums: dict[tuple[str, str, str], Usage] = {}
    for row in rows:
        known = sums.setdefault((row.day, row.model, row.key), row)
        if known is not row:
            known.add(row)
    return list(sums.values())


def _fold(by_key: dict[str, Usage], rows: Iterable[Usage]) -> None:
    """Add these to what each key has, as far as there are labels for keys."""
    for row in rows:
        label = row.key if row.key in by_key or len(by_key) < KEYS_LABELLED else OTHERS
        by_key.setdefault(label, Usage(day="", model="", key=label)).add(row)


def _add(sums: Usage, exchange: Exchange) -> None:
    outcome = exchange.outcome
    assert outcome is not None
    sums.requests += 1
    setattr(sums, outcome, getattr(sums, outcome) + 1)
    if not exchange.sent_s:  # no engine had it
        return
    if exchange.first_token_s:
        sums.n_first_tokens += 1
        sums.ttft_sum_s += exchange.first_token_s - exchange.arrived_s
    if outcome == "failed":
        return
    sums.prompt_tokens += exchange.prompt_tokens or exchange.prefill_done
    sums.generated_tokens += exchange.n_tokens_out
    if exchange.first_token_s and exchange.n_tokens_out > 1:
        sums.n_gaps += exchange.n_tokens_out - 1
        sums.gaps_sum_s += time.monotonic() - exchange.first_token_s
