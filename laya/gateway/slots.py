"""Owns: which sequence of a llama.cpp engine a request takes, once more than one key uses that engine.

By itself the engine gives a prompt the sequence whose cache begins most like it, whoever that was of: how fast answers
begin would then tell one key what another has asked. So from the second key on, the gateway names the sequence, and
forbids the engine to reuse what another key left in it. Where one key has used the engine alone, nothing is done.

Knows nothing of sockets; a request is asked for its key, its prompt's blocks, and what else runs is told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from laya.types import EngineAddress, PlannedSettings

if TYPE_CHECKING:
    from laya.gateway.account import Key
    from laya.gateway.exchange import Exchange

_HASH_BYTES = 8  # of each prefix of a prompt in its blocks
_COLD = {"cache_prompt": False}
_UNKNOWN = object()  # more than one key may have left something in it
_NOBODY = object()


class Slot:
    """A sequence of the engine. `owner`: the key whose prompt is in its cache; None: of requests without a key."""

    __slots__ = ("blocks", "id", "is_taken", "owner", "used")

    def __init__(self, number: int, owner: object) -> None:
        self.id = number
        self.owner = owner
        self.blocks = b""
        self.is_taken = False
        self.used = 0  # the turn in which it was taken last

    def release(self, exchange: Exchange) -> None:
        """The request runs here no longer. If it is sent again, it takes another one."""
        self.is_taken, exchange.slot = False, None
        if exchange.outcome is None:
            exchange.upstream_body = b""


class Slots:
    """The sequences of one engine. keeps_prompts: it also has a cache of prompts that left them, which all share."""

    def __init__(self, n_slots: int, *, keeps_prompts: bool) -> None:
        self._n_slots = n_slots
        self._keeps_prompts = keeps_prompts
        self._only: object = _NOBODY  # the key that has used the engine alone so far
        self._slots: list[Slot] = []  # none while one key is alone
        self._turns = itertools.count(1)

    def fields_for(self, exchange: Exchange, live: Iterable[Exchange]) -> dict[str, Any]:
        """What to set in the engine's request, which takes the sequence until `Slot.release`. live: what runs there."""
        key = exchange.key
        if not self._slots:
            if self._only is _NOBODY:
                self._only = key
            if self._only is key:
                return {}
            self._slots = [Slot(number, self._only) for number in range(self._n_slots)]
        return self._take(exchange, key, live)

    def _take(self, exchange: Exchange, key: Key | None, live: Iterable[Exchange]) -> dict[str, Any]:
        parsed = exchange.parsed
        assert parsed is not None
        free = [slot for slot in self._slots if not slot.is_taken]
        if parsed.n_seqs > 1 or not free:  # the engine places them where it likes
            for slot in self._slots:
                slot.owner = _UNKNOWN
            return _COLD
        blocks = parsed.prefix_blocks()
        slot = _best(free, key, blocks)
        is_own = slot.owner is key and not self._keeps_prompts
        if any(each is not exchange and each.sent_s and each.slot is None for each in live):
            slot.owner, is_own = _UNKNOWN, False  # one that the engine places may come to lie in it
        else:
            slot.owner = key
        slot.blocks, slot.is_taken, slot.used = blocks, True, next(self._turns)
        exchange.slot = slot
        return {"id_slot": slot.id} | ({} if is_own else _COLD)


def slots_of(address: EngineAddress, planned: PlannedSettings) -> Slots | None:
    """The sequences of an engine; None where requests cannot name them, as they are not cached from there either."""
    return Slots(planned.max_num_seqs, keeps_prompts=planned.prompt_cache_bytes > 0) if address.has_slots else None


def _best(free: list[Slot], key: Key | None, blocks: bytes) -> Slot:
    """The key's own whose prompt this one goes on with; else the one that was not used for longest."""
    own = [(_common(slot.blocks, blocks), slot) for slot in free if slot.owner is key and slot.blocks]
    going_on = [(common, slot) for common, slot in own if 2 * common * _HASH_BYTES >= len(slot.blocks)]
    if going_on:
        return max(going_on, key=lambda found: (found[0], found[1].used))[1]
    return min(free, key=lambda slot: slot.used)


def _common(one: bytes, other: bytes) -> int:
    """How many of their first hashes are the same."""
    longest = min(len(one), len(other))
    starts = range(0, longest, _HASH_BYTES)
    differs = (at for at in starts if one[at : at + _HASH_BYTES] != other[at : at + _HASH_BYTES])
    return next(differs, longest) // _HASH_BYTES
