"""Owns: what was used, summed by day, model and key. Never a request of its own, and nothing of what was said."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import peewee

from laya.store.database import Tables


class Usage(msgspec.Struct, kw_only=True):
    """Sums of one day (UTC), model and key. Means are sums over counts: TTFT over `n_first_tokens`, the time between
    tokens over `n_gaps`."""

    day: str  # 2026-01-31
    model: str  # "": no model that is here
    key: str  # "": none was needed
    requests: int = 0
    served: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    n_first_tokens: int = 0
    ttft_sum_s: float = 0.0
    n_gaps: int = 0  # between the tokens of an answer
    gaps_sum_s: float = 0.0
    costs: dict[str, float] = {}  # by currency: USD

    def add(self, other: Usage) -> None:
        """Add the other's sums to these."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.costs:
            currencies = (*self.costs, *other.costs)
            self.costs = {each: self.costs.get(each, 0.0) + other.costs.get(each, 0.0) for each in currencies}


ROW = Usage.__struct_fields__[:-1]
SUMS = ROW[3:]


class _UsageRow(peewee.Model):
    day = peewee.TextField()
    model = peewee.TextField()
    key = peewee.TextField()
    requests = peewee.IntegerField()
    served = peewee.IntegerField()
    refused = peewee.IntegerField()
    failed = peewee.IntegerField()
    cancelled = peewee.IntegerField()
    prompt_tokens = peewee.IntegerField()
    generated_tokens = peewee.IntegerField()
    n_first_tokens = peewee.IntegerField()
    ttft_sum_s = peewee.DoubleField()
    n_gaps = peewee.IntegerField()
    gaps_sum_s = peewee.DoubleField()

    class Meta:
        table_name = "usage"
        primary_key = peewee.CompositeKey("day", "model", "key")


class _CostRow(peewee.Model):
    day = peewee.TextField()
    model = peewee.TextField()
    key = peewee.TextField()
    currency = peewee.TextField()
    amount = peewee.DoubleField()

    class Meta:
        table_name = "cost"
        primary_key = peewee.CompositeKey("day", "model", "key", "currency")


class UsageTables(Tables):
    """Usage; every method is one transaction."""

    def add_usage(self, rows: Iterable[Usage]) -> None:
        """Add these to what is there; on disk, all of them, when this returns."""
        with self._faults(), self._writing():
            for row in rows:
                changes = {getattr(_UsageRow, name): getattr(_UsageRow, name) + getattr(row, name) for name in SUMS}
                insert = _UsageRow.insert({name: getattr(row, name) for name in ROW})
                insert.on_conflict(
                    conflict_target=[_UsageRow.day, _UsageRow.model, _UsageRow.key], update=changes
                ).execute(self._database)
                for currency, amount in row.costs.items():
                    self._add_cost(row, currency, amount)

    def _add_cost(self, row: Usage, currency: str, amount: float) -> None:
        of = {"day": row.day, "model": row.model, "key": row.key, "currency": currency}
        insert = _CostRow.insert(of | {"amount": amount})
        insert.on_conflict(
            conflict_target=[getattr(_CostRow, name) for name in of],
            update={_CostRow.amount: _CostRow.amount + amount},
        ).execute(self._database)

    def usage(self, since: str = "") -> list[Usage]:
        """From this day on (all of it: no day), the oldest first."""
        query = _UsageRow.select().where(_UsageRow.day >= since)
        query = query.order_by(_UsageRow.day, _UsageRow.model, _UsageRow.key)
        costs: dict[tuple[str, str, str], dict[str, float]] = {}
        with self._faults():
            for cost in _CostRow.select().where(_CostRow.day >= since).execute(self._database):
                costs.setdefault((cost.day, cost.model, cost.key), {})[cost.currency] = cost.amount
            return [
                Usage(**{name: getattr(row, name) for name in ROW}, costs=costs.get((row.day, row.model, row.key), {}))
                for row in query.execute(self._database)
            ]

    def prune_usage(self, before: str) -> int:
        """Forget the days before this one; gives how many rows that were."""
        with self._faults():
            _CostRow.delete().where(_CostRow.day < before).execute(self._database)
            n_rows: int = _UsageRow.delete().where(_UsageRow.day < before).execute(self._database)
        return n_rows
