"""Owns: who may speak to this server. Keys are kept and found by their SHA-256 digests.

With no key configured the server listens on loopback only, and answers only to loopback names, so that a web page that
a user visits cannot reach it under a name of its own (DNS rebinding) or post to it from another origin.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from urllib.parse import urlsplit

from laya.config.hosts import is_loopback
from laya.errors import Forbidden, InvalidApiKey


class KeyRing:
    """The keys of this server: name -> SHA-256 hex digest."""

    def __init__(self, digests: Iterable[tuple[str, str]], origins: Iterable[str] = ()) -> None:
        self._keys = {bytes.fromhex(digest): name for name, digest in digests}
        self.origins = frozenset(origins)
        self._seen_hosts: set[bytes] = set()
        self._last_good = b""  # the last Authorization header that was right, and whose key it carried
        self._last_name: str | None = None

    def cors_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """What lets a page of an origin that the config names read the answer; nothing for any other."""
        for name, value in headers:
            if name == b"origin" and value.decode("latin-1") in self.origins:
                return [b"access-control-allow-origin: %b\r\nvary: origin\r\n" % value]
        return []

    @property
    def is_open(self) -> bool:
        return not self._keys

    def check(self, authorization: bytes | None, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The name of the key, or None where no key is needed. Raises InvalidApiKey or Forbidden."""
        if not self._keys:
            self._check_local(headers)
            return None
        if authorization is None:
            raise InvalidApiKey("No API key: send it as 'Authorization: Bearer KEY'.")
        if self._last_good and compare_digest(authorization, self._last_good):
            return self._last_name
        scheme, _, key = authorization.partition(b" ")
        # How long the search takes tells of the digest at most, from which no key follows.
        found = self._keys.get(sha256(key.strip()).digest())
        if found is None or scheme.lower() != b"bearer":
            raise InvalidApiKey("The API key is not one of this server's.")
        self._last_good, self._last_name = authorization, found
        return found

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
