"""Owns: what `laya key` and `/admin/keys` do with the keys of a server, running or not, and how keys are shown.

A key is made here and given out once; only its digest is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import datetime, timezone
from typing import Annotated, Any, cast, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.config.check_routing import AUTO
from laya.config.keys import check_priorities, expiry_of, hash_key, new_key
from laya.config.values import Sha256
from laya.errors import InvalidRequest, nearest
from laya.gateway.account import Key
from laya.gateway.desk import reply, small_body, switch
from laya.gateway.fleet import Fleet
from laya.gateway.live_keys import LiveKeys
from laya.gateway.own import OwnRequests
from laya.types import PRIORITIES, KeyGrant, KeyRole

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_EXPIRES = "^[1-9][0-9]{0,3}[smhd]$"  # the simplest form, and never past
Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
# what the admin API's document says of words; a wrong one is told in a sentence of ours
Name = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{_NAME.pattern}$"})]
Role = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(get_args(KeyRole))})]
Priority = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(PRIORITIES)})]
Expires = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _EXPIRES, "examples": ["30d"]})]
_PRIORITIES = ("priority", "max_priority")
_LIMITS = ("max_concurrent", "requests_per_minute", "tokens_per_minute")


def _whole(text: str) -> float:
    """JSON has one kind of number: 5.0 is whole."""
    number = float(text)
    return int(number) if number.is_integer() else number


_OBJECT = msgspec.json.Decoder(dict[str, Any], float_hook=_whole)


class AskedKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key as it is asked for. role: None is user, and admin for the first key of all. sha256: of a key that is there
    already; None makes one. expires: a day, a moment, or a time from now such as 30d."""

    name: Name
    role: Role | None = None
    models: list[str] = []
    expires: Expires | None = None
    max_concurrent: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    priority: Priority | None = None
    max_priority: Priority | None = None
    sha256: Sha256 | None = None


async def make(keys: LiveKeys, asked: AskedKey, known: Collection[str]) -> dict[str, Any]:
    """A new key in force: its grant, the key itself where it was made here, what changed for others.

    known: names of models and of what stands for them; others get a warning, since a model may come later.
    Raises InvalidRequest, ConfigError for what `expires` and the priorities say, StoreError.
    """
    _check_words(asked)
    secret = None if asked.sha256 else new_key()

    def grant_for(is_first: bool) -> KeyGrant:
        return KeyGrant(
            name=asked.name,
            sha256=asked.sha256 or hash_key(secret or ""),
            role=cast(KeyRole, asked.role or ("admin" if is_first else "user")),
            models=tuple(dict.fromkeys(asked.models)),
            expires_s=expiry_of(asked.expires) if asked.expires else None,
            **{name: getattr(asked, name) for name in (*_LIMITS, *_PRIORITIES)},
        )

    made = await keys.create(grant_for)
    answer = shown(Key(made)) | ({"key": secret} if secret else {})
    if warnings := [_unknown(name, known) for name in made.models if name not in known]:
        answer["warnings"] = warnings
    if len(keys.keys) == 1:
        answer["notice"] = (
            "Until now this server needed no key and answered to this machine alone; from now on every request needs "
            "one, but /health, /ready and the page's own files. Give it to `laya` as LAYA_API_KEY."
        )
    return answer


def _check_words(asked: AskedKey) -> None:
    """Raises InvalidRequest that says what a name may hold, and which roles and priorities there are."""
    if not _NAME.fullmatch(asked.name):
        raise InvalidRequest(
            f"'{asked.name[:64]}' is no name of a key: 1 to 64 letters, digits and . _ @ -, "
            "the first a letter or digit.",
            param="name",
        )
    roles = get_args(KeyRole)
    if asked.role is not None and asked.role not in roles:
        raise InvalidRequest(f"There is no role '{asked.role[:64]}': the roles are {', '.join(roles)}.", param="role")
    for name in _PRIORITIES:
        said = getattr(asked, name)
        if said is not None and said not in PRIORITIES:
            raise InvalidRequest(f"'{name}' is '{said[:64]}': expected {' or '.join(PRIORITIES)}.", param=name)
    check_priorities(asked.priority, asked.max_priority)


def _unknown(name: str, known: Collection[str]) -> str:
    close = nearest(name, known)
    return f"No model here is called '{name}' now." + (f" Did you mean '{close}'?" if close else "")


async def revoke(keys: LiveKeys, name: str, end_running: Callable[[Key], int] | None = None) -> dict[str, Any]:
    """A key ended: what it was. end_running: ends what it still runs too.

    Raises NotFound, InvalidRequest, StoreError.
    """
    key = await keys.revoke(name)
    n_cancelled = end_running(key) if end_running is not None else 0
    answer = shown(key) | {"cancelled": n_cancelled, "is_open": keys.is_open}
    if keys.is_open:
        answer["notice"] = "No key is left: this server answers to this machine alone, without a key."
    return answer


def shown(key: Key) -> dict[str, Any]:
    """A key as people may see it: never the digest whole, from which nothing follows but what was logged of it."""
    grant = key.grant
    answer: dict[str, Any] = {
        "name": grant.name,
        "role": grant.role,
        "models": list(grant.models),
        "expires": _moment(grant.expires_s),
        **{name: getattr(grant, name) for name in (*_LIMITS, *_PRIORITIES)},
        "origin": "config" if grant.created_s is None else "store",
        "created": _moment(grant.created_s),
        "digest": grant.sha256[:8],
    }
    for name, bucket in (("requests", key.requests), ("tokens", key.tokens)):
        if bucket is not None:
            answer[f"{name}_left"] = int(bucket.level())
    return answer


def _moment(unix_s: float | None) -> str | None:
    return None if unix_s is None else datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="seconds")


class KeyDesk:
    """The handlers of /admin/keys."""

    def __init__(self, keys: LiveKeys, requests: OwnRequests, fleet: Fleet) -> None:
        self._keys = keys
        self._fleet = fleet
        self._requests = requests

    def routes(self) -> list[Route]:
        return [
            Route("/admin/keys", self.all, methods=["GET", "POST"]),
            Route("/admin/keys/{name:path}", self.one, methods=["GET", "DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        """Every key; POST makes one."""
        if request.method == "POST":
            return await self._create(request)
        return reply({"keys": [self._shown(key) for key in self._keys.keys]})

    async def one(self, request: Request) -> Response:
        """One key; DELETE ends it."""
        if request.method == "DELETE":
            return await self._revoke(request)
        return reply(self._shown(self._keys.find(request.path_params["name"])))

    def _shown(self, key: Key) -> dict[str, Any]:
        return shown(key) | {"running": len(self._requests.of(key))}

    async def _create(self, request: Request) -> Response:
        try:
            asked = msgspec.convert(_OBJECT.decode(await small_body(request)), AskedKey)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"This describes no key: {error}.".replace("`", "'")) from None
        return reply(await make(self._keys, asked, await self._known() if asked.models else ()), 201)

    async def _known(self) -> set[str]:
        """Every name that a request may use."""
        await self._fleet.refresh()
        ids = {each.model_id for each in self._fleet.endpoints.values()}
        aliases = {name for group in self._fleet.served() for name in self._fleet.aliases(group[0])}
        return ids | aliases | {AUTO, *self._fleet.members}

    async def _revoke(self, request: Request) -> Response:
        """`?cancel=true`: what it runs ends too; otherwise that is finished."""
        end_running = self._requests.cancel_all if switch(request, "cancel") else None
        return reply(await revoke(self._keys, request.path_params["name"], end_running))
