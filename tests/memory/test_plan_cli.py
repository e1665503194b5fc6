"""`laya plan`: its JSON, its exit codes, its spellings, and what a person reads."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from machine_rates import rates_with
from small_gguf import MakeGguf

from laya.cli.main import main
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import LayaError
from laya.memory import Machine
from laya.memory.rates import hardware_key
from laya.store import Store
from laya.types import PlannedSettings


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
    code, text = laya_plan(make_gguf(), "--max-num-seqs", 4, "--memory-budget", "8GiB")
    assert code == 0
    assert "two chats at once take less than 80 %: 2 sequences of" in text
    for words in ("budget 8.0 GiB (memory.budget)", "weights", "KV", "FITS", "chosen", "times the weights", "machine"):
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


# the other questions
def test_alternatives_are_commands_that_fit_when_pasted(laya_plan: Any, smollm2_path: Path) -> None:
    words = ("--max-seq-len", 8192, "--max-num-seqs", 8, "--memory-budget", "700MiB")
    code, text = laya_plan(smollm2_path, *words, "--json")
    seen = json.loads(text)
    assert code == 3
    assert len(seen["alternatives"]) >= 3
    assert any("--gpu-memory" in each["command"] for each in seen["alternatives"])
    for each in seen["alternatives"]:
        verb, *pasted = shlex.split(each["command"].removeprefix("laya "))
        assert verb == "plan"
        code, text = laya_plan(*pasted, "--json")
        again = json.loads(text)
        assert code == 0, each
        assert again["fits"]
        assert sum(device["total_bytes"] for device in again["devices"]) == each["total_bytes"], each


def test_model_too_large_for_any_setting_still_has_three_alternatives(laya_plan: Any) -> None:
    code, text = laya_plan(
        "qwen3-32b", "--max-seq-len", 32768, "--max-num-seqs", 8, "--memory-budget", "8GiB", "--json"
    )
    found = json.loads(text)["alternatives"]
    assert code == 3
    assert len(found) >= 3
    assert any("smaller" in each["note"] for each in found)
    assert any("card" in each["note"] for each in found)
    for each in found:
        assert laya_plan(*shlex.split(each["command"].removeprefix("laya plan ")))[0] == 0, each


def test_fewer_bits_of_the_same_model_are_found_on_this_disk(
    laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    big = {"n_layer": 8, "n_embd": 1024, "n_ff": 4096}
    for weights in ("F16", "Q8_0"):
        make_gguf(f"models/Mine-{weights}", weights=weights, **big)
    asked = ("--max-seq-len", 32768, "--max-num-seqs", 2, "--kv-cache-dtype", "f16")
    need = json.loads(laya_plan("Mine-Q8_0", *asked, "--json")[1])["devices"][0]["total_bytes"]
    code, text = laya_plan("Mine-F16", *asked, "--memory-budget", need, "--json")
    notes = {each["note"]: each["command"] for each in json.loads(text)["alternatives"]}
    assert code == 3
    assert "laya plan mine-q8_0 " in notes["the same model in fewer bits"].casefold()


def test_table_is_the_grid_for_people_and_as_json(laya_plan: Any, make_gguf: MakeGguf) -> None:
    code, text = laya_plan(make_gguf(), "--table", "--memory-budget", "1GiB")
    assert code == 0
    assert "32768" in text
    assert "+" in text
    seen = json.loads(laya_plan(make_gguf(), "--table", "--memory-budget", "1GiB", "--json")[1])
    assert seen["budget_bytes"] == 1 << 30
    assert all(cell["fits"] is (cell["need_bytes"] <= 1 << 30) for cell in seen["cells"])


def test_compare_shows_the_articles_two_configs(laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path) -> None:
    path = make_gguf(n_layer=8, n_head_kv=4)
    (tmp_path / "old.yaml").write_text("version: 1\nmax_seq_len: 32768\nmax_num_seqs: 8\n")
    (tmp_path / "new.yaml").write_text("version: 1\nmax_seq_len: 4096\nmax_num_seqs: 1\nenable_streaming: true\n")
    code, text = laya_plan(path, "--compare", "old.yaml", "new.yaml")
    assert code == 0
    for words in ("old.yaml", "new.yaml", "changed", "x less", "kv_cache"):
        assert words in text
    seen = json.loads(laya_plan(path, "--compare", "old.yaml", "new.yaml", "--json")[1])
    ((old, new),) = seen["models"].values()
    kv = [side["plan"]["devices"][0]["terms"]["kv_cache"] for side in (old, new)]
    assert kv[0] == 64 * kv[1]
    (tmp_path / "new.yaml").write_text("version: 1\nmodels: {gone: {source: /nowhere/gone.gguf}}\n")
    seen = json.loads(laya_plan("--compare", "old.yaml", "new.yaml", "--json")[1])
    assert "gone" in seen["models"]["gone"][1]["error"]


def test_description_is_planned_by_its_figures(laya_plan: Any, tmp_path: Path) -> None:
    params = {"n_layer": 32, "n_head": 32, "n_head_kv": 32, "n_embd": 4096, "n_ff": 11008, "n_vocab": 32000}
    (tmp_path / "7b.json").write_text(json.dumps({"arch": "llama", "params": params}))
    words = ("--params", "7b.json", "--max-seq-len", 4096, "--max-num-seqs", 1, "--memory-budget", "90%", "--json")
    seen = json.loads(laya_plan(*words)[1])
    assert seen["model"] == "7b"
    assert seen["exact"] is False
    assert seen["settings"]["max_seq_len"] == 4096
    seen = json.loads(laya_plan(*words[:-1], "--gpu-memory", "24GiB", "--json")[1])
    gpu = seen["devices"][1]
    assert gpu["device"] == "gpu0"
    assert gpu["terms"]["kv_cache"] == 2 << 30  # the article's 2 GB at 4096 tokens
    assert seen["fits"]


def test_no_speed_is_made_up_for_cards(laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path) -> None:
    """Neither with rates of the CPU at hand, nor for vLLM."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8,
              "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048, "vocab_size": 32000,
              "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "hf.json").write_text(json.dumps(config))
    for words in ((make_gguf(), "--gpu-memory", "24GiB"), ("hf.json", "--vllm", "--gpu-memory", "24GiB")):
        assert "not predicted on cards" in laya_plan(*words)[1]
        speed = json.loads(laya_plan(*words, "--json")[1])["speed"]
        assert speed["estimate"] is None and "measured no card" in speed["why"]


