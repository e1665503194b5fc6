"""What was learned of an engine counts while settings are chosen, so no plan passes a limit by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_gguf import MakeGguf

from laya.cli.fit import Fitter
from laya.config import Config
from laya.gateway.corrections import build_of
from laya.memory import Budget, Correction, plan_file, read_facts, refusal
from laya.models import resolve
from laya.store import LearnedCorrection, Store
from laya.types import MIB, AskedSettings, Plan

LEARNED = Correction(share=0.25, flat_bytes=40 * MIB)
SHAPE: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 4096}


@pytest.fixture
def path(make_gguf: MakeGguf) -> Path:
    return make_gguf(**SHAPE)


def planned(path: Path, budget: Budget, correction: Correction = LEARNED, **asked: Any) -> Plan:
    return plan_file(path, AskedSettings(**asked), budget, model_id="m", correction=correction)


def test_settings_shrink_until_the_correction_is_within_the_models_own_limit(path: Path, plenty: Budget) -> None:
    free = planned(path, plenty, Correction())
    limit = free.need_bytes + MIB  # would do, had nothing been learned
    plan = planned(path, plenty, memory_limit_bytes=limit)
    assert plan.fits
    assert plan.need_bytes <= limit
    assert plan.settings.max_num_seqs < free.settings.max_num_seqs
    assert plan.devices[0].terms["correction"] == LEARNED.bytes_of(
        plan.need_bytes - plan.devices[0].terms["correction"]
    )
    assert any("up to 25%" in note for note in plan.notes)


def test_settings_shrink_until_the_correction_is_within_the_budget(path: Path, plenty: Budget) -> None:
    budget = msgspec.structs.replace(plenty, bytes=planned(path, plenty, Correction()).need_bytes)
    plan = planned(path, budget)
    assert plan.fits
    assert plan.need_bytes <= budget.bytes == plan.devices[0].budget_bytes


def test_refusal_counts_the_correction_and_what_it_suggests_fits_with_it(path: Path, plenty: Budget) -> None:
    wanted = {"max_num_seqs": 2, "max_seq_len": 16384, "kv_cache_dtype": "f16"}
    budget = msgspec.structs.replace(plenty, bytes=planned(path, plenty, Correction(), **wanted).need_bytes)
    plan = planned(path, budget, **wanted)
    assert not plan.fits
    error = refusal(plan, budget)
    assert error.details["need_bytes"] == planned(path, plenty, **wanted).need_bytes > budget.bytes
    assert len(plan.suggestions) >= 3
    for suggestion in plan.suggestions:
        assert suggestion.total_bytes <= budget.bytes, suggestion


def test_flat_correction_is_for_small_models(path: Path, plenty: Budget) -> None:
    small = planned(path, plenty, Correction(flat_bytes=40 * MIB), max_num_seqs=1, max_seq_len=512)
    assert small.devices[0].terms["correction"] == 40 * MIB


def test_list_says_what_the_load_would_say(
    path: Path, plenty: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_HOME", str(tmp_path))
    budget = msgspec.structs.replace(plenty, bytes=planned(path, plenty, Correction()).need_bytes)
    file = resolve(str(path), home=tmp_path)
    assert Fitter(Config(), budget).file(file).max_num_seqs == 2
    engine, build = build_of(None)
    architecture = read_facts(path).shape.architecture
    with Store(tmp_path / "laya.db") as store:
        store.keep_correction(
            LearnedCorrection(engine=engine, build=build, architecture=architecture, share=0.25, flat_bytes=0)
        )
    assert Fitter(Config(), budget).file(file).max_num_seqs == 1
