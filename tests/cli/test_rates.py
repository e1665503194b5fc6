"""The rates of this machine: a child that fails is a sentence, what was kept is read, what is broken is not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kept_rates import keep, some_rates

from laya.cli import doctor_rates, rates
from laya.errors import EngineFailed


def test_nothing_is_kept_where_there_is_no_database_or_another_file(tmp_path: Path) -> None:
    assert rates.kept_rates(tmp_path) is None
    assert not (tmp_path / "laya.db").exists()
    (tmp_path / "laya.db").write_text("not a database, but longer than one hundred bytes " * 3)
    assert rates.kept_rates(tmp_path) is None


def test_kept_rates_are_read_for_this_hardware_alone(tmp_path: Path) -> None:
    keep(tmp_path, msgspec.structs.replace(some_rates(), hardware="another machine"))
    assert rates.kept_rates(tmp_path) is None
    keep(tmp_path, some_rates())
    assert rates.kept_rates(tmp_path) == some_rates()


def test_child_that_fails_is_a_sentence_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "BENCH", "laya.bench.no_such_bench")
    with pytest.raises(EngineFailed, match=r"not measured: .*no_such_bench"):
        rates.measure_and_keep(tmp_path)
    assert rates.kept_rates(tmp_path) is None


def test_doctor_says_the_speed_and_whether_it_was_disturbed(tmp_path: Path) -> None:
    missing = doctor_rates.speed(tmp_path)
    assert (missing.level, missing.fix) == ("warn", "laya doctor --measure")
    keep(tmp_path, some_rates())
    quiet = doctor_rates.speed(tmp_path)
    assert quiet.level == "ok"
    assert "memory 51 GB/s, 100 GFLOP/s a thread at Q4_K, 4 threads 3.5 x one" in quiet.seen
    keep(tmp_path, some_rates(load=3.0))
    assert "busy (load 3.0)" in doctor_rates.speed(tmp_path).seen


def test_doctor_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(home: Path) -> None:
        measured.append(home)
        keep(home, some_rates())

    monkeypatch.setattr(doctor_rates, "measure_and_keep", measure)
    for anew in (False, False, True):
        doctor_rates.ensure_measured(tmp_path, anew=anew)
    assert measured == [tmp_path, tmp_path]