def test_whole_config_says_what_coexists_and_what_makes_way(
    laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    path = make_gguf(n_layer=8, n_head_kv=4)
    fixed = f"source: {path}, max_seq_len: 32768, max_num_seqs: 2, kv_cache_dtype: f16"
    others = f"c: {{source: {path}}}, gone: {{source: /no/x.gguf}}"
    models = f"models: {{a: {{{fixed}}}, b: {{{fixed}, pinned: true}}, {others}}}"
    (tmp_path / "config.yaml").write_text(f"version: 1\nmemory: {{budget: 1GiB}}\n{models}\n")
    need = json.loads(laya_plan("a", "--json")[1])["devices"][0]["total_bytes"]
    (tmp_path / "config.yaml").write_text(f"version: 1\nmemory: {{budget: {2 * need - 1}}}\n{models}\n")
    code, text = laya_plan("--json")
    seen = json.loads(text)
    assert code == 2  # `gone` is not there
    assert set(seen["plans"]) == {"a", "b", "c"}
    assert "x.gguf" in seen["errors"]["gone"]
    found = {(each["asked"], each["loaded"]): each["outcome"] for each in seen["meetings"]}
    assert found["a", "b"] == "refused"
    assert found["b", "a"] == "unloads"
    assert found["c", "a"] == "smaller"
    code, text = laya_plan()
    for words in ("together", "refused beside b", "unloads a", "pinned", "where one other model is loaded"):
        assert words in text


def test_whole_config_counts_each_replica(laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path) -> None:
    path = make_gguf()
    config = tmp_path / "config.yaml"
    config.write_text(f"models: {{a: {{source: {path}, replicas: 2}}, b: {{source: {path}}}}}\n")
    code, text = laya_plan("--config", config, "--memory-budget", "8GiB", "--json")
    seen = json.loads(text)
    assert code == 0 and seen["replicas"] == {"a": 2, "b": 1}
    need = {name: sum(device["total_bytes"] for device in plan["devices"]) for name, plan in seen["plans"].items()}
    between = need["a"] + need["b"] + need["a"] // 2
    code, text = laya_plan("--config", config, "--memory-budget", f"{between}", "--json")
    assert ["a", "b"] not in [sorted(chosen) for chosen in json.loads(text)["together"]]
    assert "2 x " in laya_plan("--config", config, "--memory-budget", "8GiB")[1]


def test_speed_is_told_where_it_was_measured(laya_plan: Any, make_gguf: MakeGguf, tmp_path: Path) -> None:
    seen = json.loads(laya_plan(make_gguf(), "--json")[1])
    assert seen["speed"] == {"estimate": None, "why": "not measured: `laya doctor` measures this machine once"}
    rates = rates_with(hardware=hardware_key(Machine()))
    with Store(tmp_path / "home" / "laya.db") as store:
        store.keep_rates(rates.hardware, msgspec.json.encode(rates).decode())
    rows = json.loads(laya_plan(make_gguf(), "--json")[1])["speed"]["estimate"]
    assert [row["sessions"] for row in rows] == [1, 2, 4, 8]
    assert all(row["tokens_per_s"]["low"] < row["tokens_per_s"]["high"] for row in rows)
    assert "tok/s at" in laya_plan(make_gguf())[1]
    with Store(tmp_path / "home" / "laya.db") as store:
        store.keep_rates(rates.hardware, '{"from": "an older Laya"}')
    assert json.loads(laya_plan(make_gguf(), "--json")[1])["speed"]["estimate"] is None


def test_every_setting_with_help_is_in_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--memory-limit" in capsys.readouterr().out


def test_weights_rule_says_by_how_much_it_is_wrong(laya_plan: Any, make_gguf: MakeGguf) -> None:
    code, text = laya_plan(make_gguf(), "--max-seq-len", 32768, "--max-num-seqs", 8)
    assert code == 0
    assert "too little" in text
    seen = json.loads(laya_plan(make_gguf(), "--max-seq-len", 32768, "--max-num-seqs", 8, "--json")[1])
    assert seen["weights_rule"]["need_over_high"] > 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("smolm2",), "smollm2"),
        (("--table",), "laya plan MODEL --table"),
        (("smollm2", "--tabel"), "Did you mean --table?"),
        (("smollm2", "--max-seq-lenn", "5"), "Did you mean --max-seq-len?"),
        (("--params", "none.json"), "none.json"),
        (("--params", "x.yaml"), "JSON is malformed"),
        (("--params", "x.yaml", "smollm2"), "leave out 'smollm2'"),
        (("--compare", "x.yaml", "x.yaml", "--table"), "one at a time"),
        (("smollm2", "--gpu-memory", "big"), "24GiB"),
        (("smollm2", "--gpu-memory", "0"), "24GiB"),
        (("none.json",), "none.json"),
    ],
)
def test_questions_that_cannot_be_answered_are_named(
    laya_plan: Any, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "x.yaml").write_text("version: 1\n")
    with pytest.raises(LayaError) as caught:
        laya_plan(*words)
    assert caught.value.exit_code == 2
    assert said in caught.value.message


@pytest.mark.engine
def test_alternatives_load_on_the_real_engine_within_their_plans(laya_plan: Any, smollm2_path: Path) -> None:
    words = ("--max-seq-len", 8192, "--max-num-seqs", 8, "--memory-budget", "700MiB", "--json")
    for each in json.loads(laya_plan(smollm2_path, *words)[1])["alternatives"][:2]:
        pasted = shlex.split(each["command"].removeprefix("laya plan "))
        settings = msgspec.convert(json.loads(laya_plan(*pasted, "--json")[1])["settings"], PlannedSettings)
        peak_bytes = asyncio.run(_peak_of(smollm2_path, settings))
        assert 0 < peak_bytes <= each["total_bytes"], each


async def _peak_of(path: Path, planned: PlannedSettings) -> int:
    engine = EngineProcess(EngineSettings(model_id="m", path=path, planned=planned), EngineLog())
    await engine.start()
    try:
        reading = engine.measure()
        assert reading is not None
        return reading.peak_bytes
    finally:
        await engine.stop()
