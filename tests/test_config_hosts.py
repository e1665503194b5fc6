"""Which hosts mean this machine alone."""

from __future__ import annotations

import pytest

from laya.config.hosts import is_loopback


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.evil.example", "127.", "localhost.example", "10.0.0.1", ""])
def test_another_host_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
