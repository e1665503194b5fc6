"""Cache, state and graph of every architecture, against what the engine itself lays out for the same metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from described import ALL, BOUNDED, UNGATED, Widths, metadata
from engine_oracle import F16, Q8_0, Allocated, Oracle
from real_models import MODELS, WITHOUT_DENSE

from laya.memory.buffers import compute
from laya.memory.caches import kv_by_layer, state_by_layer
from laya.memory.engine_facts import XLLAMACPP
from laya.memory.facts import facts_before_download
from laya.memory.families import MEASURED
from laya.memory.gguf_shape import read_shape
from laya.memory.load import Load
from laya.types import MIB, PlannedSettings

pytestmark = pytest.mark.engine
CACHE_TYPES = {F16: "f16", Q8_0: "q8_0"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"n_ctx": 4096},
    {"n_ctx": 8192, "n_seqs": 4, "cache_type": Q8_0},
    {"n_ctx": 16384, "n_seqs": 3, "unified": True, "n_rollback": 2},
    {"n_ctx": 8192, "n_seqs": 2, "swa_full": True, "n_ubatch": 512},
)


_TALL, _WIDE = Widths(n_embd=1024, n_head=16, n_ff=4096), Widths(n_embd=2048, n_head=16, n_head_kv=16)
GRAPHS: tuple[tuple[Widths, dict[str, Any]], ...] = (
    (_WIDE, {"n_ctx": 2048}),
    (_WIDE, {"n_ctx": 8192, "n_seqs": 4}),
    (_TALL, {"n_ctx": 16384, "n_seqs": 2, "unified": True}),
    (_TALL, {"n_ctx": 8192, "cache_type": Q8_0}),
    (_TALL, {"n_ctx": 4096, "n_ubatch": 512}),
    (_TALL, {"n_ctx": 16384, "n_seqs": 4, "unified": True, "n_ubatch": XLLAMACPP.n_batch_shared}),
)
REAL: tuple[dict[str, Any], ...] = (
    {"n_ctx": 8192},
    {"n_ctx": 32768, "n_seqs": 4},
    {"n_ctx": 32768, "n_seqs": 4, "unified": True, "cache_type": Q8_0},
    {"n_ctx": 8192, "n_ubatch": 512},
    {"n_ctx": 32768, "n_seqs": 4, "unified": True, "n_ubatch": XLLAMACPP.n_batch_shared},
)
MOST_OVER = 1.35
PRINTED_MIB = 0.01  # the engine's log has two digits


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    process = Oracle()
    yield process
    process.close()


def load_of(keys: dict[str, Any], settings: dict[str, Any]) -> Load:
    n_seqs, unified = settings.get("n_seqs", 1), settings.get("unified", False)
    n_ctx, n_ubatch = settings["n_ctx"], settings.get("n_ubatch", 128)
    planned = PlannedSettings(
        max_seq_len=n_ctx // n_seqs,
        slot_tokens=n_ctx if unified else n_ctx // n_seqs,
        max_num_seqs=n_seqs,
        kv_cache_dtype=CACHE_TYPES[settings.get("cache_type", F16)],
        kv_unified=unified,
        kv_pool_tokens=n_ctx,
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        n_threads=1,
        task="chat",
        mmap=True,
    )
    read = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    facts = facts_before_download(read_shape(Path("m.gguf"), read), 1, "F16")
    is_gated = keys["general.architecture"] not in UNGATED
    return Load(
        facts=msgspec.structs.replace(facts, n_ff_matrices=3 if is_gated else 2),
        settings=planned,
        engine=XLLAMACPP,
        swa_full=settings.get("swa_full", False),
        n_rollback=settings.get("n_rollback", 0),
    )


@pytest.mark.parametrize("architecture", ALL)
def test_every_described_architecture_is_known(architecture: str) -> None:
    read = {key: tuple(value) if isinstance(value, list) else value for key, value in metadata(architecture).items()}
    assert "not known" not in (read_shape(Path("m.gguf"), read).bound or "")


@pytest.mark.parametrize("architecture", ALL)
def test_cache_and_state_are_what_the_engine_lays_out(architecture: str, oracle: Oracle) -> None:
    keys = metadata(architecture)
    for settings in SETTINGS:
        found = oracle.ask(keys, **settings)
        assert isinstance(found, Allocated), found
        load = load_of(keys, settings)
        assert sum(kv_by_layer(load)) / MIB == pytest.approx(found.kv_mib, abs=0.0101), settings
        assert sum(state_by_layer(load)) / MIB == pytest.approx(found.state_mib, abs=0.0101), settings


@pytest.mark.parametrize("architecture", sorted(MEASURED & set(ALL)))
def test_the_graph_is_never_under_and_little_over_what_the_engine_reserves(architecture: str, oracle: Oracle) -> None:
    for widths, settings in GRAPHS:
        keys = metadata(architecture, widths)
        found = oracle.ask(keys, **settings)
        assert isinstance(found, Allocated), found
        load = load_of(keys, settings)
        assert load.facts.shape.bound is None
        planned_mib = compute(load) / MIB
        assert found.compute_mib - PRINTED_MIB <= planned_mib <= MOST_OVER * found.compute_mib, (widths, settings)


@pytest.mark.parametrize("architecture", BOUNDED)
def test_a_graph_that_was_not_measured_is_planned_as_an_upper_bound(architecture: str, oracle: Oracle) -> None:
    for settings in ({"n_ctx": 2048}, {"n_ctx": 16384, "n_seqs": 2, "unified": True}, {"n_ctx": 4096, "n_ubatch": 512}):
        keys = metadata(architecture)
        found = oracle.ask(keys, **settings)
        assert isinstance(found, Allocated), found
        load = load_of(keys, settings)
        assert load.facts.shape.bound is not None
        assert compute(load) / MIB >= found.compute_mib - PRINTED_MIB, settings
        assert sum(kv_by_layer(load)) / MIB >= found.kv_mib - PRINTED_MIB, settings


@pytest.mark.parametrize("name", MODELS)
def test_models_that_people_run_are_what_the_engine_lays_out(name: str, oracle: Oracle) -> None:
    keys = MODELS[name]
    for settings in REAL:
        found = oracle.ask(keys, **settings)
        assert isinstance(found, Allocated), found
        load = load_of(keys, settings)
        if name in WITHOUT_DENSE:
            load = msgspec.structs.replace(load, facts=msgspec.structs.replace(load.facts, n_ff_matrices=0))
        assert sum(kv_by_layer(load)) / MIB == pytest.approx(found.kv_mib, abs=0.0101), settings
        assert sum(state_by_layer(load)) / MIB == pytest.approx(found.state_mib, abs=0.0101), settings
        assert found.compute_mib - PRINTED_MIB <= compute(load) / MIB <= MOST_OVER * found.compute_mib, settings
