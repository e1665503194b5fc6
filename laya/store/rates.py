"""Owns: what was measured of a machine's speed, kept by the hardware it holds for. Knows no figure in it."""

from __future__ import annotations

import time

import peewee

from laya.store.database import Tables


class _RatesRow(peewee.Model):
    hardware = peewee.TextField(primary_key=True)
    document = peewee.TextField()
    measured_s = peewee.DoubleField()

    class Meta:
        table_name = "machine_rates"


class RatesTables(Tables):
    """Measured rates; every method is one transaction."""

    def rates(self, hardware: str) -> str | None:
        """The JSON that was kept for this hardware, or None."""
        with self._faults():
            found = list(_RatesRow.select().where(_RatesRow.hardware == hardware).execute(self._database))
        return str(found[0].document) if found else None

    def keep_rates(self, hardware: str, document: str) -> None:
        """Keep it in place of what was measured before; on disk when this returns."""
        row = {"hardware": hardware, "document": document, "measured_s": time.time()}
        with self._faults():
            _RatesRow.insert(row).on_conflict("REPLACE").execute(self._database)
