"""Owns: which members of pools are chosen first: those whose model is loaded and has no line, while there are any.

A pool whose loaded members all have requests waiting, or none, is open to all, so that another member is loaded where
one is not enough. Which of them serves is the route table's. Knows no rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet


class Pools:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def update(self) -> None:
        """An engine came or went; and a few times a second, since lines come and go."""
        fleet = self._fleet
        if not fleet.config.routing.pools:
            return
        loaded = (each for each in fleet.endpoints.values() if each not in fleet.retiring and _is_first(each))
        fleet.router.prefer(frozenset(each.index for each in loaded))

    def open_to_all(self) -> None:
        """None of those that were chosen first may be chosen any more."""
        self._fleet.router.prefer(frozenset())


def _is_first(endpoint: Endpoint) -> bool:
    return endpoint.takes_new and not (endpoint.queue or endpoint.is_troubled or endpoint.load_error)
