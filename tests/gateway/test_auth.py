"""Who may speak to the server: keys in every spelling, and without keys only this machine's own names."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Any, cast

import pytest

import laya.gateway.auth
from laya.errors import Forbidden, InvalidApiKey
from laya.gateway.account import Key
from laya.gateway.auth import KeyRing
from laya.types import KeyGrant


def grant(name: str, **fields: object) -> KeyGrant:
    return KeyGrant(name=name, sha256=sha256(name.encode()).hexdigest(), **fields)  # type: ignore[arg-type]


def name_of(key: Key | None) -> str | None:
    return None if key is None else key.name


KEYS = KeyRing([grant("first"), grant("second")])
OPEN = KeyRing([], origins=["https://page.example"])
MUCH = b"x" * 100_000


@pytest.mark.parametrize(
    ("authorization", "name"),
    [
        (b"Bearer first", "first"),
        (b"Bearer second", "second"),
        (b"bearer first", "first"),
        (b"BEARER first", "first"),
        (b"Bearer  first ", "first"),
    ],
)
def test_key_ring_names_the_key(authorization: bytes, name: str) -> None:
    assert name_of(KEYS.check(authorization, [])) == name


@pytest.mark.parametrize(
    "authorization",
    [None, b"", b"Bearer", b"Bearer ", b"first", b"Basic first", b"Bearer firs", b"Bearer first second", b"Bearer "
     b"\xff\xfe", b"Bearer FIRST", b"Bearer " + MUCH, b"Bearerfirst"],
)  # fmt: skip
def test_key_ring_refuses_anything_else(authorization: bytes | None) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        KEYS.check(authorization, [])
    assert caught.value.http_status == 401
    assert "first" not in caught.value.message


def test_key_ring_with_keys_asks_for_no_host() -> None:
    headers = [(b"host", b"anything.example"), (b"origin", b"http://a.example")]
    assert name_of(KEYS.check(b"Bearer first", headers)) == "first"


LOCAL = ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "[::1]", "[::1]:8000"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.evil.example",
    "127.0.0.1.evil.example:8000",
    "localhost.evil.example",
    "192.168.0.5:8000",
    "[::2]:8000",
    "127.0.0.1@evil.example",
    "127.0.0.256",
    "",
]


@pytest.mark.parametrize("host", LOCAL)
def test_open_ring_answers_to_loopback_names(host: str) -> None:
    for _ in range(2):  # the second time from memory
        assert OPEN.check(None, [(b"host", host.encode())]) is None


@pytest.mark.parametrize("host", FOREIGN)
def test_open_ring_refuses_names_of_others(host: str) -> None:
    for _ in range(2):
        with pytest.raises(Forbidden) as caught:
            OPEN.check(None, [(b"host", host.encode())])
    assert caught.value.http_status == 403


def test_open_ring_any_foreign_host_of_several_is_refused() -> None:
    with pytest.raises(Forbidden):
        OPEN.check(None, [(b"host", b"localhost"), (b"host", b"evil.example")])


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:5", "https://page.example"]
)
def test_open_ring_lets_local_and_named_origins_in(origin: str) -> None:
    assert OPEN.check(None, [(b"host", b"localhost"), (b"origin", origin.encode())]) is None


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "http://evil.example",
        "http://localhost.evil.example",
        "https://page.example:444",
        "http://[",
        "",
        "\xff",
    ],
)
def test_open_ring_refuses_other_origins(origin: str) -> None:
    with pytest.raises(Forbidden):
        OPEN.check(None, [(b"origin", origin.encode("latin-1"))])


def test_open_ring_remembers_few_hosts() -> None:
    ring = KeyRing([])
    for port in range(1000):
        ring.check(None, [(b"host", b"localhost:%d" % port)])
    assert len(ring._seen_hosts) <= 16


def test_key_that_has_expired_is_refused_by_name_and_moment() -> None:
    ring = KeyRing([grant("old", expires_s=1_000_000_000.0), grant("good", expires_s=time.time() + 3600)])
    for _ in range(2):  # never from memory
        assert name_of(ring.check(b"Bearer good", [])) == "good"
        with pytest.raises(InvalidApiKey, match="'old' expired at 2001-09-09 01:46:40"):
            ring.check(b"Bearer old", [])


def test_ring_that_is_replaced_forgets_the_last_good_key() -> None:
    ring = KeyRing([grant("first"), grant("second")])
    first, second = ring.check(b"Bearer first", []), ring.check(b"Bearer second", [])
    assert second is not None
    for _ in range(2):
        second.begin(cast(Any, object()))
    ring.replace([grant("second", max_concurrent=3)])
    with pytest.raises(InvalidApiKey):
        ring.check(b"Bearer first", [])
    assert first is not None
    assert ring.check(b"Bearer second", []) is second  # what it runs still counts, under its new limit
    assert (second.n_running, second.grant.max_concurrent, second.is_bound) == (2, 3, True)


def test_last_good_key_is_the_first_thing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([grant("first")])
    ring.check(b"Bearer first", [])
    monkeypatch.setattr(laya.gateway.auth, "sha256", None)  # not needed again
    assert name_of(ring.check(b"Bearer first", [])) == "first"


def test_ring_of_an_open_address_is_never_open() -> None:
    ring = KeyRing([], may_be_open=False)
    with pytest.raises(InvalidApiKey):
        ring.check(None, [(b"host", b"localhost")])
    with pytest.raises(InvalidApiKey):
        ring.check(b"Bearer x", [(b"host", b"localhost")])
