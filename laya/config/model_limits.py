"""Owns: the keys of `limits` of a model, their types, bounds and one-line meanings."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from laya.config.values import Count


class ModelLimits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How much of a model all keys together may use; None: as much as there is."""

    max_concurrent: Annotated[Count | None, Meta(description="Requests at once, waiting ones too.")] = None
    requests_per_minute: Annotated[Count | None, Meta(description="Requests in a minute.")] = None
    tokens_per_minute: Annotated[Count | None, Meta(description="Tokens of prompts and answers in a minute.")] = None
