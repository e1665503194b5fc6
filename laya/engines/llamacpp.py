"""Owns: how decided settings are said to llama.cpp, as parameters of the wheel and as flags of a llama-server.

The two functions stand side by side because they must say the same. Both state every default that matters instead of
trusting it: left alone, llama.cpp shrinks the context to fit, keeps 8 GiB of old prompts, 32 checkpoints a slot, and
answers with the model's path as its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from laya.engines.offload import VERBOSITY
from laya.engines.settings import EngineSettings
from laya.types import MIB, PlannedSettings

MOST_GPUS = 128  # the length of llama.cpp's array
# The gateway sends a body at once, so a slow read is a fault. A write may wait for a client that reads slowly.
READ_TIMEOUT_S = 60
WRITE_TIMEOUT_S = 600
# How often a thread looks before it sleeps at llama.cpp's barriers. OpenMP's default, 300000, stops everything where
# another program has a core: see docs/log.md.
BARRIER_SPINS = "1000"
# What is as large as this is mapped, so that a prompt that left the cache leaves the process too. Left alone, glibc
# raises the size with each such block, and holes between entries came to a fifth of the cache.
MAPPED_BYTES = "1048576"
# Left alone, each thread that answers requests keeps what its largest text took: seven times 40 MiB after as many texts
# of 280 kB, where one arena keeps 15 MiB.
ARENAS = "1"
# The share of a prompt that a sequence must hold to be given it; below, the one that idled longest is. llama.cpp's 0.1
# gives a new conversation the sequence of another with the same system prompt, while others are free.
SLOT_PROMPT_SIMILARITY = 0.5


def params(settings: EngineSettings, api_key: str) -> dict[str, Any]:
    """Dotted names of xllamacpp.CommonParams -> values; the user's args last. Raises ConfigError."""
    return {
        **_served_params(settings, api_key),
        **_planned_params(settings),
        **_task_params(settings),
        **_extra_params(settings),
        **_args(settings),
    }


def _args(settings: EngineSettings) -> dict[str, Any]:
    """The user's own, and a log that tells where the layers lie, where some were planned for GPUs."""
    args = settings.checked_args()
    if settings.planned.gpu_layers:
        asked = args.get("verbosity")
        args["verbosity"] = max(asked, VERBOSITY) if isinstance(asked, int) else VERBOSITY
    return args


def _served_params(settings: EngineSettings, api_key: str) -> dict[str, Any]:
    return {
        "model.path": absolute(settings.path),
        "model_alias": [settings.model_id],  # a bare string would be read letter by letter
        "hostnames": [settings.host],
        "port": 0,
        "api_keys": [api_key],
        "ui": False,
        "offline": True,
        "endpoint_slots": True,
        "endpoint_props": True,
        "endpoint_metrics": True,
        "timeout_read": READ_TIMEOUT_S,
        "timeout_write": WRITE_TIMEOUT_S,
        "n_threads_http": settings.http_threads,
        "sleep_idle_seconds": -1,
        "use_jinja": True,
        "warmup": True,
        "cont_batching": True,
        "ctx_shift": False,
        "slot_prompt_similarity": SLOT_PROMPT_SIMILARITY,
    }


def _planned_params(settings: EngineSettings) -> dict[str, Any]:
    """What the plan counted, and nothing that grows beside it."""
    planned = settings.planned
    on_gpus = layers_on_gpus(settings)
    return {
        "n_ctx": settings.context_tokens,
        "n_parallel": planned.max_num_seqs,
        "kv_unified": planned.kv_unified,
        "kv_unified_per_slot": 0,
        "cache_type_k": planned.kv_cache_dtype,
        "cache_type_v": planned.kv_cache_dtype,
        "flash_attn_type": "enabled",
        "n_batch": planned.n_batch,
        "n_ubatch": planned.n_ubatch,
        "n_gpu_layers": planned.gpu_layers + planned.mtp_layers,
        "split_mode": "layer",
        "tensor_split": [float(n) for n in on_gpus] + [0.0] * (MOST_GPUS - len(on_gpus)),
        "tensor_buft_overrides": experts_pattern(planned.experts_on_cpu),
        "load_mode": "mmap" if planned.mmap else "none",
        "fit_params": False,
        "cache_ram_mib": planned.prompt_cache_bytes // MIB,
        "cache_idle_slots": False,
        "n_ctx_checkpoints": 0,
        "swa_full": False,
        "moe_cache_size": 0,
        "load_mtp": False,
        "speculative.types": ["none"],
        "cpuparams.n_threads": planned.n_threads,
        "cpuparams_batch.n_threads": planned.n_threads,
    }


def _task_params(settings: EngineSettings) -> dict[str, Any]:
    task = settings.planned.task
    if task in ("chat", "decide"):  # whose engine sees by the file whether it decides by embeddings
        return {"embedding": False}
    pooling = "rank" if task == "rerank" else settings.pooling or "unspecified"
    return {"embedding": True, "pooling_type": pooling}


def _extra_params(settings: EngineSettings) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if settings.chat_template is not None:
        extra["chat_template"] = settings.chat_template
    if settings.mmproj is not None:
        extra["mmproj.path"] = absolute(settings.mmproj)
        extra["mmproj_use_gpu"] = settings.planned.gpu_layers > 0
    if settings.lora:
        extra["lora_adapters"] = [absolute(path) for path in settings.lora]
    if settings.draft is not None:
        extra |= {
            "speculative.types": ["draft_simple"],
            "speculative.draft.mparams.path": absolute(settings.draft),
            "speculative.draft.cache_type_k": "f16",
            "speculative.draft.cache_type_v": "f16",
            "speculative.draft.n_gpu_layers": settings.planned.draft_gpu_layers,
            "speculative.draft.cpuparams.n_threads": settings.planned.n_threads,
            "speculative.draft.cpuparams_batch.n_threads": settings.planned.n_threads,
        }
    return extra


