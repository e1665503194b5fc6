"""Owns: what the gateway and the nodes of a cluster tell each other about engines: values, and their form as JSON.

Knows neither Ray nor how the words travel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from laya.engines.ceiling import LimitHit
from laya.engines.held_memory import MemoryReading
from laya.engines.settings import EngineSettings


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of the cluster that is there now."""

    id: str
    name: str  # as it is shown; no two nodes have the same
    address: str
    memory_bytes: int  # its memory resource: all that may be promised on it
    others_bytes: int  # of it, what is promised to others than engines of this gateway
    n_gpus: int = 0
    others_gpus: int = 0  # of them, what others than engines of this gateway have


class WantedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a model is loaded from, as it lies at the gateway."""

    path: str
    n_bytes: int
    name: str | None = None  # the model's, by which a node's own store may have it


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is asked for before it may get an engine."""

    files: list[WantedFile]


class NodeSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself at one moment."""

    version: str  # of Laya there
    available_bytes: int  # of its memory, without swapping
    n_cores: int  # that engines may use
    files: list[str]  # where the wanted files are there, in their order
    gpu_bytes: list[int]  # what may be planned with on each GPU that its engine can use
    missing: str  # why one of them cannot be used there; "": all are there


class EngineNews(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine did since it was last asked; memory is None where there is no process."""

    log: list[str]
    pid: int | None
    load_percent: int | None
    cpu_s: float | None
    memory: MemoryReading | None
    exit_reason: str | None
    limit_hit: LimitHit | None


def encode_settings(settings: EngineSettings) -> dict[str, Any]:
    return dict(msgspec.to_builtins(settings, enc_hook=str))


def decode_settings(told: dict[str, Any]) -> EngineSettings:
    return msgspec.convert(told, EngineSettings, dec_hook=_read)


def _read(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    # what msgspec wants of a hook that does not know a type: a setting was added that this module cannot send
    raise NotImplementedError(f"{kind.__name__} is no value of an engine's settings")
