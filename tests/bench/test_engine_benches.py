"""`laya bench concurrency` and `latency` on real engines: the path that they name is the one that is measured."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from laya.bench import concurrency, latency
from laya.bench.both_ways import WORDS, BothWays, both_ways, paired, samples
from laya.bench.kv_use import Point, bars
from laya.errors import EngineFailed
from tests.conftest import ROOT

SMALL = ["--max-seq-len", "256", "--n-threads", "1"]
PROGRAM = ROOT / "tests" / "engines" / "xllamacpp_program.py"
COMMAND = """
models:
  own:
    engine: command
    cmd: [{python}, {program}, "${{PORT}}", {gguf}]
    served_model_name: their-name
    memory: 600MiB
    env: {{PYTHONSAFEPATH: "1"}}
"""


@pytest.fixture
def home(laya_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYA_HOME", str(laya_home))
    return laya_home


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (concurrency, "--sessions 1,0"),
        (concurrency, "--sessions x"),
        (concurrency, "--pairs 0"),
        (latency, "--max-tokens -1"),
        (latency, "--warm-pairs 0"),
    ],
)
def test_counts_of_nothing_are_refused_before_an_engine_is_loaded(
    bench: ModuleType, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(words.split())
    assert f"argument {words.split()[0]}: expected a whole number >= 1, got" in capsys.readouterr().err


@pytest.mark.engine
def test_concurrency_reports_both_ways_and_the_cache(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sessions", "1,2", "--pairs", "1", "--max-tokens", "6", "--prompt-words", "4", "--json"]
    assert concurrency.main([*words, *SMALL]) == 0
    (engine,) = last_line(capsys)["engines"]
    assert engine["engine"] == "llamacpp" and engine["proof"][-1] == "llamacpp:tokens_predicted_total"
    assert [row["sessions"] for row in engine["rows"]] == [1, 2]
    for row in engine["rows"]:
        assert row["tokens_per_s"]["bare"] > 0 < row["tokens_per_s"]["laya"]
        assert row["answer_tokens"] == 6 and row["verdict"] == "holds" and row["laya_before_engine_ms"] > 0
        assert max(promised for _, _, promised in row["kv_use"]) > 0
    assert set(engine["rows"][1]["over_one_session"]) == {"bare", "laya"}


@pytest.mark.engine
def test_latency_of_a_program_says_what_is_known_of_it(
    home: Path, tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(COMMAND.format(python=sys.executable, program=PROGRAM, gguf=smollm2_path))
    words = ["--model", "own", "--config", str(config), "--pairs", "1", "--warm-pairs", "2", "--max-tokens", "4"]
    assert latency.main([*words, "--prompt-words", "8"]) == 0
    (engine,) = last_line(capsys)["engines"]
    steps = {step["step"]: step["ms"] for step in engine["steps"]}
    assert engine["engine"] == "command"
    assert steps["choose the engine"] > 0 and steps["compute the prompt"] > 0
    assert steps["sample it"] is None  # its samplers are its own
    assert engine["warm"]["first_token_ms"]["laya"] > 0


@pytest.mark.engine
def test_answers_that_went_another_way_measure_nothing(home: Path) -> None:
    async def swapped() -> None:
        async with both_ways("smollm2", [*SMALL, "--max-num-seqs", "1"]) as ways:
            chats = [ways.chat(2, 2)]
            assert (await ways.turn("bare", chats)).n_tokens == 2
            ways.sides = {"bare": ways.sides["laya"], "laya": ways.sides["laya"]}
            with pytest.raises(EngineFailed, match="of the way 'bare' has x-laya-engine"):
                await ways.turn("bare", chats)

    asyncio.run(swapped())


def said() -> dict[str, Any]:
    bare = {"host": "127.0.0.1", "port": 1, "key": None, "model": "m", "base_path": "/v1", "headers": [["a", "b"]]}
    return {"engine": "remote", "model": "m", "settings": {}, "port": 2, "key": "k", "bare": bare | {"is_tls": False}}


def test_chats_have_the_same_words_and_never_begin_like_the_one_before() -> None:
    ways = BothWays(said(), ignores_eos=False)
    texts = [ways.chat(40, 1)["messages"][0]["content"].split() for _ in range(50)]
    assert len({tuple(sorted(words)) for words in texts}) == 1
    assert all(one[1] != other[1] for one, other in itertools.pairwise(texts))
    assert set(texts[0]) <= {"Words:", *WORDS}
    assert ways.chat(5, 1, is_kept=True) == ways.chat(5, 1, is_kept=True)


def test_pairs_are_compared_pair_by_pair() -> None:
    found = paired({"bare": [100.0, 50.0, 10.0], "laya": [99.0, 51.0, 10.0]}, is_ratio=True)
    assert (found.median, found.bare, found.laya) == (1.0, 50.0, 51.0)
    assert found.quartiles == pytest.approx((0.995, 1.01))
    assert paired({"bare": [1.0], "laya": [3.0]}, is_ratio=False).quartiles == (2.0, 2.0)


def test_an_interval_says_what_it_settles() -> None:
    pairs = [0.97 + 0.002 * number for number in range(16)]
    low, high = paired({"bare": [1.0] * 16, "laya": pairs}, is_ratio=True).interval
    assert pairs[0] < low < 0.985 < high < pairs[-1]
    assert paired({"bare": [1.0] * 400, "laya": pairs * 25}, is_ratio=True).interval > (low, 0)  # more pairs, narrower
    assert [concurrency.verdict((low, high), at_least) for at_least in (0.9, 0.985, 1.1)] == ["holds", "open", "fails"]


def test_metrics_and_bars() -> None:
    text = '# TYPE a counter\na_total{model="m",outcome="served"} 3\na_total_more 9\nb 2.5\n'
    assert samples(text, "a_total") == [('{model="m",outcome="served"}', 3.0)]
    assert samples(text, "b") == [("", 2.5)]
    assert bars([Point(0.0, 0.0, None), Point(0.1, 0.5, None), Point(0.2, 1.0, 1.0)]) == " ▄█ 100%"
    assert bars([Point(0.0, None, 0.5)]) == "not told"
