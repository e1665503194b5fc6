"""`laya plan` of Hugging Face models, here and elsewhere, and in vLLM's terms."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from laya.errors import ConfigError, DownloadError, LayaError
from laya.memory.gpu import GpuMemory
from laya.types import GIB

from .conftest import FileServer
from .test_remote import CONFIG, hf_files

pytestmark = pytest.mark.usefixtures("home")
Run = Callable[..., tuple[int, str]]
EIGHT_BILLION = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "eight" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(EIGHT_BILLION))
    return path


def test_folder_hub_and_config_agree(
    laya_plan: Run, hub: Callable[..., None], server: FileServer, tmp_path: Path
) -> None:
    files = hf_files()
    hub("org/Tiny", files)
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    asked = ("--max-num-seqs", 1, "--max-seq-len", 1024, "--json")
    seen = {}
    for word in (folder, "hf://org/Tiny", f"{server.url}/org/Tiny"):
        code, text = laya_plan(word, *asked)
        assert code == 0
        seen[str(word)] = json.loads(text)["devices"][0]["terms"]
    assert len({json.dumps(terms) for terms in seen.values()}) == 1
    code, text = laya_plan(server.serve("/x/config.json", json.dumps(CONFIG).encode()), *asked)
    assert code == 0
    assert any("computed from config.json" in note for note in json.loads(text)["notes"])


def test_address_that_fails_is_one_sentence(laya_plan: Run, server: FileServer) -> None:
    with pytest.raises(DownloadError, match="nothing at this address"):
        laya_plan(server.url + "/none.gguf")


def test_vllm_ledger_of_a_card(laya_plan: Run, config_path: Path) -> None:
    code, text = laya_plan(config_path, "--vllm", "--gpu-memory", "24GiB")
    assert code == 0
    assert "gpu0" in text and "graphs" in text and "FITS" in text
    assert "vLLM would keep 5.3 GiB a GPU for its KV cache: 43232 tokens, 1.32 sequences of 32768" in text


def test_vllm_json_takes_all_cards_side_by_side(laya_plan: Run, config_path: Path) -> None:
    code, text = laya_plan(config_path, "--vllm", "--gpu-memory", "16GiB,16GiB", "--kv-cache-dtype", "fp8", "--json")
    seen = json.loads(text)
    assert code == 0 and seen["fits"] and seen["engine"] == "vllm"
    assert seen["vllm"]["tensor_parallel_size"] == 2
    assert [device["device"] for device in seen["devices"]] == ["gpu0", "gpu1", "cpu"]
    assert seen["settings"]["kv_cache_dtype"] == "fp8"
    code, text = laya_plan(config_path, "--vllm", "--gpu-memory", "16GiB,16GiB", "-pp", 2, "--json")
    assert (
        json.loads(text)["vllm"] | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2} == json.loads(text)["vllm"]
    )


def test_vllm_is_planned_alike_by_flag_by_engine_and_by_the_config(
    laya_plan: Run, config_path: Path, tmp_path: Path
) -> None:
    cards = ("--memory", "64GiB", "--gpu-memory", "24GiB,24GiB", "--json")  # what is free here now changes
    words = ("--kv-cache-dtype", "fp8", "--gpu-memory-utilization", 0.9, "--gpus", "1")
    by_flag = json.loads(laya_plan(config_path, "--vllm", *words, *cards)[1])
    by_engine = json.loads(laya_plan(config_path, "--engine", "vllm", *words, *cards)[1])
    file = tmp_path / "one.yaml"
    entry = {"source": str(config_path), "engine": "vllm", "kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.9}
    file.write_text(json.dumps({"version": 1, "models": {"m": entry | {"gpus": [1]}}}))
    by_config = json.loads(laya_plan("m", "--config", file, *cards)[1])
    assert by_flag["settings"]["kv_cache_dtype"] == "fp8"
    assert by_flag["devices"][0]["device"] == "gpu1"
    assert by_flag["devices"][0]["budget_bytes"] == int(0.9 * 24 * 1024**3)
    assert by_flag["devices"] == by_engine["devices"] == by_config["devices"]


def test_vllm_on_the_cards_of_this_machine_within_their_limits(
    laya_plan: Run, config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = GpuMemory(index=0, name="card", total_bytes=80 * GIB, free_bytes=79 * GIB, own_bytes=0)
    monkeypatch.setattr("laya.cli.plan_vllm.GpuMeter.read", lambda self: [card])
    words = (config_path, "--vllm", "--json")
    assert json.loads(laya_plan(*words)[1])["devices"][0]["budget_bytes"] == 79 * GIB - round(0.03 * 80 * GIB)
    (tmp_path / "config.yaml").write_text('version: 1\nmemory: {gpu: {"0": 22GiB}}\n')
    assert json.loads(laya_plan(*words)[1])["devices"][0]["budget_bytes"] == 22 * GIB


def test_vllm_refusal_has_alternatives_that_fit(laya_plan: Run, config_path: Path) -> None:
    words = ("--vllm", "--gpu-memory", "24GiB", "--max-num-seqs", 8, "--max-seq-len", 32768)
    code, text = laya_plan(config_path, *words, "--json")
    others = json.loads(text)["alternatives"]
    assert code == 3
    assert len(others) >= 3
    for other in others:
        command = shlex.split(other["command"])
        assert command[:2] == ["laya", "plan"]
        assert laya_plan(*command[2:])[0] == 0, other["command"]
    assert "These do" in laya_plan(config_path, *words)[1]


def test_vllm_alternatives_keep_what_was_said(laya_plan: Run, config_path: Path, tmp_path: Path) -> None:
    """So each is planned as it was: its bytes are those that the command gives."""
    (tmp_path / "other.yaml").write_text("version: 1\n")
    said = ("--enforce-eager", "--max-num-batched-tokens", 4096, "--gpu-memory-utilization", 0.8, "-tp", 1)
    wide = ("--max-num-seqs", 8, "--max-seq-len", 32768)
    words = ("--vllm", "--gpu-memory", "24GiB", *wide, *said, "--config", "other.yaml", "--json")
    others = json.loads(laya_plan(config_path, *words)[1])["alternatives"]
    assert others
    for other in others:
        command = shlex.split(other["command"])
        plan = json.loads(laya_plan(*command[2:], "--json")[1])
        assert plan["vllm"]["enforce_eager"] and plan["vllm"]["max_num_batched_tokens"] == 4096
        on_cards = [device["total_bytes"] for device in plan["devices"] if device["device"] != "cpu"]
        assert plan["fits"] and sum(on_cards) == other["total_bytes"], other


def test_llamacpps_keys_of_the_config_are_told_to_who_asks_for_vllm(
    laya_plan: Run, config_path: Path, tmp_path: Path
) -> None:
    entry = {"source": str(config_path), "gpu_layers": 3}
    (tmp_path / "config.yaml").write_text(json.dumps({"version": 1, "models": {"m": entry}}))
    with pytest.raises(ConfigError, match=r"models\.m\.gpu_layers is llama\.cpp's; leave it out with engine: vllm"):
        laya_plan("m", "--vllm", "--gpu-memory", "24GiB")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--vllm",), "--gpu-memory 24GiB"),
        (("--vllm", "--gpu-memory", "24GiB", "-tp", 2), "needs 2 GPUs; there is 1"),
        (("--vllm", "--gpu-memory", "24GiB", "-tp", 0), "-tp: expected a whole number >= 1"),
        (("--vllm", "--gpu-memory", "24GiB", "--gpu-memory-utilization", 1.5), "expected a number > 0 and <= 1"),
        (("--vllm", "--gpu-memory", "24GiB", "--kv-cache-dtype", "fp88"), "did you mean fp8"),
        (("--vllm", "--gpu-memory", "24GiB", "--table"), "--vllm and --table are two questions"),
        (("--engine", "vllm", "--gpu-memory", "24GiB", "--table"), "--vllm and --table are two questions"),
        (("--vllm", "--gpu-memory", "24GiB", "--gpus", "0,3"), "gpus names GPU 3, which can't be used: there is 0"),
        (("--vllm", "--gpu-memory", "24GiB", "-ncmoe", 3), "-ncmoe is llama.cpp's; leave it out with --engine vllm"),
        (("--vllm", "--engine", "llamacpp", "--gpu-memory", "24GiB"), "--vllm and --engine llamacpp are two questions"),
        (("-tp", 2), "llama.cpp gives each GPU whole layers: write --gpus 0,1"),
    ],
)
def test_vllm_flags_that_cannot_be(
    laya_plan: Run, config_path: Path, words: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laya.cli.plan_vllm.GpuMeter.read", lambda self: [])
    with pytest.raises(LayaError) as caught:
        laya_plan(config_path, *words)
    assert said in caught.value.message
    assert caught.value.exit_code == 2


def test_vllm_of_a_gguf_and_of_no_model(laya_plan: Run, smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a GGUF file"):
        laya_plan(smollm2_path, "--vllm", "--gpu-memory", "24GiB")
    with pytest.raises(ConfigError, match="of one model"):
        laya_plan("--vllm", "--gpu-memory", "24GiB")
