"""Who may speak to the server: keys in every spelling, and without keys only this machine's own names."""

from __future__ import annotations

from hashlib import sha256

import pytest

from laya.errors import Forbidden, InvalidApiKey
from laya.gateway.auth import KeyRing

KEYS = KeyRing([(name, sha256(name.encode()).hexdigest()) for name in ("first", "second")])
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
    assert KEYS.check(authorization, []) == name


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
    assert KEYS.check(b"Bearer first", [(b"host", b"anything.example"), (b"origin", b"http://a.example")]) == "first"


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
