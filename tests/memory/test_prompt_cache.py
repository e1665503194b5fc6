"""The engine's cache of old prompts: a term of its own, as large as was asked, and of use only for chats."""

from __future__ import annotations

from typing import Any

import pytest
from small_gguf import MakeGguf

from laya.config import load_config, parse_engine_flags, parse_settings
from laya.config.schema import Config
from laya.errors import ConfigError
from laya.memory import Budget, plan_file
from laya.memory.caches import sequence_bytes
from laya.memory.engine_facts import LLAMA_SERVER, XLLAMACPP
from laya.memory.facts import read_facts
from laya.memory.planner import Choice, Model, decide, load_of, price
from laya.types import GIB, MIB, AskedSettings, Plan

CHOICE = Choice(max_num_seqs=2, max_seq_len=2048, kv_cache_dtype="f16")


def planned(make_gguf: MakeGguf, budget: Budget, prompt_cache_bytes: int | None, **asked: Any) -> Plan:
    settings = AskedSettings(max_num_seqs=2, max_seq_len=2048, prompt_cache_bytes=prompt_cache_bytes, **asked)
    return plan_file(make_gguf(n_layer=4, n_head_kv=4), settings, budget, model_id="m")


def test_nothing_is_kept_and_counted_unless_it_is_asked_for(make_gguf: MakeGguf, plenty: Budget) -> None:
    plan = planned(make_gguf, plenty, AskedSettings().prompt_cache_bytes)
    assert plan.settings.prompt_cache_bytes == 0
    assert "prompt_cache" not in plan.devices[0].terms
    assert "prompt_cache_bytes" not in plan.reasons


def test_what_is_asked_is_a_term_and_what_the_engine_gets(make_gguf: MakeGguf, plenty: Budget) -> None:
    none, some = planned(make_gguf, plenty, 0), planned(make_gguf, plenty, 64 * MIB + 5)
    assert some.settings.prompt_cache_bytes == 64 * MIB, "the engine counts whole mebibytes"
    assert some.need_bytes - none.need_bytes == some.devices[0].terms["prompt_cache"] >= 64 * MIB


def test_engine_that_may_pass_its_limit_has_one_sequence_more_planned(make_gguf: MakeGguf) -> None:
    facts, asked = read_facts(make_gguf(n_layer=4)), AskedSettings(prompt_cache_bytes=64 * MIB)
    terms = []
    for engine in (XLLAMACPP, LLAMA_SERVER):
        model = Model(id="m", facts=facts, engine=engine, n_cores=1)
        terms.append(price(model, decide(model, asked, CHOICE))["cpu"]["prompt_cache"])
    one_sequence = sequence_bytes(load_of(model, decide(model, asked, CHOICE)))
    assert terms == [64 * MIB, 64 * MIB + one_sequence]


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_what_is_never_continued_is_not_kept(make_gguf: MakeGguf, plenty: Budget, task: Any) -> None:
    for asked in (64 * MIB, None):
        assert planned(make_gguf, plenty, asked, task=task).settings.prompt_cache_bytes == 0


def test_auto_is_one_conversation_a_sequence_where_half_of_the_memory_stays_free(
    make_gguf: MakeGguf, plenty: Budget
) -> None:
    plan = planned(make_gguf, plenty, None)
    assert plan.settings.prompt_cache_bytes == plan.devices[0].terms["kv_cache"], "in whole mebibytes already"
    assert "take turns" in plan.reasons["prompt_cache_bytes"]
    tight = Budget(bytes=2 * plan.need_bytes - 1, limit="memory available", memory_bytes=GIB, ceiling_bytes=GIB)
    plan = planned(make_gguf, tight, None)
    assert plan.fits
    assert plan.settings.prompt_cache_bytes == 0
    assert "half of the memory" in plan.reasons["prompt_cache_bytes"]


def test_pools_sequence_is_one_of_full_length(make_gguf: MakeGguf, plenty: Budget) -> None:
    plan = planned(make_gguf, plenty, None, kv_pool_tokens=2048)
    assert plan.settings.kv_unified
    assert plan.settings.prompt_cache_bytes == 2 * plan.devices[0].terms["kv_cache"]


def test_refusal_names_the_same_model_without_the_cache(make_gguf: MakeGguf, plenty: Budget) -> None:
    without = planned(make_gguf, plenty, 0).need_bytes
    small = Budget(bytes=without + MIB, limit="memory available", memory_bytes=GIB, ceiling_bytes=GIB)
    plan = planned(make_gguf, small, 64 * MIB)
    assert not plan.fits
    assert ("--prompt-cache 0", without) in [(each.flags, each.total_bytes) for each in plan.suggestions]


@pytest.mark.parametrize(
    ("written", "expected"), [("256MiB", 256 * MIB), (0, 0), ("0", 0), ("auto", None), (3 * MIB, 3 * MIB)]
)
def test_amount_is_written_as_other_amounts_are(written: Any, expected: int | None) -> None:
    config = Config(prompt_cache=parse_settings({"prompt_cache": written}).prompt_cache)
    assert config.for_model("m").asked().prompt_cache_bytes == expected
    assert parse_engine_flags(["--prompt-cache", str(written)])["prompt_cache"] == (
        "auto" if expected is None else expected
    )


@pytest.mark.parametrize("written", ["lots", "100KiB", -1, None, "10%"])
def test_amount_that_is_none_is_refused_by_name(written: Any) -> None:
    with pytest.raises(ConfigError, match="prompt_cache"):
        parse_settings({"prompt_cache": written})


def test_llama_cpps_own_spellings_are_answered(tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("cache_ram: 512\n")
    with pytest.raises(ConfigError, match="prompt_cache: 512MiB"):
        load_config(path, {})
    with pytest.raises(ConfigError, match="--prompt-cache 256MiB"):
        parse_engine_flags(["-cram", "512"])
