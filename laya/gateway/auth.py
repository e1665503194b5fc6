"""Owns: who may speak to this server. Keys are kept and found by their SHA-256 digests.

With no key at all the server listens on loopback only, and answers only to loopback names, so that a web page that
a user visits cannot reach it under a name of its own (DNS rebinding) or post to it from another origin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from hashlib import sha256
from hmac import compare_digest
from urllib.parse import urlsplit

from laya.config.hosts import is_loopback
from laya.errors import Forbidden, InvalidApiKey
from laya.gateway.account import Key
from laya.types import KeyGrant


class KeyRing:
    """The keys of this server. may_be_open: without any key it answers to this machine; else to nobody."""

    def __init__(
        self, grants: Iterable[KeyGrant] = (), origins: Iterable[str] = (), *, may_be_open: bool = True
    ) -> None:
        self._keys: dict[bytes, Key] = {}
        self.origins = frozenset(origins)
        self._may_be_open = may_be_open
        self._seen_hosts: set[bytes] = set()
        # the last Authorization header that was right, and whose key it carried; never one that expires
        self._last_good = b""
        self._last_key: Key | None = None
        self.on_replaced: Callable[[], None] = _ignore  # what was checked before may not be right any more
        self.replace(grants)

    def replace(self, grants: Iterable[KeyGrant]) -> None:
        """These are the keys from now on. One that stays keeps what it runs and has used."""
        keys = {}
        for grant in grants:
            digest = bytes.fromhex(grant.sha256)
            key = self._keys.get(digest)
            if key is None or key.grant.owner != grant.owner:
                key = Key(grant)
            elif key.grant != grant:
                key.apply(grant)
            keys[digest] = key
        self._keys = keys
        self._last_good, self._last_key = b"", None
        self.on_replaced()

    @property
    def keys(self) -> list[Key]:
        return list(self._keys.values())

    def cors_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """What lets a page of an origin that the config names read the answer; nothing for any other."""
        for name, value in headers:
            if name == b"origin" and value.decode("latin-1") in self.origins:
                return [b"access-control-allow-origin: %b\r\nvary: origin\r\n" % value]
        return []

    @property
    def is_open(self) -> bool:
        """Whether no key is needed, on this machine."""
        return not self._keys and self._may_be_open

    def check(self, authorization: bytes | None, headers: Iterable[tuple[bytes, bytes]]) -> Key | None:
        """The key, or None where none is needed. Raises InvalidApiKey or Forbidden."""
        if not self._keys and self._may_be_open:
            self._check_local(headers)
            return None
        if authorization is None:
            raise InvalidApiKey("No API key: send it as 'Authorization: Bearer KEY'.")
        if self._last_good and compare_digest(authorization, self._last_good):
            return self._last_key
        scheme, _, secret = authorization.partition(b" ")
        # How long the search takes tells of the digest at most, from which no key follows.
        key = self._keys.get(sha256(secret.strip()).digest())
        if key is None or scheme.lower() != b"bearer":
            raise InvalidApiKey("The API key is not one of this server's.")
        if key.grant.expires_s is None:
            self._last_good, self._last_key = authorization, key
        elif time.time() >= key.grant.expires_s:
            ended = datetime.fromtimestamp(key.grant.expires_s, timezone.utc).isoformat(" ", "seconds")
            raise InvalidApiKey(f"The API key '{key.name}' expired at {ended}.")
        return key

    def _check_local(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        for name, value in headers:
            if name == b"host":
                if value not in self._seen_hosts:
                    self._check_host(value)
            elif name == b"origin":
                self._check_origin(value.decode("latin-1"))

    def _check_host(self, value: bytes) -> None:
        host = value.decode("latin-1").rsplit(":", 1)[0] if not value.endswith(b"]") else value.decode("latin-1")
        if not is_loopback(host):
            raise Forbidden(
                f"Without an API key this server answers to loopback names only, not to '{host}'. "
                f"`laya serve --lan` makes a key."
            )
        if len(self._seen_hosts) < 16:
            self._seen_hosts.add(value)

    def _check_origin(self, origin: str) -> None:
        try:
            host = urlsplit(origin).hostname or origin
        except ValueError:
            host = origin
        if not is_loopback(host) and origin not in self.origins:
            raise Forbidden(f"Requests from the origin '{origin}' are not allowed (server.cors_origins).")


def _ignore() -> None:
    """Nobody minds."""


def with_bearer(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The same headers; a key that came as Anthropic's clients send it stands where OpenAI's put theirs."""
    names = {name for name, _ in headers}
    if b"x-api-key" not in names or b"authorization" in names:
        return headers
    key = next(value for name, value in headers if name == b"x-api-key")
    return [*headers, (b"authorization", b"Bearer " + key)]
