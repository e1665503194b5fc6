"""`laya plan`: its JSON, its exit codes, its spellings, and what a person reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from small_gguf import MakeGguf

from laya.cli.plan import plan
from laya.errors import LayaError


@pytest.fixture
def laya_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`laya_plan(*words)` -> (exit code, what it printed), in a folder without a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(plan)

    def run(*words: object) -> tuple[int, str]:
        code = app(args=[str(word) for word in words], standalone_mode=False)
        return code if isinstance(code, int) else 0, capsys.readouterr().out

    return run


def test_json_of_the_default_model_is_exact(laya_plan: Any, smollm2_path: Path) -> None:
    code, text = laya_plan(smollm2_path, "--max-seq-len", 8192, "--max-num-seqs", 4, "--json")
    seen = json.loads(text)
    assert code == 0
    assert seen["fits"] is True
    (device,) = seen["devices"]
    assert device["device"] == "cpu"
    assert device["terms"]["kv_cache"] == 754974720
    assert {"weights", "kv_cache", "compute", "overhead"} <= device["terms"].keys()
    assert device["total_bytes"] == sum(device["terms"].values()) < device["budget_bytes"]
    assert seen["settings"]["max_seq_len"] == 8192
    assert seen["settings"]["max_num_seqs"] == 4
    assert seen["suggestions"] == []
    assert seen["verdict"]
    assert seen["limit"]


def test_exit_code_3_and_suggestions_where_it_does_not_fit(laya_plan: Any, smollm2_path: Path) -> None:
    code, text = laya_plan(smollm2_path, "--memory-budget", "100MiB", "--json")
    seen = json.loads(text)
    assert code == 3
    assert seen["fits"] is False
    assert len(seen["suggestions"]) >= 3


def test_ledger_for_people_names_terms_reasons_and_the_rule(laya_plan: Any, make_gguf: MakeGguf) -> None:
    code, text = laya_plan(make_gguf(), "--memory-budget", "8GiB")
    assert code == 0
    for words in ("budget 8.0 GiB (memory.budget)", "weights", "KV", "FITS", "chosen", "weights x 1.5-2", "rule"):
        assert words in text
    code, text = laya_plan(make_gguf(), "--max-num-seqs", 8, "--memory-budget", "60MiB")
    assert code == 3
    for words in ("DOES NOT FIT", "These do (planned the same way)", "yours", "max_num_seqs 8", "Nothing was loaded"):
        assert words in text


@pytest.mark.parametrize(
    "words",
    [
        ("--max-seq-len", 4096, "--max-num-seqs", 2, "--kv-cache-dtype", "q8_0"),
        ("--max-model-len", 4096, "--max-num-seqs", 2, "--kv-cache-dtype", "q8_0"),
        ("--ctx-size", 8192, "--parallel", 2, "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
        ("-c", 8192, "-np", 2, "-ctk", "q8_0"),
    ],
)
def test_spellings_of_other_servers_mean_the_same(laya_plan: Any, make_gguf: MakeGguf, words: tuple[Any, ...]) -> None:
    code, text = laya_plan(make_gguf(), *words, "--json")
    seen = json.loads(text)
    settings = seen["settings"]
    assert code == 0
    assert (settings["max_seq_len"], settings["max_num_seqs"], settings["kv_cache_dtype"]) == (4096, 2, "q8_0")
    is_total = words[0] in ("-c", "--ctx-size")
    assert any("total of all slots" in note for note in seen["notes"]) is is_total


def test_config_is_read_and_flags_win(laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path) -> None:
    path = make_gguf()
    config = tmp_path / "mine.yaml"
    models = f"models: {{mine: {{source: {path}, max_seq_len: 1024}}}}"
    config.write_text(f"version: 1\nmax_num_seqs: 3\nmemory: {{budget: 7GiB}}\n{models}\n")
    seen = json.loads(laya_plan("mine", "--config", config, "--json")[1])
    assert seen["model"] == "mine"
    assert (seen["settings"]["max_seq_len"], seen["settings"]["max_num_seqs"]) == (1024, 3)
    assert seen["devices"][0]["budget_bytes"] == 7 << 30
    seen = json.loads(laya_plan("mine", "--config", config, "--max-seq-len", 2048, "--json")[1])
    assert seen["settings"]["max_seq_len"] == 2048


def test_catalogue_model_that_is_not_here_is_planned_from_its_shape(laya_plan: Any) -> None:
    _, text = laya_plan("smollm2", "--max-seq-len", 8192, "--max-num-seqs", 4, "--json")
    seen = json.loads(text)
    assert seen["model"] == "smollm2-135m"
    assert seen["exact"] is False
    assert seen["devices"][0]["terms"]["kv_cache"] == 754974720


def test_bad_files_names_and_settings_end_with_code_2(laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "web.gguf").write_text("<!doctype html>")
    truncated = make_gguf("truncated")
    truncated.write_bytes(truncated.read_bytes()[:-5000])
    for words, said in (
        ([tmp_path / "empty.gguf"], "empty"),
        ([tmp_path / "web.gguf"], "not a GGUF file"),
        ([truncated], "bytes of tensor data are missing"),
        (["nosuchmodel"], "nosuchmodel"),
        ([make_gguf(), "--max-seq-len", 10**6], "32768"),
        ([make_gguf(), "--kv-cache-dtype", "q9"], "q9"),
        ([make_gguf(), "--memory-budget", "much"], "much"),
    ):
        with pytest.raises(LayaError) as caught:
            laya_plan(*words)
        assert caught.value.exit_code == 2
        assert said in caught.value.message
