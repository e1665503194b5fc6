"""Names made for the tests: pairs that collide in the routing hash, which no pair of ordinary names does."""

from __future__ import annotations

from laya.routing.feature_twin import MASK_64

_SEED = 0x9E3779B97F4A7C15
_STEP = 0xFF51AFD7ED558CCD


def colliding_name(name: bytes) -> bytes:
    """Another 16-byte name with the hash of this one: the second word undoes what the first one changed."""
    assert len(name) == 16
    start = _SEED ^ (16 * 0xD6E8FEB86659FD93 & MASK_64)
    first, second = int.from_bytes(name[:8], "little"), int.from_bytes(name[8:], "little")
    other_first = first ^ 1
    other_second = second ^ _after(start, first) ^ _after(start, other_first)
    return other_first.to_bytes(8, "little") + other_second.to_bytes(8, "little")


def _after(value: int, word: int) -> int:
    value = (value ^ word) * _STEP & MASK_64
    return value ^ value >> 32
