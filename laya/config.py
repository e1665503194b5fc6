"""Owns: config.yaml (version 1), its keys, their types and defaults, and every message about a wrong one.

Knows no room: rooms take their own section. Model settings may stand at the top level, where they are the default
of every model, or under `models.<id>`, where they win. Zero config works: `Config()` is a complete configuration.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Auto = Literal["auto"]


class ModelSettings(msgspec.Struct, kw_only=True):
    """Settings of a model; `msgspec.UNSET` means: not said here, so the next level up decides."""

    engine: Literal["llamacpp"] | msgspec.UnsetType = msgspec.UNSET
    engine_path: str | None | msgspec.UnsetType = msgspec.UNSET
    task: Literal["chat", "embed", "rerank"] | msgspec.UnsetType = msgspec.UNSET
    max_seq_len: int | Auto | msgspec.UnsetType = msgspec.UNSET
    max_num_seqs: int | Auto | msgspec.UnsetType = msgspec.UNSET
    kv_cache_dtype: str | msgspec.UnsetType = msgspec.UNSET
    kv_pool_tokens: int | Auto | msgspec.UnsetType = msgspec.UNSET
    default_max_tokens: int | msgspec.UnsetType = msgspec.UNSET
    enable_streaming: bool | msgspec.UnsetType = msgspec.UNSET
    quantization: str | None | msgspec.UnsetType = msgspec.UNSET
    n_threads: int | Auto | msgspec.UnsetType = msgspec.UNSET
    gpu_layers: int | Literal["auto", "all"] | msgspec.UnsetType = msgspec.UNSET
    experts_on_cpu: int | Auto | msgspec.UnsetType = msgspec.UNSET
    gpus: list[int] | msgspec.UnsetType = msgspec.UNSET
    replicas: int | msgspec.UnsetType = msgspec.UNSET
    mmap: bool | msgspec.UnsetType = msgspec.UNSET
    mmproj: str | None | msgspec.UnsetType = msgspec.UNSET
    draft: str | None | msgspec.UnsetType = msgspec.UNSET
    lora: list[str] | msgspec.UnsetType = msgspec.UNSET
    chat_template: str | None | msgspec.UnsetType = msgspec.UNSET
    ttl: float | str | None | msgspec.UnsetType = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET
    preload: bool | msgspec.UnsetType = msgspec.UNSET
    overflow: Literal["refuse", "trim"] | msgspec.UnsetType = msgspec.UNSET
    queue_size: int | msgspec.UnsetType = msgspec.UNSET
    queue_timeout_s: float | msgspec.UnsetType = msgspec.UNSET
    load_timeout_s: float | msgspec.UnsetType = msgspec.UNSET
    args: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    defaults: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
