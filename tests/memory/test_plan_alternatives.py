"""`laya plan` of what does not fit: always three commands at least, each of which fits when pasted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from laya.errors import LayaError
from laya.memory import Machine
from laya.memory.machine import LEAST_BYTES, LEAST_COMMAND
from laya.types import MIB

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "head_dim": 128,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "intermediate_size": 12288, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip


def alternatives(laya_plan: Any, line: str) -> list[str]:
    """The commands named instead of this one; each was pasted, fits, and needs what was said."""
    code, text = laya_plan(*shlex.split(line), "--json")
    assert code == 3
    found = json.loads(text)["alternatives"]
    for each in found:
        code, text = laya_plan(*shlex.split(each["command"].removeprefix("laya plan ")), "--json")
        again = json.loads(text)
        assert code == 0 and again["fits"], each
        assert sum(device["total_bytes"] for device in again["devices"]) == each["total_bytes"], each
    return [each["command"] for each in found]


@pytest.mark.parametrize("memory", ["24GiB", "4GiB", "150MiB"])
@pytest.mark.parametrize("model", ["moe.json", "llama-3.3-70b", "mistral-small-24b", "qwen3-embedding-0.6b", "smollm2"])
def test_three_alternatives_fit_when_pasted(laya_plan: Any, tmp_path: Path, model: str, memory: str) -> None:
    (tmp_path / "moe.json").write_text(json.dumps(MOE))
    line = f"{model} --memory {memory}"
    if laya_plan(*line.split())[0] == 0:
        return
    assert len(alternatives(laya_plan, line)) >= 3


@pytest.mark.parametrize("line", ["smollm2 --memory-limit 100MiB", "smollm2 --memory-budget 100MiB"])
def test_the_users_own_limits_are_raised_in_mib(laya_plan: Any, line: str) -> None:
    _, flag, _ = line.split()
    found = alternatives(laya_plan, line)
    assert len(found) >= 3
    values = [shlex.split(command)[shlex.split(command).index(flag) + 1] for command in found]
    assert all(value.endswith("MiB") for value in values)


def test_limit_of_the_model_is_what_bounds_it_in_json_and_for_people(laya_plan: Any) -> None:
    seen = json.loads(laya_plan("smollm2", "--memory-limit", "100MiB", "--json")[1])
    assert seen["limit"] == "memory_limit"
    assert len(seen["suggestions"]) >= 3
    assert seen["devices"][0]["budget_bytes"] == 100 << 20
    assert "budget 100 MiB (memory_limit)" in laya_plan("smollm2", "--memory-limit", "100MiB")[1]
    assert "100 MiB may be used (memory_limit)" in laya_plan("smollm2", "--memory-limit", "100MiB", "--table")[1]


def test_several_models_of_the_catalogue_are_named_the_largest_first(laya_plan: Any) -> None:
    found = alternatives(laya_plan, "llama-3.3-70b --memory 24GiB")
    names = [command.split()[2] for command in found]
    assert names[0].startswith("phi-4") and names[1].startswith("qwen3-14b")
    assert any("--gpu-memory 48GiB" in command for command in found)


def test_below_every_model_the_least_that_does_is_a_command(laya_plan: Any) -> None:
    found = alternatives(laya_plan, "llama-3.3-70b --memory 16GiB --memory-limit 100MiB")
    assert any("smollm2-135m --memory-limit " in command and "--max-seq-len 512" in command for command in found)
    found = alternatives(laya_plan, "qwen3-8b --memory 150MiB")
    assert any("smollm2-135m --max-num-seqs 1 --max-seq-len 512 --memory " in command for command in found)


def test_several_cards_where_none_that_is_sold_is_enough(laya_plan: Any, tmp_path: Path) -> None:
    (tmp_path / "moe.json").write_text(json.dumps(MOE))
    found = alternatives(laya_plan, "moe.json --memory 24GiB")
    assert any("--gpu-memory" in command and "GiB,141GiB" in command for command in found)


def test_budget_above_the_machine_is_not_lowered_in_silence(laya_plan: Any) -> None:
    seen = json.loads(laya_plan("smollm2", "--memory-budget", "900GiB", "--json")[1])
    assert any("memory.budget 900GiB is more than can be had here" in note for note in seen["notes"])
    for words in (("smollm2", "--table"), (), ("smollm2",)):
        assert "900GiB is more than" in laya_plan(*words, "--memory-budget", "900GiB")[1].replace("\n", " ")
    assert json.loads(laya_plan("smollm2", "--memory-budget", "90%", "--json")[1])["notes"] == seen["notes"][:1]


def test_memory_that_is_not_here_is_planned_with(laya_plan: Any) -> None:
    seen = json.loads(laya_plan("smollm2", "--memory", "1TiB", "--json")[1])
    assert seen["devices"][0]["budget_bytes"] > Machine().memory().total_bytes
    assert seen["limit"] == "a machine with 1024.0 GiB free"
    with pytest.raises(LayaError, match="--memory 'much' is not an amount"):
        laya_plan("smollm2", "--memory", "much")


def test_a_config_that_names_what_is_not_there_ends_with_code_2(laya_plan: Any, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("version: 1\nmodels: {smollm2: {max_num_seqs: 1}}\n")
    (tmp_path / "c.yaml").write_text("version: 1\nmodels: {smollm2: {max_num_seqs: 1}, ghost: {max_num_seqs: 1}}\n")
    code, text = laya_plan("--compare", "a.yaml", "c.yaml")
    assert code == 2
    assert "c.yaml: The model 'ghost' does not exist" in text
    assert "a.yaml:" not in text
    assert "not in it" in text
    assert laya_plan("--compare", "a.yaml", "a.yaml")[0] == 0
    assert laya_plan("--config", "c.yaml")[0] == 2
    with pytest.raises(LayaError) as caught:
        laya_plan("ghost", "--config", "c.yaml")
    assert caught.value.exit_code == 2
    code, text = laya_plan("ghoul", "--compare", "a.yaml", "c.yaml")
    assert code == 2
    assert "a.yaml: The model 'ghoul'" in text and "c.yaml: The model 'ghoul'" in text


def test_compare_plans_in_the_memory_that_was_asked(laya_plan: Any, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("version: 1\n")
    words = ("smollm2", "--compare", "a.yaml", "a.yaml")
    assert laya_plan(*words)[0] == 0
    assert laya_plan(*words, "--memory-budget", "100MiB")[0] == 3
    assert laya_plan(*words, "--memory", "150MiB")[0] == 3


def test_what_is_said_of_several_loaded_models_is_said_of_either(laya_plan: Any, tmp_path: Path) -> None:
    models = ", ".join(f"{name}: {{source: smollm2, max_num_seqs: 1}}" for name in ("m1", "m2", "m3"))
    (tmp_path / "config.yaml").write_text(f"version: 1\nmodels: {{{models}}}\n")
    code, text = laya_plan("--memory", "2GiB")
    assert code == 0
    assert "where one other model is loaded:" in text
    assert "asked for m2  ->  beside m1 or m3" in text


def test_least_that_a_server_names_is_a_plan_that_fits(laya_plan: Any) -> None:
    words = LEAST_COMMAND.removeprefix("laya serve ").split()
    assert laya_plan(*words, "--memory", f"{LEAST_BYTES // MIB}MiB")[0] == 0
