"""Owns: which members of pools are chosen first: those whose model is loaded and has no line, while there are any.

A pool whose loaded members all have requests waiting, or none, is open to all, so that another member is loaded where
one is not enough; while one is on its way, no third is loaded. Which of those chosen first serves is the route table's.
Knows no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet


class Pools:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def update(self) -> None:
        """An engine came or went, or a request waits for one; and a few times a second, since lines come and go."""
        fleet = self._fleet
        spares, pools = fleet.spares, fleet.pool_members
        if pools or spares:
            preferred = {name: fleet.peers.first(members) for name, members in spares.items()}
            fleet.router.prefer(preferred | {pool: self._first(members) for pool, members in pools.items()})

    def open_to_all(self, pool: str) -> None:
        """None of those that were chosen first may be chosen any more."""
        router = self._fleet.router
        router.prefer({name: first for name, first in router.preferred.items() if name != pool})

    def _first(self, members: Sequence[str]) -> frozenset[int]:
        """Nobody: all are chosen from."""
        group = list(self._engines(members))
        serving = [each for each in group if each.takes_new and not (each.is_troubled or each.load_error)]
        first = [each for each in serving if not each.queue]
        if not first and (coming := [each for each in group if _is_on_its_way(each)]):
            first = serving + coming
        return frozenset(each.index for each in first)

    def _engines(self, members: Sequence[str]) -> Iterator[Endpoint]:
        fleet = self._fleet
        for member in members:
            group = fleet.replicas_of(fleet.roster.id_of(member) or "")
            yield from (each for each in group if each not in fleet.retiring)


def _is_on_its_way(endpoint: Endpoint) -> bool:
    """Whether it is loaded for who waits there, has not to wait for room itself, and has a place for one more."""
    is_waited_for = 0 < len(endpoint.queue) < endpoint.settings.queue_size
    return endpoint.pool is None and is_waited_for and not (endpoint.no_room or endpoint.load_error)
