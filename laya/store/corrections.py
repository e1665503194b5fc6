"""Owns: what was learned of plans that were too small, kept over restarts. Knows no plan."""

from __future__ import annotations

import time

import msgspec
import peewee

from laya.store.database import Tables


class LearnedCorrection(msgspec.Struct, frozen=True, kw_only=True):
    """How much more than planned engines of one build took with one architecture."""

    engine: str
    build: str
    architecture: str
    share: float  # of the plan
    flat_bytes: int


class _CorrectionRow(peewee.Model):
    engine = peewee.TextField()
    build = peewee.TextField()
    architecture = peewee.TextField()
    share = peewee.DoubleField()
    flat_bytes = peewee.IntegerField()
    learned_s = peewee.DoubleField()

    class Meta:
        table_name = "correction"
        primary_key = peewee.CompositeKey("engine", "build", "architecture")


class CorrectionTables(Tables):
    """Corrections; every method is one transaction."""

    def corrections(self) -> list[LearnedCorrection]:
        """Everything that was learned."""
        with self._faults():
            return [_correction(row) for row in _CorrectionRow.select().execute(self._database)]

    def keep_correction(self, learned: LearnedCorrection) -> None:
        """Keep it in place of what was known of the same engine, build and architecture; on disk on return."""
        row = msgspec.to_builtins(learned) | {"learned_s": time.time()}
        with self._faults():
            _CorrectionRow.insert(row).on_conflict("REPLACE").execute(self._database)


def _correction(row: _CorrectionRow) -> LearnedCorrection:
    names = LearnedCorrection.__struct_fields__
    return LearnedCorrection(**{name: getattr(row, name) for name in names})
