"""A gateway with several keys in its store, and requests that carry one of them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from laya.config.places import DATABASE
from laya.store import Store
from laya.types import KeyGrant

from .front import CHAT, request


def grant(name: str, **fields: Any) -> KeyGrant:
    """The key's own text is `sk-NAME-of-the-tests`."""
    return KeyGrant(name=name, sha256=sha256(secret(name).encode()).hexdigest(), **fields)


def secret(name: str) -> str:
    return f"sk-{name}-of-the-tests"


def keep(home: Path, *grants: KeyGrant) -> None:
    with Store(home / DATABASE) as store:
        for each in grants:
            store.keep_key(each)


def drop(home: Path, name: str) -> None:
    with Store(home / DATABASE) as store:
        store.drop_key(name)


def chat_as(name: str, *headers: str, **fields: Any) -> bytes:
    return request(CHAT | fields, key=secret(name), headers=headers)


def get_as(name: str | None, path: str, method: str = "GET", body: Any = None) -> bytes:
    return request(body, path, method=method, key=secret(name) if name else None)
