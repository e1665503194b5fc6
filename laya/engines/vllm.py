"""Owns: what vLLM is started with: its flags and its environment, from a plan. Pure; knows no process.

Whatever decides memory is said, so nothing is left to a default or a variable of vLLM's that could change the plan:
the KV cache in bytes, the share of each card that its start is checked with, the tokens of a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from laya.config.vllm import Vllm
from laya.engines.settings import LOAD_TIMEOUT_S
from laya.engines.vllm_build import VllmBuild
from laya.errors import ConfigError
from laya.types import PlannedSettings

HOST = "127.0.0.1"
GRAMMAR_CACHE_MIB = 64  # of compiled schemas; its own default is 512, past any plan
CPU_BLOCK_TOKENS = 128  # of a block of the KV cache, as its CPU build has them
_NOT_PASSED_ON = ("LAYA_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE",
                  "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_MODELSCOPE", "VLLM_XGRAMMAR_CACHE_MB")  # fmt: skip
# Its own words for what the plan or a key of Laya's decides, and where to say it.
_DECIDED = {
    "model": "source", "host": None, "port": None, "api-key": None, "uds": None, "served-model-name": "aliases",
    "max-model-len": "max_seq_len", "max-num-seqs": "max_num_seqs", "max-num-batched-tokens": "max_num_batched_tokens",
    "kv-cache-dtype": "kv_cache_dtype", "kv-cache-memory-bytes": None,
    "gpu-memory-utilization": "gpu_memory_utilization", "block-size": None, "quantization": "quantization",
    "tensor-parallel-size": "tensor_parallel_size",
    "pipeline-parallel-size": "pipeline_parallel_size", "enable-expert-parallel": "enable_expert_parallel",
    "enforce-eager": "enforce_eager", "chat-template": "chat_template", "runner": "task", "swap-space": None,
    "cpu-offload-gb": None, "root-path": None, "ssl-keyfile": None, "ssl-certfile": None, "headless": None,
}  # fmt: skip
# What a template writes for a call, and the parser that reads it.
_TOOL_MARKS = (
    ("<|python_tag|>", "llama3_json"), ("[TOOL_CALLS]", "mistral"), ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
)  # fmt: skip


class VllmEngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM to start."""

    model_id: str
    name: str = ""  # what logs and limits call this engine, where the model has several; else as the model
    path: Path  # the model's folder
    build: VllmBuild
    vllm: Vllm
    planned: PlannedSettings
    kv_cache_bytes: int  # of each worker
    gpu_share: float | None = None  # of each card, all terms of the plan together; None: it runs in RAM
    quantization: str | None = None  # as the user said it; None: as config.json says
    args: dict[str, Any] = {}
    gpus: tuple[int, ...] = ()
    import_path: Path | None = None  # a folder that its Python imports from before its own environment
    ray_address: str | None = None  # of the cluster that its own workers are placed on, where its backend is Ray
    chat_template: str | None = None
    tool_parser: str | None = None
    ceiling_bytes: int | None = None
    load_timeout_s: float = LOAD_TIMEOUT_S

    @property
    def engine_name(self) -> str:
        return self.name or self.model_id


def command(settings: VllmEngineSettings, port: int) -> list[str]:
    """The words of its command line. Raises ConfigError for an argument that fights the plan."""
    planned, vllm = settings.planned, settings.vllm
    said: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "served-model-name": settings.model_id,
        "max-model-len": planned.max_seq_len,
        "max-num-seqs": planned.max_num_seqs,
        "max-num-batched-tokens": planned.n_batch,
        "kv-cache-memory-bytes": settings.kv_cache_bytes,
        "disable-uvicorn-access-log": True,
    }
    if settings.gpu_share is not None:
        said["gpu-memory-utilization"] = f"{settings.gpu_share:.4f}"
    else:
        said["block-size"] = CPU_BLOCK_TOKENS
    if planned.kv_cache_dtype != "auto":
        said["kv-cache-dtype"] = planned.kv_cache_dtype
    if planned.task != "chat":
        said["runner"] = "pooling"
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(vllm, name) > 1:
            said[name.replace("_", "-")] = getattr(vllm, name)
    for name in ("enable_expert_parallel", "enforce_eager"):
        if getattr(vllm, name):
            said[name.replace("_", "-")] = True
    if settings.quantization is not None:
        said["quantization"] = settings.quantization
    if settings.chat_template is not None:
        said["chat-template"] = settings.chat_template
    if settings.tool_parser is not None:
        said |= {"enable-auto-tool-choice": True, "tool-call-parser": settings.tool_parser}
    return [*settings.build.serve(settings.path), *_flags(said | _own(settings))]


def _own(settings: VllmEngineSettings) -> dict[str, Any]:
    """The arguments of the user's own, by vLLM's names."""
    found = {}
    for name, value in settings.args.items():
        plain = name.lstrip("-").replace("_", "-")
        if plain in _DECIDED:
            key = _DECIDED[plain]
            hint = f"use {key}" if key else "leave it out"
            raise ConfigError(f"models.{settings.model_id}.args.{name} fights the plan: {hint}", param="args")
        found[plain] = value
    return found


def _flags(said: Mapping[str, Any]) -> list[str]:
    """`true` becomes `--name`, `false` becomes `--no-name`, a mapping is JSON, a list gives one flag several values."""
    words: list[str] = []
    for name, value in said.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            words += [f"--{name}", msgspec.json.encode(value).decode()]
        else:
            words += [f"--{name}", str(value)]
    return words


def environment(settings: VllmEngineSettings, api_key: str) -> dict[str, str]:
    """Of the program: the user's own, without what would steer it past the plan. Nothing is fetched or told."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    own |= {"VLLM_API_KEY": api_key, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    own |= {"NO_COLOR": "1", "VLLM_LOGGING_COLOR": "0", "VLLM_XGRAMMAR_CACHE_MB": str(GRAMMAR_CACHE_MIB)}
    if settings.import_path is not None:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(settings.import_path), own.get("PYTHONPATH"))))
    if settings.ray_address is not None:
        own["RAY_ADDRESS"] = settings.ray_address
    if settings.gpu_share is None and settings.vllm.enforce_eager:
        # Else its first answer with logprobs compiles a function, by a C++ compiler of 230 MiB that nobody planned.
        own["TORCHDYNAMO_DISABLE"] = "1"
    if settings.gpu_share is None:
        # Its own binding leaves a core unused, and knows nothing of other engines.
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.planned.n_threads)}
    elif settings.gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpus))
    return own


def tool_parser_of(template: str | None) -> str | None:
    """The parser for the calls that a chat template teaches; None: it teaches none, or in a way that is not known."""
    if template is None or "tools" not in template:
        return None
    return next((parser for mark, parser in _TOOL_MARKS if mark in template), None)
