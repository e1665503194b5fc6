"""Owns: the keys of an entry of `server.api_keys`, their types, bounds and one-line meanings."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from laya.config.values import Count, Sha256
from laya.types import KeyRole, Priority


class ApiKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """An API key, known by its hash only, and what it may do."""

    name: Annotated[str, Meta(min_length=1, description="Who uses the key; shown in logs and metrics.")]
    sha256: Annotated[Sha256, Meta(description="SHA-256 of the key, as `laya config hash-key` prints it.")]
    key_file: Annotated[
        str | None, Meta(description="File that holds the key, such as a mounted secret; read at the start.")
    ] = None
    role: Annotated[
        KeyRole,
        Meta(description="user: inference; metrics: /metrics alone; peer: also /admin/state; admin: everything."),
    ] = "admin"
    models: Annotated[list[str], Meta(description="Models that the key may use. None = all.")] = []
    expires: Annotated[
        str | None, Meta(description="Last day on which it works, such as 2027-01-31, or 2027-01-31T18:00Z.")
    ] = None
    max_concurrent: Annotated[Count | None, Meta(description="Requests at once, waiting ones too.")] = None
    requests_per_minute: Annotated[Count | None, Meta(description="Requests in a minute.")] = None
    tokens_per_minute: Annotated[Count | None, Meta(description="Tokens of prompts and answers in a minute.")] = None
    priority: Annotated[
        Priority | None, Meta(description="Priority of requests that ask for none in x-laya-priority; null = default.")
    ] = None
    max_priority: Annotated[
        Priority | None,
        Meta(description="The most urgent that a request may ask for; null = interactive, and system for admins."),
    ] = None
