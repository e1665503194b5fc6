"""The soak of real engines, short: killed, loaded and reloaded all the while, and nothing of it left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laya.bench.soak_engines import engines_soak, shown

FULL = os.environ.get("LAYA_FULL") == "1"


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_engines_that_are_killed_loaded_and_reloaded_leave_nothing(smollm2_path: Path) -> None:
    report = engines_soak(smollm2_path, 600 if FULL else 10, seed=1, every_s=3.0 if FULL else 0.7)
    assert report["faults"] == []
    assert report["n_tracebacks"] == 0, report["log"]
    assert report["wrong"] == [], shown(report)
