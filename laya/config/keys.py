"""Owns: how API keys are made and hashed. A key is never kept, only its SHA-256."""

from __future__ import annotations

import hashlib
import secrets

MIN_KEY_CHARS = 16  # a shorter one could be found from its hash


def new_key() -> str:
    """A key of 192 random bits."""
    return "laya-" + secrets.token_urlsafe(24)


def hash_key(key: str) -> str:
    """SHA-256 of a key, as hex digits. No salt: keys are random, and a request's key is looked up by its hash."""
    return hashlib.sha256(key.encode()).hexdigest()
