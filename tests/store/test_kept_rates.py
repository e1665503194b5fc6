"""Rates of a machine: kept by hardware, replaced, and there after the file is opened anew."""

from __future__ import annotations

from pathlib import Path

from laya.store import Store


def test_rates_are_kept_by_hardware_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "laya.db"
    with Store(path) as store:
        assert store.rates("cpu, 2 cores") is None
        store.keep_rates("cpu, 2 cores", "{}")
        store.keep_rates("cpu, 4 cores", "[]")
        store.keep_rates("cpu, 2 cores", '{"op_s": 1}')
    with Store(path) as store:
        assert store.rates("cpu, 2 cores") == '{"op_s": 1}'
        assert store.rates("cpu, 4 cores") == "[]"
