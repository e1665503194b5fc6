"""Owns: which keys may use which path beside the hot one. What is not named here is for admins alone.

So a route that somebody adds under a new path is closed until it is opened here.
"""

from __future__ import annotations

from starlette.requests import Request

from laya.errors import Forbidden
from laya.gateway.account import USERS, Key
from laya.gateway.heads import HOT_PATHS
from laya.types import KeyRole

KEY = "laya.key"  # where a request's scope has its key; None: this server needs none
_ADMINS: frozenset[KeyRole] = frozenset({"admin"})
_SCRAPERS: frozenset[KeyRole] = frozenset({"metrics", "admin"})
_STATE_READERS: frozenset[KeyRole] = frozenset({"peer", "admin"})
_HOT = frozenset(path.decode() for path in HOT_PATHS)
_FOR_USERS = ("/v1/", "/api/", "/tokenize", "/detokenize")  # APIs of inference, and what a key may see of its own


def roles_for(path: str) -> frozenset[KeyRole]:
    """The roles that may use what is at this path."""
    if path in ("/metrics", "/metrics/engines"):
        return _SCRAPERS
    if path == "/admin/state":
        return _STATE_READERS
    return USERS if path.startswith(_FOR_USERS) or path in _HOT else _ADMINS


def may_reach(key: Key, path: str) -> bool:
    return key.role in roles_for(path)


def out_of_reach(key: Key, path: str) -> Forbidden:
    needed = sorted(roles_for(path))
    return Forbidden(
        f"{path} needs a key with the role {' or '.join(needed)}; '{key.name}' has the role {key.role}.",
        role=key.role,
        needed=needed,
    )


def key_of(request: Request) -> Key | None:
    """The key of a request to the app; None where this server needs none."""
    key: Key | None = request.scope.get(KEY)
    return key
