"""The plan as parameters of the wheel and as flags of llama-server: nothing left to a default, both saying the same."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import msgspec
import pytest

from laya.engines import llamacpp
from laya.engines.held_memory import MemoryReading
from laya.engines.llamacpp_child import apply
from laya.engines.llamacpp_launcher import LlamaCppLauncher
from laya.engines.settings import EngineSettings
from laya.errors import BadModelFile, ConfigError
from laya.types import MIB

xllamacpp = pytest.importorskip("xllamacpp")
MakeSettings = Callable[..., EngineSettings]


@pytest.fixture
def everything(make_settings: MakeSettings, some_gguf: Path) -> EngineSettings:
    return make_settings(
        some_gguf,
        mmproj=some_gguf,
        draft=some_gguf,
        lora=(some_gguf,),
        chat_template="{{ messages }}",
        engine_path=Path("/usr/bin/llama-server"),
        args={"top-k": 7, "--swa": False, "each": [1, 2]},
    )


def test_params_are_all_known_to_the_wheel(everything: EngineSettings) -> None:
    values = llamacpp.params(msgspec.structs.replace(everything, engine_path=None, args={}), "key")
    params = xllamacpp.CommonParams()
    for name in values:
        reduce(getattr, name.split("."), params)


def test_flags_are_all_known_to_the_wheels_own_parser(make_settings: MakeSettings, some_gguf: Path) -> None:
    settings = make_settings(
        some_gguf, mmproj=some_gguf, draft=some_gguf, lora=(some_gguf,), chat_template="t", task="embed", pooling="mean"
    )
    library = next(Path(xllamacpp.__file__).parent.glob("*.so"))
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        flags = [word for word in llamacpp.flags(settings) if word.startswith("--")]
        assert [flag for flag in flags if text.find(b"\0" + flag.encode() + b"\0") < 0] == []


def test_split_context_is_slots_times_sequences(make_settings: MakeSettings, some_gguf: Path) -> None:
    params = llamacpp.params(make_settings(some_gguf, slot_tokens=512, max_num_seqs=3), "key")
    assert (params["n_ctx"], params["n_parallel"], params["kv_unified"]) == (1536, 3, False)


def test_unified_context_is_the_pool(make_settings: MakeSettings, some_gguf: Path) -> None:
    settings = make_settings(some_gguf, slot_tokens=768, max_num_seqs=3, kv_unified=True)
    assert llamacpp.params(settings, "key")["n_ctx"] == 768
    flags = llamacpp.flags(settings)
    assert flags[flags.index("--ctx-size") + 1] == "768"
    assert "--kv-unified" in flags


def test_defaults_that_grow_are_overridden(make_settings: MakeSettings, some_gguf: Path) -> None:
    params = llamacpp.params(make_settings(some_gguf), "key")
    expected = {
        "fit_params": False,
        "cache_ram_mib": 0,
        "n_ctx_checkpoints": 0,
        "slot_prompt_similarity": 0.5,
        "model_alias": ["small"],
        "api_keys": ["key"],
        "hostnames": ["127.0.0.1"],
        "port": 0,
        "ui": False,
        "cpuparams.n_threads": 1,
        "cpuparams_batch.n_threads": 1,
        "flash_attn_type": "enabled",
        "load_mode": "mmap",
        "speculative.types": ["none"],
    }
    assert {name: params[name] for name in expected} == expected


def test_prompt_cache_is_what_was_planned_in_mebibytes(make_settings: MakeSettings, some_gguf: Path) -> None:
    settings = make_settings(some_gguf, prompt_cache_bytes=64 * MIB)
    assert llamacpp.params(settings, "key")["cache_ram_mib"] == 64
    flags = llamacpp.flags(settings)
    assert flags[flags.index("--cache-ram") + 1] == "64"


def test_prompts_that_left_the_cache_leave_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert "MALLOC_MMAP_THRESHOLD_" not in llamacpp.environment()
    assert llamacpp.environment(keeps_prompts=True)["MALLOC_MMAP_THRESHOLD_"] == str(MIB)


def test_args_come_last(make_settings: MakeSettings, some_gguf: Path) -> None:
    assert llamacpp.params(make_settings(some_gguf, args={"warmup": False}), "key")["warmup"] is False


def test_args_become_flags(everything: EngineSettings) -> None:
    assert llamacpp.flags(everything)[-7:] == ["--top-k", "7", "--no-swa", "--each", "1", "--each", "2"]


def test_flags_never_hold_the_key_and_environment_does(
    everything: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "99")
    monkeypatch.setenv("HF_TOKEN", "secret")
    environment = llamacpp.environment("the-key")
    assert environment["LLAMA_API_KEY"] == "the-key"
    assert not {"LLAMA_ARG_CTX_SIZE", "HF_TOKEN"} & set(environment)
    assert "the-key" not in " ".join(llamacpp.flags(everything))


def test_chat_template_comes_after_jinja(everything: EngineSettings) -> None:
    flags = llamacpp.flags(everything)
    assert flags.index("--jinja") < flags.index("--chat-template")


@pytest.mark.parametrize("field", ["mmproj", "draft", "lora"])
def test_missing_file_is_named(make_settings: MakeSettings, some_gguf: Path, tmp_path: Path, field: str) -> None:
    missing = tmp_path / "missing.gguf"
    settings = make_settings(some_gguf, **{field: (missing,) if field == "lora" else missing})
    with pytest.raises(BadModelFile, match=r"missing\.gguf does not exist"):
        settings.check()


def test_engine_path_that_cannot_run_is_named(make_settings: MakeSettings, some_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_path: .*model\.gguf is not a program"):
        make_settings(some_gguf, engine_path=some_gguf).check()


def value_of(flag: str, flags: list[str]) -> str:
    return flags[flags.index(flag) + 1]


def test_a_split_is_said_as_it_was_planned(
    make_settings: MakeSettings, some_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Card 1 has nothing: the engine does not see it, and its second card is number 2."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    settings = make_settings(
        some_gguf, gpu_layers=33, tensor_split=(20, 0, 13), experts_on_cpu=2, draft=some_gguf, draft_gpu_layers=25,
        mmproj=some_gguf,
    )  # fmt: skip
    flags, params = llamacpp.flags(settings), llamacpp.params(settings, "key")
    assert value_of("--n-gpu-layers", flags) == "33"
    assert value_of("--tensor-split", flags) == "20,13"
    assert value_of("--n-cpu-moe", flags) == "2"
    assert value_of("--n-gpu-layers-draft", flags) == "25"
    assert params["n_gpu_layers"] == 33
    assert params["tensor_split"][:3] == [20.0, 13.0, 0.0]
    assert params["tensor_buft_overrides"] == r"blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    assert params["speculative.draft.n_gpu_layers"] == 25
    assert params["mmproj_use_gpu"] is True
    environment = llamacpp.environment(planned=settings.planned)
    assert (environment["CUDA_DEVICE_ORDER"], environment["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "0,2")
    assert environment["HIP_VISIBLE_DEVICES"] == "0,2"
    everywhere = msgspec.structs.replace(settings, sees_all_gpus=True)  # Vulkan
    assert value_of("--tensor-split", llamacpp.flags(everywhere)) == "20,0,13"


def test_an_engine_without_a_layer_on_a_gpu_sees_none(make_settings: MakeSettings, some_gguf: Path) -> None:
    settings = make_settings(some_gguf, tensor_split=(0,), mmproj=some_gguf)
    environment = llamacpp.environment(planned=settings.planned)
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")
    assert [environment[name] for name in names] == ["", "", ""]
    flags = llamacpp.flags(settings)
    assert "--no-mmproj-offload" in flags
    assert not {"--tensor-split", "--n-cpu-moe"} & set(flags)


def test_where_no_gpu_is_known_the_users_own_choice_of_them_stands(
    make_settings: MakeSettings, some_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    settings = make_settings(some_gguf)
    assert llamacpp.environment(planned=settings.planned)["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_split_is_taken_by_the_wheel(make_settings: MakeSettings, some_gguf: Path) -> None:
    settings = make_settings(some_gguf, gpu_layers=33, tensor_split=(20, 0, 13), experts_on_cpu=2)
    params = xllamacpp.CommonParams()
    for name, value in llamacpp.params(settings, "key").items():
        apply(params, name, value, xllamacpp)
    assert params.tensor_split[:3] == [20.0, 13.0, 0.0]
    assert params.n_gpu_layers == 33


def test_pages_on_their_way_to_a_gpu_are_not_what_an_engine_holds(
    make_settings: MakeSettings, some_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = MemoryReading(peak_bytes=900 * MIB, resident_bytes=800 * MIB, anonymous_bytes=100 * MIB)
    monkeypatch.setattr("laya.engines.llamacpp_launcher.read_memory", lambda pid: seen)
    assert LlamaCppLauncher(make_settings(some_gguf)).measure(1) == seen
    reading = LlamaCppLauncher(make_settings(some_gguf, mapped_bytes=30 * MIB)).measure(1)
    assert reading is not None
    assert (reading.peak_bytes, reading.resident_bytes, reading.anonymous_bytes) == (130 * MIB, 130 * MIB, 100 * MIB)
