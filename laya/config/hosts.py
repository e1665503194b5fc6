"""Owns: which host names and addresses mean this machine alone. One rule, since keys and proxies hang on it."""

from __future__ import annotations

import ipaddress

_LOOPBACK_NAMES = frozenset({"localhost", "::1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant; a name that merely begins with 127. is somebody's."""
    try:
        return host.lower() in _LOOPBACK_NAMES or ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False
