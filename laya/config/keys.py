"""Owns: how API keys are made and hashed, and what a config entry grants. A key is never kept, only its SHA-256."""

from __future__ import annotations

import hashlib
import re
import secrets
import time

from laya.config.api_key import ApiKey
from laya.config.units import parse_duration, parse_moment
from laya.errors import ConfigError
from laya.types import PRIORITIES, KeyGrant

_SPAN = re.compile(r"\s*(\d+(\.\d+)?[smhd])+\s*")
_NO_CALENDAR_S = 253402300800.0  # Unix time of the year 10000
MIN_KEY_CHARS = 16  # a shorter one could be found from its hash


def new_key() -> str:
    """A key of 192 random bits."""
    return "laya-" + secrets.token_urlsafe(24)


def hash_key(key: str) -> str:
    """SHA-256 of a key, as hex digits. No salt: keys are random, and a request's key is looked up by its hash."""
    return hashlib.sha256(key.encode()).hexdigest()


def grant_of(key: ApiKey) -> KeyGrant:
    """What the entry of config.yaml grants."""
    return KeyGrant(
        name=key.name,
        sha256=key.sha256,
        role=key.role,
        models=tuple(key.models),
        expires_s=parse_moment(key.expires) if key.expires else None,
        max_concurrent=key.max_concurrent,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        priority=key.priority,
        max_priority=key.max_priority,
    )


def check_priorities(priority: object, max_priority: object) -> None:
    """Raises ConfigError where a key's own priority is one that it may not ask for."""
    if priority not in PRIORITIES or max_priority not in PRIORITIES:
        return
    if PRIORITIES.index(priority) < PRIORITIES.index(max_priority):
        raise ConfigError(
            f"priority {priority} is more urgent than max_priority {max_priority}: the most urgent is "
            f"{PRIORITIES[0]}, then {', '.join(PRIORITIES[1:])}",
            param="priority",
        )


def expiry_of(text: str) -> float:
    """Unix time of `2027-01-31`, `2027-01-31T18:00Z` or, from now, `30d`. Raises ConfigError, also for what is past."""
    is_span = _SPAN.fullmatch(text) is not None
    end_s = time.time() + (parse_duration(text) or 0) if is_span else parse_moment(text)
    if end_s <= time.time():
        raise ConfigError(f"{text!r} is past", param="expires")
    if end_s >= _NO_CALENDAR_S:
        raise ConfigError(f"{text!r} is after the year 9999", param="expires")
    return end_s
