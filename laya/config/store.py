"""Owns: the `store` section of config.yaml: where conversations are kept, and for how long they and usage are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from laya.config.values import Bytes, Duration
from laya.types import GIB

STORE_SCHEMES = ("sqlite", "postgresql")
KEEP_S = 30 * 24 * 3600.0
KEEP_USAGE_S = 400 * 24 * 3600.0


class StoreConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Conversations of the Responses API, and the figures of `laya usage`."""

    url: Annotated[
        str | None,
        Meta(description="Database: sqlite:///FILE or postgresql://USER@HOST/NAME; null = laya.db in Laya's folder."),
    ] = None
    keep: Annotated[
        Duration | None,
        Meta(description="A conversation is forgotten this long after its last turn; -1 or null = never."),
    ] = KEEP_S
    max_bytes: Annotated[
        Bytes, Meta(description="Most that all conversations take; those unused longest are forgotten first.")
    ] = GIB
    keep_usage: Annotated[
        Duration | None,
        Meta(description="The figures of `laya usage` are forgotten after this long; -1 or null = never."),
    ] = KEEP_USAGE_S
