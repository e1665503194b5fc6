"""Owns: which endpoint a key (of a session or a prompt) was last sent to, in a fixed number of bytes, in plain
Python. Knows no model.

Entry for entry what `csrc/affinity_table.hpp` does, which also describes the layout.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from laya.routing.feature_twin import mix64

NO_HOME = -1

_WAYS = 8
_SET_BYTES = 64
_MAX_STAMP = 0xFFFF
_STALE_AFTER = 4


class Probe(NamedTuple):
    """What a look into a set found: the entry to replace, and where the key was last."""

    base: int
    tag: int
    at: int
    stamp: int
    newest: int
    endpoint: int


class AffinityTable:
    """Eight-way sets of (tag, endpoint, stamp); a full set gives up the entry with the lowest stamp."""

    def __init__(self, n_bytes: int) -> None:
        n_sets = 1 << (max(n_bytes // _SET_BYTES, 1).bit_length() - 1)
        self._set_mask = n_sets - 1
        self._entries = array("Q", bytes(n_sets * _SET_BYTES))

    @property
    def capacity(self) -> int:
        return len(self._entries)

    def find(self, key: int) -> Probe:
        mixed = mix64(key)
        return self._scan((mixed & self._set_mask) * _WAYS, mixed >> 32 or 1)

    def remember(self, probe: Probe, endpoint: int) -> None:
        if probe.endpoint == endpoint and probe.newest - probe.stamp < _STALE_AFTER:
            return
        if probe.newest == _MAX_STAMP:
            self._halve_stamps(probe.base)
            probe = self._scan(probe.base, probe.tag)
        self._entries[probe.at] = probe.tag << 32 | endpoint << 16 | probe.newest + 1

    def _scan(self, base: int, tag: int) -> Probe:
        entries = self._entries[base : base + _WAYS]
        newest, oldest, at, endpoint = 0, _MAX_STAMP + 1, base, NO_HOME
        for way, entry in enumerate(entries):
            stamp = entry & _MAX_STAMP
            newest = max(newest, stamp)
            if endpoint != NO_HOME:
                continue
            if entry >> 32 == tag:
                endpoint = entry >> 16 & 0xFFFF
                oldest, at = stamp, base + way
            elif stamp < oldest:
                oldest, at = stamp, base + way
        return Probe(base, tag, at, oldest, newest, endpoint)

    def _halve_stamps(self, base: int) -> None:
        for at in range(base, base + _WAYS):
            stamp = self._entries[at] & _MAX_STAMP
            if stamp > 1:
                self._entries[at] += stamp // 2 - stamp