def flags(settings: EngineSettings) -> list[str]:
    """The same for a llama-server binary, without its path. The key goes in LLAMA_API_KEY. Raises ConfigError."""
    planned = settings.planned
    pairs = {
        "--model": absolute(settings.path),
        "--alias": settings.model_id,
        "--host": settings.host,
        "--port": 0,
        "--timeout": WRITE_TIMEOUT_S,
        "--threads-http": settings.http_threads,
        "--ctx-size": settings.context_tokens,
        "--parallel": planned.max_num_seqs,
        "--cache-type-k": planned.kv_cache_dtype,
        "--cache-type-v": planned.kv_cache_dtype,
        "--flash-attn": "on",
        "--batch-size": planned.n_batch,
        "--ubatch-size": planned.n_ubatch,
        "--n-gpu-layers": planned.gpu_layers + planned.mtp_layers,
        "--split-mode": "layer",
        "--threads": planned.n_threads,
        "--threads-batch": planned.n_threads,
        "--load-mode": "mmap" if planned.mmap else "none",
        "--spec-type": "none" if settings.draft is None else "draft-simple",
        "--fit": "off",
        "--cache-ram": planned.prompt_cache_bytes // MIB,
        "--ctx-checkpoints": 0,
        "--slot-prompt-similarity": SLOT_PROMPT_SIMILARITY,
    } | _extra_flags(settings)
    words = ["--jinja", "--no-webui", "--offline", "--slots", "--props", "--metrics", "--no-context-shift"]
    words += ["--no-cache-idle-slots"]
    words += ["--kv-unified" if planned.kv_unified else "--no-kv-unified"]
    words += [word for flag, value in pairs.items() for word in (flag, str(value))]
    if settings.mmproj is not None and not planned.gpu_layers:
        words += ["--no-mmproj-offload"]
    words += _task_flags(settings)
    return words + [word for name, value in _args(settings).items() for word in _flag(name, value)]


def _task_flags(settings: EngineSettings) -> list[str]:
    task = settings.planned.task
    if task in ("chat", "decide"):
        return []
    if task == "rerank":
        return ["--rerank"]
    return ["--embedding", *(("--pooling", settings.pooling) if settings.pooling else ())]


def _extra_flags(settings: EngineSettings) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    on_gpus = layers_on_gpus(settings)
    if len(on_gpus) > 1:
        extra["--tensor-split"] = ",".join(map(str, on_gpus))
    if settings.planned.experts_on_cpu:
        extra["--n-cpu-moe"] = settings.planned.experts_on_cpu
    if settings.chat_template is not None:
        extra["--chat-template"] = settings.chat_template
    if settings.mmproj is not None:
        extra["--mmproj"] = absolute(settings.mmproj)
    if settings.lora:
        extra["--lora"] = ",".join(absolute(path) for path in settings.lora)
    if settings.draft is not None:
        extra["--model-draft"] = absolute(settings.draft)
        extra["--n-gpu-layers-draft"] = settings.planned.draft_gpu_layers
    return extra


def _flag(name: str, value: Any) -> list[str]:
    """`flash_attn: on` -> --flash-attn on; true -> --name, false -> --no-name; a list repeats the flag."""
    long = name if name.startswith("-") else "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [long if value else "--no-" + long.removeprefix("--")]
    if isinstance(value, list):
        return [word for each in value for word in (long, str(each))]
    return [long, str(value)]


def layers_on_gpus(settings: EngineSettings) -> list[int]:
    """Layers on each GPU that the engine sees: those that were planned to have some, or all.

    Builds differ in whether layers for multi-token prediction count; the last GPU's share is right for both.
    """
    planned = settings.planned
    numbers = planned.gpus and (range(planned.gpus[-1] + 1) if settings.sees_all_gpus else planned.gpus)
    counts = [planned.tensor_split[number] for number in numbers]
    return [*counts[:-1], counts[-1] + planned.mtp_layers] if counts else []


def experts_pattern(n_layers: int) -> str:
    """What --n-cpu-moe says of the first layers, as an override of where tensors lie."""
    if not n_layers:
        return ""
    return rf"blk\.({'|'.join(map(str, range(n_layers)))})\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"


def environment(
    api_key: str | None = None, *, planned: PlannedSettings | None = None, keeps_prompts: bool = False
) -> dict[str, str]:
    """The child's environment: ours, without secrets it does not need and variables that would steer llama.cpp.

    planned: shows it those GPUs that its plan has, in their order, and no other: even an engine without a layer on a
    GPU would take memory of it for large batches. keeps_prompts: the engine has a prompt cache, whose entries come and
    go.
    """
    dropped = ("LLAMA_", "LAYA_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    kept.setdefault("GOMP_SPINCOUNT", BARRIER_SPINS)
    kept.setdefault("MALLOC_ARENA_MAX", ARENAS)
    if keeps_prompts:
        kept.setdefault("MALLOC_MMAP_THRESHOLD_", MAPPED_BYTES)
    if planned is not None and planned.tensor_split:
        kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbers as NVML has them
        kept["CUDA_VISIBLE_DEVICES"] = kept["HIP_VISIBLE_DEVICES"] = ",".join(map(str, planned.gpus))
        if not planned.gpus:
            kept["GGML_VK_VISIBLE_DEVICES"] = ""  # Vulkan's numbers are others
    return kept if api_key is None else kept | {"LLAMA_API_KEY": api_key}


def absolute(path: Path) -> str:
    return str(path.expanduser().absolute())
