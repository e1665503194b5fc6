"""Tokens a second and time to first token: what they follow, and how rates are read off."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from machine_rates import RATES, READ, WAIT_S, WEIGHT_S, rates_with
from small_gguf import MakeGguf

from laya.bench.generated_models import SHAPES, generate
from laya.memory import Budget, plan_file, read_facts
from laya.memory.rates import MachineRates
from laya.memory.speed import Range, Speed, predict_speed
from laya.memory.work import work_of
from laya.types import MIB, AskedSettings

BIG = {"n_layer": 16, "n_embd": 2048, "n_head": 32, "n_head_kv": 8, "n_ff": 8192, "n_vocab": 320}


def speed(path: Path, plenty: Budget, rates: MachineRates = RATES, n_seqs: int = 8, **asked: int) -> Speed:
    settings = AskedSettings(max_num_seqs=n_seqs, max_seq_len=16384, n_threads=asked.pop("n_threads", 1))
    plan = plan_file(path, settings, plenty, model_id="m")
    return predict_speed(read_facts(path), plan.settings, rates, **asked)


def middle(values: Range) -> float:
    return (values.low + values.high) / 2


def test_work_of_a_file_is_every_matrix_a_token_passes(smollm2_path: Path) -> None:
    parts = {(each.part, each.type_name): each.elements for each in work_of(read_facts(smollm2_path))}
    assert parts == {("output", "Q8_0"): 49152 * 576, ("layers", "Q4_1"): 30 * (3 * 576 * 1536 + 2 * 576 * (576 + 192))}


def test_embedding_with_an_output_matrix_beside_it_is_looked_up(make_gguf: MakeGguf) -> None:
    output = [each for each in work_of(read_facts(make_gguf(tied=False))) if each.part == "output"]
    assert [each.elements for each in output] == [320 * 256]


def test_decode_is_bound_by_reading_and_computing(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    n_weights = sum(each.elements for each in work_of(read_facts(path)))
    each_s = 2 * WEIGHT_S * n_weights  # streamed: computing, and as long again waiting for memory
    found = speed(path, plenty, kept_tokens=1).tokens_per_s
    assert found.low < 1 / each_s < found.high
    assert found.high < 1.4 / each_s
    starved = rates_with(reads=((1, READ / 10), (1 << 40, READ / 10)))
    assert speed(path, plenty, starved, kept_tokens=1).tokens_per_s.high < READ / 10 / n_weights * 1.3


def test_context_slows_a_token_down_and_windows_stop_it(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    near, far = (speed(path, plenty, kept_tokens=kept) for kept in (16, 16000))
    assert far.tokens_per_s.high < near.tokens_per_s.high
    keys = {"attention.sliding_window": 512}
    windowed = make_gguf("windowed", architecture="gemma3", keys=keys, **BIG)
    assert middle(speed(windowed, plenty, kept_tokens=16000).tokens_per_s) > middle(far.tokens_per_s)


def test_sessions_gain_in_all_and_lose_each(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    found = [speed(path, plenty, sessions=n, kept_tokens=16) for n in (1, 2, 4, 8)]
    totals = [middle(each.tokens_per_s) for each in found]
    assert totals == sorted(totals)
    ones = [middle(each.each_per_s) for each in found]
    assert ones == sorted(ones, reverse=True)
    firsts = [middle(each.first_token_s) for each in found]
    assert firsts == sorted(firsts)


def test_sessions_beyond_max_num_seqs_wait(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    two, eight = (speed(path, plenty, n_seqs=2, sessions=n) for n in (2, 8))
    assert eight.tokens_per_s == two.tokens_per_s
    assert eight.first_token_s.low > 3 * two.first_token_s.low


def test_threads_help_as_far_as_memory_serves_them(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    one, four, forty = (middle(speed(path, plenty, n_threads=n).tokens_per_s) for n in (1, 4, 40))
    assert 1.5 * one < four < 4 * one
    assert forty == four


def test_token_passes_the_experts_it_is_sent_to(plenty: Budget, smollm2_path: Path, tmp_path: Path) -> None:
    path = generate(tmp_path / "moe.gguf", SHAPES["moe"], vocabulary=smollm2_path)
    settings = AskedSettings(max_num_seqs=8, max_seq_len=512, n_threads=1)
    planned = plan_file(path, settings, plenty, model_id="m").settings
    facts = read_facts(path)
    experts = sum(each.elements for each in work_of(facts) if each.part == "experts")
    assert experts == 6 * 3 * 32 * 512 * 256
    found = predict_speed(facts, planned, RATES, kept_tokens=1).tokens_per_s
    assert found.high > 1 / (WEIGHT_S * experts)  # faster than if all experts were computed with


def test_first_token_takes_as_long_as_the_prompt(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    short, long = (speed(path, plenty, prompt_tokens=n).first_token_s for n in (128, 1280))
    assert 8 < middle(long) / middle(short) < 14


def test_rates_between_and_beyond_what_was_timed() -> None:
    assert RATES.weight_s("Q8_0", 3) == pytest.approx(3 * WEIGHT_S)
    assert RATES.weight_s("Q8_0", 256) == pytest.approx(256 * WEIGHT_S)
    assert RATES.weight_s("IQ1_S", 1) == 2 * WEIGHT_S  # not timed: as slow as the slowest
    assert RATES.missed(1, 1) == 0
    assert RATES.missed(1 << 40, 4) == 1
    assert RATES.threads_gain(1) == 1
    assert RATES.threads_gain(4) == RATES.threads_gain(9) == 4
    assert RATES.attended_s("f16", 128) == pytest.approx(1e-8 + 128 * 2e-10)
    assert RATES.attended_s("q8_0", 128, 128) == pytest.approx(128 * 5e-10)
    assert RATES.attended_s("q4_1", 64) >= RATES.attended_s("f16", 64)  # not timed: as slow as the slowest


def test_heads_side_by_side_wait_longer_for_what_is_not_in_cache() -> None:
    one, four, eight, many = (RATES.kept_wait_of_row_s(n_heads, 128, 1 << 40) for n_heads in (1, 4, 8, 64))
    assert RATES.kept_wait_of_row_s(8, 128, 1) == 0
    assert one == pytest.approx(128 * WAIT_S)
    assert one < four < eight == many == pytest.approx(5 * one)


def test_row_between_others_waits_for_whole_lines_of_the_cache() -> None:
    wait_s = partial(RATES.kept_wait_of_row_s, n_bytes=1 << 40)
    assert wait_s(1, 68) == pytest.approx(68 * WAIT_S)  # alone, the next row has the rest of the line
    assert wait_s(8, 68) == pytest.approx((68 + 48) * 5 * WAIT_S)
    assert wait_s(8, 64) == pytest.approx(64 * 5 * WAIT_S)


def test_batch_waits_for_what_is_not_in_cache_once_for_each_tile(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    waits, not_at_all = (
        middle(speed(path, plenty, rates, prompt_tokens=1024).first_token_s)
        for rates in (RATES, rates_with(batch_wait_s=((1, ((MIB, 0.0),)),)))
    )
    assert waits > 1.01 * not_at_all


def test_what_is_missed_grows_with_the_set_between_two_that_were_timed() -> None:
    rates = rates_with(reads=((MIB, 40e9), (65 * MIB, 10e9)), reads_all=((MIB, 40e9), (65 * MIB, 10e9)))
    assert rates.missed(33 * MIB, 1) == pytest.approx(0.5)
    assert 1 / rates.read_bytes_per_s(33 * MIB, 1) == pytest.approx((1 / 40e9 + 1 / 10e9) / 2)


def test_kernels_of_the_engine_can_be_timed() -> None:
    """In a child, since ggml ends the process where it is used wrongly."""
    script = (
        "from laya.bench import rates\n"
        "rates.REPEATS = 1\n"
        "assert rates._weight_s('Q8_0', 1) > 0 and rates._weight_s('Q4_0', 8) > 0\n"
        "assert rates._row_s('q8_0', 64, 1) > 0 and rates._row_s('f16', 64, 128) > 0 and rates._kept_s(4, 2, 1) > 0\n"
        "assert rates._read_s(1, 1) > 0 and rates._cold_op_s(1) > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
