"""Owns: the order in which requests wait at one endpoint: by priority, between keys in turn, first come first served.

A request may be overtaken by such of a higher priority that came later, but only for a while, which is a share of
`queue_timeout_s` (`YIELD_SHARES`): the level whose oldest request has waited longest beyond its share is served next.
So nobody starves, and from that share on a request goes before everything that comes after it. Within a level the keys
take turns, one request each, so who sends a hundred at once does not shut out who sends one. Every step is O(1) in the
number of requests that wait. Knows neither what a request needs nor when there is room for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from laya.types import PRIORITIES, KeyGrant, Priority

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

# How long a request lets later, more urgent ones pass, as a share of the time it may wait at all.
YIELD_SHARES: dict[Priority, float] = {"system": 0.0, "interactive": 0.05, "default": 0.2, "bulk": 0.5}


def priority_for(exchange: Exchange) -> Priority:
    """The priority that a request has."""
    key = exchange.key
    return granted(exchange.priority, key.grant if key is not None else None)


def granted(asked: Priority | None, grant: KeyGrant | None) -> Priority:
    """What was asked for, else the key's own, as far as the key may: what is more urgent counts as the most it may."""
    if grant is None:
        return asked or "default"
    return max(asked or grant.priority or "default", most_urgent(grant), key=PRIORITIES.index)


def most_urgent(grant: KeyGrant) -> Priority:
    """What a key may ask for at most. Where nothing is said, `system` is for admins, and for whom it was given."""
    if grant.max_priority is not None:
        return grant.max_priority
    by_role: Priority = "system" if grant.role == "admin" else "interactive"
    return min(by_role, grant.priority or by_role, key=PRIORITIES.index)


class _Level:
    """The requests of one priority."""

    def __init__(self, yields_s: float) -> None:
        self.yields_s = yields_s
        self.in_order: OrderedDict[Exchange, str | None] = OrderedDict()  # by arrival, with their keys
        self._by_key: OrderedDict[str | None, OrderedDict[Exchange, None]] = OrderedDict()  # whose turn is next, first

    def add(self, exchange: Exchange) -> None:
        key = self.in_order[exchange] = exchange.key_name
        self._by_key.setdefault(key, OrderedDict())[exchange] = None

    def next(self) -> Exchange:
        return next(iter(next(iter(self._by_key.values()))))

    def urgent_from_s(self) -> float:
        """When its oldest request stops, or stopped, to let later ones of other levels pass."""
        return next(iter(self.in_order)).read_s + self.yields_s

    def remove(self, exchange: Exchange, *, has_had_turn: bool) -> None:
        key = self.in_order.pop(exchange)
        own = self._by_key[key]
        del own[exchange]
        if not own:
            del self._by_key[key]
        elif has_had_turn:
            self._by_key.move_to_end(key)

    def clear(self) -> None:
        self.in_order.clear()
        self._by_key.clear()


class WaitingLine:
    """Exchanges that wait. `len`, `in` and iteration (in no promised order) are over all of them."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long a request may wait, of which `YIELD_SHARES` are shares."""
        self._levels = {each: _Level(YIELD_SHARES[each] * timeout_s) for each in PRIORITIES}
        self._level_of: dict[Exchange, _Level] = {}
        self._returned: OrderedDict[Exchange, None] = OrderedDict()  # had their turn, and could not go yet

    def __len__(self) -> int:
        return len(self._level_of) + len(self._returned)

    def __contains__(self, exchange: Exchange) -> bool:
        return exchange in self._level_of or exchange in self._returned

    def __iter__(self) -> Iterator[Exchange]:
        yield from tuple(self._returned)
        for level in self._levels.values():
            yield from tuple(level.in_order)

    def add(self, exchange: Exchange, priority: Priority) -> None:
        """At the end of its key's own line."""
        level = self._level_of[exchange] = self._levels[priority]
        level.add(exchange)

    def put_back(self, exchange: Exchange) -> None:
        """Before all others: it was taken out, and could not go after all."""
        self._returned[exchange] = None

    def peek(self) -> Exchange:
        """Who is next. Raises LookupError where nobody waits."""
        if self._returned:
            return next(iter(self._returned))
        waiting = [level for level in self._levels.values() if level.in_order]
        if not waiting:
            raise LookupError("nobody waits")
        return min(waiting, key=_Level.urgent_from_s).next()

    def take(self) -> Exchange:
        """Take out who is next. Raises LookupError where nobody waits."""
        exchange = self.peek()
        self._remove(exchange, has_had_turn=True)
        return exchange

    def discard(self, exchange: Exchange) -> bool:
        """Take out one that does not wait any longer; whether it was here. Its key's turn stays."""
        if exchange not in self:
            return False
        self._remove(exchange, has_had_turn=False)
        return True

    def take_all(self) -> list[Exchange]:
        """Empty it."""
        waiting = list(self)
        for level in self._levels.values():
            level.clear()
        self._level_of.clear()
        self._returned.clear()
        return waiting

    def _remove(self, exchange: Exchange, *, has_had_turn: bool) -> None:
        level = self._level_of.pop(exchange, None)
        if level is None:
            del self._returned[exchange]
        else:
            level.remove(exchange, has_had_turn=has_had_turn)
