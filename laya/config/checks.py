"""Owns: values that are well-formed and still not possible: not built yet, or at odds with each other.

A value that cannot be honoured is an error that says so, never silence: a user who asked for a GPU and got none, or
for AWQ and got the plain file, would blame the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from laya.config.check_programs import check_programs
from laya.config.check_routing import check_routing
from laya.config.document import Document, KeyPath, dotted
from laya.config.peers import check_peers
from laya.config.pools import check_spillover
from laya.config.quantization import AUTO, GGUF_KINDS, NONE
from laya.config.ray import address_fault
from laya.config.schema import Config
from laya.config.settings import KV_CACHE_DTYPES, VLLM_KV_CACHE_DTYPES, ModelSettings
from laya.config.store import STORE_SCHEMES
from laya.config.traces import EXTRA, endpoint_fault, is_installed
from laya.config.vllm import VLLM_QUANTIZATIONS
from laya.errors import nearest

_KV_ALIASES = {
    "fp16": "f16", "float16": "f16", "half": "f16", "bfloat16": "bf16", "fp32": "f32", "float32": "f32",
    "fp8": "q8_0", "fp8_e4m3": "q8_0", "fp8_e5m2": "q8_0", "int8": "q8_0", "q8": "q8_0", "q4": "q4_0", "int4": "q4_0",
}  # fmt: skip


def check_settings(
    settings: ModelSettings, document: Document, path: KeyPath = (), *, above: ModelSettings | None = None
) -> None:
    """Raises ConfigError for the first setting of this level that cannot be honoured. above: the level that decides
    what this one leaves open."""
    engine = above.engine if settings.engine is UNSET and above is not None else settings.engine
    for name, reason_for in (_REASONS | _VLLM_REASONS if engine == "vllm" else _REASONS).items():
        value = getattr(settings, name)
        reason = None if value is UNSET or value is None else reason_for(value)
        if reason:
            where = (*path, name)
            raise document.error(where, f"{document.key(where)} {document.value(where, value)}: {reason}")


def check_config(config: Config, document: Document) -> None:
    """Raises ConfigError for the first value of the whole file that cannot be honoured."""
    check_settings(config, document)
    for name, entry in config.models.items():
        check_settings(entry, document, ("models", name), above=config)
    check_programs(config, document)
    _check_pools(config, document)
    _check_splits(config, document)
    _check_names(config, document)
    _check_key_names(config, document)
    _check_gpu_numbers(config, document)
    _check_store(config, document)
    _check_traces(config, document)
    _check_ray(config, document)
    check_peers(config, document)
    check_routing(config, document)
    check_spillover(config, document)


def _check_pools(config: Config, document: Document) -> None:
    for name in ("", *config.models):
        model = config.for_model(name)
        if model.kv_pool_tokens and model.max_seq_len and model.kv_pool_tokens < model.max_seq_len:
            path: KeyPath = ("models", name, "kv_pool_tokens") if name else ("kv_pool_tokens",)
            raise document.error(
                path, f"{dotted(path)}: {model.kv_pool_tokens} tokens do not hold one sequence of "
                f"max_seq_len {model.max_seq_len}"
            )  # fmt: skip


def _check_splits(config: Config, document: Document) -> None:
    for name in ("", *config.models):
        model = config.for_model(name)
        if model.tensor_split and model.gpus and len(model.tensor_split) != len(model.gpus):
            path: KeyPath = ("models", name, "tensor_split") if name else ("tensor_split",)
            n_shares, n_gpus = len(model.tensor_split), len(model.gpus)
            raise document.error(path, f"{dotted(path)}: {n_shares} shares for the {n_gpus} of gpus: one for each")


def _check_store(config: Config, document: Document) -> None:
    url = config.store.url
    if url is not None and url.partition("://")[0] not in STORE_SCHEMES:
        known = " or ".join(f"{scheme}://" for scheme in STORE_SCHEMES)
        scheme = url.partition("://")[0] if "://" in url else "no scheme"
        raise document.error(("store", "url"), f"store.url: expected a URL that begins with {known}, got {scheme}")


def _check_traces(config: Config, document: Document) -> None:
    endpoint = config.traces.endpoint
    if endpoint is not None:
        fault = endpoint_fault(endpoint) or (None if is_installed() else f"what sends traces is not here: {EXTRA}")
        if fault:
            raise document.error(("traces", "endpoint"), f"traces.endpoint: {fault}")


def _check_ray(config: Config, document: Document) -> None:
    address = config.ray.address
    fault = address_fault(address) if address is not None else None
    if fault:
        raise document.error(("ray", "address"), f"ray.address: {fault}")


def _check_names(config: Config, document: Document) -> None:
    owners = dict.fromkeys(config.models, "a model")
    for model_id, entry in config.models.items():
        for index, alias in enumerate(entry.aliases):
            if alias in owners:
                path: KeyPath = ("models", model_id, "aliases", index)
                raise document.error(path, f"{dotted(path[:-1])}: {alias} is the name of {owners[alias]} already")
            owners[alias] = f"models.{model_id}"


def _check_key_names(config: Config, document: Document) -> None:
    names: set[str] = set()
    for index, key in enumerate(config.server.api_keys):
        if key.name in names:
            path: KeyPath = ("server", "api_keys", index, "name")
            raise document.error(path, f"server.api_keys: two keys are named {key.name}")
        names.add(key.name)


def _check_gpu_numbers(config: Config, document: Document) -> None:
    for number in config.memory.gpu:
        if not (number.isascii() and number.isdigit()):
            path: KeyPath = ("memory", "gpu", number)
            raise document.error(path, f'{dotted(path)}: a GPU is named by its number here, such as "0"')


def _quantization(value: str) -> str | None:
    kind = value.lower()
    if kind in (AUTO, NONE, *GGUF_KINDS):
        return None
    if kind in VLLM_QUANTIZATIONS:
        return "llama.cpp does not run it: engine: vllm does, or a GGUF type of its size, such as q4_k_m"
    close = nearest(kind, (AUTO, NONE, *GGUF_KINDS))
    return (f"did you mean {close}? " if close else "") + f"There are auto, none, {', '.join(GGUF_KINDS)}"


def _kv_cache_dtype(value: str) -> str | None:
    if value in KV_CACHE_DTYPES:
        return None
    close = _KV_ALIASES.get(value.lower()) or nearest(value.lower(), KV_CACHE_DTYPES)
    return (f"did you mean {close}? " if close else "") + f"There are {', '.join(KV_CACHE_DTYPES)}"


def _vllm_quantization(value: str) -> str | None:
    if value.lower() in (AUTO, NONE, *VLLM_QUANTIZATIONS):
        return None
    close = nearest(value.lower(), VLLM_QUANTIZATIONS)
    return (f"did you mean {close}? " if close else "") + f"There are {', '.join(VLLM_QUANTIZATIONS)}"


def _vllm_kv_cache_dtype(value: str) -> str | None:
    known = ("auto", *VLLM_KV_CACHE_DTYPES)
    if value in known:
        return None
    close = {"f16": "float16", "bf16": "bfloat16"}.get(value) or ("fp8" if value[:1] == "q" else nearest(value, known))
    return (f"did you mean {close}? " if close else "") + f"vLLM has {', '.join(known)}"


def _gpus(value: list[int]) -> str | None:
    return "each GPU is named once" if len(set(value)) < len(value) else None


def _tensor_split(value: list[float]) -> str | None:
    return "no GPU would get a layer" if value and not any(value) else None


_REASONS: dict[str, Callable[[Any], str | None]] = {
    "quantization": _quantization,
    "kv_cache_dtype": _kv_cache_dtype,
    "gpus": _gpus,
    "tensor_split": _tensor_split,
}
_VLLM_REASONS = {"quantization": _vllm_quantization, "kv_cache_dtype": _vllm_kv_cache_dtype}
