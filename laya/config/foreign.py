"""Owns: what the keys of other programs are called here, as messages that convert them. Knows no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from laya.config.document import KeyPath, shown

Siblings = dict[str, Any]


class Foreign(NamedTuple):
    """A key of another program and how to say it here, given its value and the keys beside it."""

    tool: str
    convert: Callable[[Any, Siblings], str]


def _renamed(target: str) -> Callable[[Any, Siblings], str]:
    return lambda value, _: _nested(target, shown(value).strip("'") if isinstance(value, str) else shown(value))


def _nested(target: str, value: str) -> str:
    """`a.b: v` as the YAML flow form of it."""
    head, _, rest = target.partition(".")
    return f"{head}: {{{_nested(rest, value)}}}" if rest else f"{head}: {value}"


def _said(text: str) -> Callable[[Any, Siblings], str]:
    return lambda _, __: text


def _context_over_slots(value: Any, siblings: Siblings) -> str:
    """llama.cpp shares its context out over the slots; max_seq_len is what each of them gets."""
    names = ("parallel", "n_parallel", "np", "num_parallel", "max_num_seqs")
    slots = next((siblings[name] for name in names if isinstance(siblings.get(name), int)), 1)
    if not isinstance(value, int) or isinstance(value, bool) or slots < 1:
        return "max_seq_len: (that total divided by the slots) and max_num_seqs: (the slots)"
    return f"max_seq_len: {value // slots} and max_num_seqs: {slots} (theirs is for all slots, ours for each)"


def _share_of_gpu(value: Any, _: Siblings) -> str:
    share = f"{value:.0%}" if isinstance(value, (int, float)) and 0 < value <= 1 else "80%"
    return f"memory: {{budget: {share}}} (a limit on what all models together may take, not a block taken at start)"


def _negated(target: str) -> Callable[[Any, Siblings], str]:
    return lambda value, _: f"{target}: {str(not value).lower()}"


_LLAMACPP, _OLLAMA, _VLLM, _SWAP, _LITELLM = "llama.cpp", "Ollama", "vLLM", "llama-swap", "LiteLLM"
_LOCALAI = "LocalAI"
_PLANNED = "nothing: the plan decides it"

IN_MODEL: dict[str, Foreign] = {
    "ctx_size": Foreign(_LLAMACPP, _context_over_slots),
    "n_ctx": Foreign(_LLAMACPP, _context_over_slots),
    "num_ctx": Foreign(_OLLAMA, _renamed("max_seq_len")),
    "context_length": Foreign("LM Studio", _renamed("max_seq_len")),
    "context_size": Foreign(_LOCALAI, _renamed("max_seq_len")),
    "max_model_len": Foreign(_VLLM, _renamed("max_seq_len")),
    "parallel": Foreign(_LLAMACPP, _renamed("max_num_seqs")),
    "n_parallel": Foreign(_LLAMACPP, _renamed("max_num_seqs")),
    "np": Foreign(_LLAMACPP, _renamed("max_num_seqs")),
    "num_parallel": Foreign(_OLLAMA, _renamed("max_num_seqs")),
    "concurrencylimit": Foreign(_SWAP, _said("max_num_seqs: (answered at once) and queue_size: (may wait)")),
    "cache_type_k": Foreign(_LLAMACPP, _renamed("kv_cache_dtype")),
    "cache_type_v": Foreign(_LLAMACPP, _renamed("kv_cache_dtype")),
    "type_k": Foreign(_LLAMACPP, _renamed("kv_cache_dtype")),
    "type_v": Foreign(_LLAMACPP, _renamed("kv_cache_dtype")),
    "kv_cache_type": Foreign(_OLLAMA, _renamed("kv_cache_dtype")),
    "gpu_memory_utilization": Foreign(_VLLM, _share_of_gpu),
    "n_gpu_layers": Foreign(_LLAMACPP, _renamed("gpu_layers")),
    "ngl": Foreign(_LLAMACPP, _renamed("gpu_layers")),
    "num_gpu": Foreign(_OLLAMA, _renamed("gpu_layers")),
    "n_cpu_moe": Foreign(_LLAMACPP, _renamed("experts_on_cpu")),
    "tensor_parallel_size": Foreign(_VLLM, _said("gpus: [0, 1] (the numbers of the GPUs)")),
    "keep_alive": Foreign(_OLLAMA, _renamed("ttl")),
    "globalttl": Foreign(_SWAP, _renamed("ttl")),
    "sleep_idle_seconds": Foreign(_LLAMACPP, _renamed("ttl")),
    "healthchecktimeout": Foreign(_SWAP, _renamed("load_timeout_s")),
    "load_timeout": Foreign(_OLLAMA, _renamed("load_timeout_s")),
    "max_queue": Foreign(_OLLAMA, _renamed("queue_size")),
    "threads": Foreign(_LLAMACPP, _renamed("n_threads")),
    "num_thread": Foreign(_OLLAMA, _renamed("n_threads")),
    "n_predict": Foreign(_LLAMACPP, _renamed("defaults.max_tokens")),
    "num_predict": Foreign(_OLLAMA, _renamed("defaults.max_tokens")),
    "use_mmap": Foreign(_OLLAMA, _renamed("mmap")),
    "no_mmap": Foreign(_LLAMACPP, _negated("mmap")),
    "model_draft": Foreign(_LLAMACPP, _renamed("draft")),
    "draft_model": Foreign(_LOCALAI, _renamed("draft")),
    "lora_modules": Foreign(_VLLM, _said("lora: [FILE]")),
    "lora_adapter": Foreign(_LOCALAI, _said("lora: [FILE]")),
    "chat_template_file": Foreign(_LLAMACPP, _renamed("chat_template")),
    "batch_size": Foreign(_LLAMACPP, _said(_PLANNED)),
    "n_batch": Foreign(_LLAMACPP, _said(_PLANNED)),
    "ubatch_size": Foreign(_LLAMACPP, _said(_PLANNED)),
    "n_ubatch": Foreign(_LLAMACPP, _said(_PLANNED)),
    "flash_attn": Foreign(_LLAMACPP, _said(_PLANNED)),
    "cache_ram": Foreign(_LLAMACPP, lambda value, _: f"prompt_cache: {value}MiB"),
    "mlock": Foreign(_LLAMACPP, _said(_PLANNED)),
    "max_num_batched_tokens": Foreign(_VLLM, _said(_PLANNED)),
    "load_on_startup": Foreign(_LLAMACPP, _renamed("preload")),
    "model": Foreign(_VLLM, _renamed("source")),
    "model_path": Foreign(_LLAMACPP, _renamed("source")),
    "hf_repo": Foreign(_LLAMACPP, lambda value, _: f"source: hf://{value}"),
    "alias": Foreign(_LLAMACPP, lambda value, _: f"aliases: [{value}]"),
    "served_model_name": Foreign(_VLLM, lambda value, _: f"aliases: [{value}]"),
    "cmd": Foreign(_SWAP, _said("source: FILE, or engine: command; `laya import llama-swap FILE` makes either")),
    "setparams": Foreign(_SWAP, _said("defaults: (sampling values)")),
    "filters": Foreign(_SWAP, _said("defaults: (sampling values)")),
}

TOP_LEVEL: dict[str, Foreign] = {
    "model_list": Foreign(_LITELLM, _said("models under `models`; `laya import litellm FILE` makes them")),
    "litellm_settings": Foreign(_LITELLM, _said("settings of models stand at the top level or under `models:`")),
    "router_settings": Foreign(_LITELLM, _said("nothing: requests go to the least loaded engine")),
    "general_settings": Foreign(_LITELLM, _said("server: {api_keys: [...]} for its master_key")),
    "apikeys": Foreign(_SWAP, _said("server: {api_keys: [...]} (by hash; `laya config hash-key` makes one)")),
    "api_key": Foreign(_VLLM, _said("server: {api_keys: [...]} (by hash; `laya config hash-key` makes one)")),
    "startport": Foreign(_SWAP, _said("nothing: each engine takes a free port")),
    "macros": Foreign(_SWAP, _said("YAML anchors, or ${env.NAME} for what the environment knows")),
    "groups": Foreign(_SWAP, _said("nothing: what fits in memory together runs together")),
    "matrix": Foreign(_SWAP, _said("nothing: what fits in memory together runs together")),
    "hooks": Foreign(_SWAP, _said("preload: true on the models to load at start")),
    "max_loaded_models": Foreign(_OLLAMA, _said("memory: {budget: 80%} (models are counted by bytes)")),
    "max_active_backends": Foreign(_LOCALAI, _said("memory: {budget: 80%} (models are counted by bytes)")),
    "vram_budget": Foreign(_LOCALAI, _renamed("memory.budget")),
    "models_dir_path": Foreign(_LOCALAI, _renamed("models_dir")),
    "models_path": Foreign(_LOCALAI, _renamed("models_dir")),
}

SAMPLING: dict[str, Foreign] = {
    "repetition_penalty": Foreign(_VLLM, _renamed("repeat_penalty")),
    "n_predict": Foreign(_LLAMACPP, _renamed("max_tokens")),
    "num_predict": Foreign(_OLLAMA, _renamed("max_tokens")),
    "max_completion_tokens": Foreign("OpenAI", _renamed("max_tokens")),
    "temp": Foreign(_LLAMACPP, _renamed("temperature")),
}


def foreign_key(path: KeyPath, siblings: Siblings, *, in_model: bool, top_level: bool) -> str | None:
    """The message that converts a key of another program, or None when it is no known one."""
    key = str(path[-1])
    plain = key.replace("-", "_").lower().removeprefix("ollama_")
    tables = [TOP_LEVEL] if top_level else []
    tables += [IN_MODEL] if in_model else []
    tables += [SAMPLING] if path[-2:-1] == ("defaults",) else []
    found = next((table[plain] for table in tables if plain in table), None)
    if found is None:
        return None
    value = siblings[key]
    written = f"{key}: {shown(value)}" if isinstance(value, (int, float, str)) and "key" not in plain else key
    return f"{key} is a key of {found.tool}: {written} -> {found.convert(value, siblings)}"
