"""Owns: what the admin API answers where no type of the server's own says it: members that are always there.

Schemas only, for the OpenAPI document; the handlers may add members. Knows no route.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from laya.gateway.events import Event
from laya.gateway.gauge import DeviceGauge
from laya.gateway.headroom import Headroom
from laya.gateway.history import Sample
from laya.gateway.reload_diff import Report
from laya.store import Usage
from laya.types import KeyRole, ModelStatus, Priority


class Fault(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    """OpenAI's envelope; docs/errors.md lists the codes and what else each carries."""

    error: Fault


class LiveRequest(TypedDict):
    id: str
    phase: Literal["queued", "prefill", "decode"]
    age_s: float
    key: str | None


class Doing(TypedDict):
    """What a model works on."""

    requests: list[LiveRequest]
    queued: int
    running: int
    pinned: bool
    ttl_s: float | None
    idle_s: float | None
    kv_tokens_promised: int | None
    kv_tokens: int | None


class Memory(TypedDict):
    device: str
    budget_bytes: int
    limit: str
    reserved_bytes: int


class PeerShown(TypedDict):
    """Another Laya whose models are served here."""

    name: str
    url: str
    state: Literal["reachable", "unreachable", "unknown"]
    since_s: float
    error: str | None
    version: str | None
    budget_bytes: int | None
    free_bytes: int | None
    models: int


class RayNode(TypedDict):
    name: str
    memory_bytes: int


class RayShown(TypedDict):
    """The Ray cluster whose nodes run engines."""

    address: str
    error: str | None
    nodes: list[RayNode]


class State(TypedDict):
    version: str
    instance: str
    native_core: bool
    memory: Memory
    ledger: dict[str, Any]
    devices: list[DeviceGauge]
    arrivals: int
    in_flight: int
    outcomes: dict[str, int]
    models: list[ModelStatus]
    peers: list[PeerShown]
    ray: RayShown | None
    is_paused: bool


class Happened(TypedDict):
    events: list[Event]


class Headrooms(TypedDict):
    devices: list[Headroom]


class Past(TypedDict):
    """By device. A sample: Unix seconds, bytes measured, promised, of other programs, and the budget."""

    every_s: float
    kept_s: float
    devices: dict[str, list[Sample]]


class InCatalogue(TypedDict):
    id: str
    task: str
    what_for: str
    file_bytes: int


class Catalogue(TypedDict):
    models: list[InCatalogue]


class Paused(TypedDict):
    is_paused: bool


class Pinned(TypedDict):
    model: str
    pinned: bool


class Slot(TypedDict):
    id: int
    n_ctx: int
    is_processing: bool


class Slots(TypedDict):
    slots: list[Slot]


class ExpertShares(TypedDict):
    """As `laya experts --json` has it."""

    model: str
    engine: Literal["llama.cpp"]
    n_tokens: int
    n_experts: int
    top_k: int
    window_tokens: int
    band: list[float]
    is_even: bool
    verdict: str
    layers: list[dict[str, Any]]
    topics: list[dict[str, Any]]


class ShownKey(TypedDict):
    """A key without its secret. `requests_left` and `tokens_left` are there where a minute has a limit."""

    name: str
    role: KeyRole
    models: list[str]
    expires: str | None
    max_concurrent: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    priority: Priority | None
    max_priority: Priority | None
    origin: Literal["config", "store"]
    created: str | None
    digest: str


class ListedKey(ShownKey):
    running: int


class Keys(TypedDict):
    keys: list[ListedKey]


class RevokedKey(ShownKey):
    cancelled: int
    is_open: bool


class Used(TypedDict):
    by: str
    since: str
    usage: list[Usage]


class Reloaded(Report, frozen=True, kw_only=True):
    """What changes, or would."""

    has_changes: bool = False
