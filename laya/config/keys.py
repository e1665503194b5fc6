"""Owns: how API keys are made and hashed, and what a config entry grants. A key is never kept, only its SHA-256."""

from __future__ import annotations

import hashlib
import secrets

from laya.config.schema import ApiKey
from laya.config.units import parse_moment
from laya.types import KeyGrant

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
    )
