"""Owns: models whose load has just failed: for a while rules and pools choose others, and who waits there moves on.

A request with nowhere else to go still has the load tried, so that it hears why. Loads nothing; knows no rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.errors import LayaError, MemoryBusy

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

PASSED_OVER_S = 30.0


class Unloadable:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._until_s: dict[Endpoint, float] = {}

    def failed(self, endpoint: Endpoint, error: LayaError) -> None:
        """Its load was refused: who waits there goes to another model where rules or pools have one, else hears why."""
        fleet = self._fleet
        if (fleet.config.routing.rules or fleet.members) and not isinstance(error, MemoryBusy):
            endpoint.load_error = error
            self._until_s[endpoint] = self._fleet.now_s() + (error.retry_after_s or PASSED_OVER_S)
            self._fleet.router.set_eligible(endpoint.index, False)
            for exchange in list(endpoint.queue):
                self._fleet.pass_on(exchange)
        endpoint.fail_waiting(error)

    def forgive(self, endpoint: Endpoint) -> None:
        """It is loaded, or is to be tried again."""
        if self._until_s.pop(endpoint, None) is not None:
            endpoint.load_error = None
            self._fleet.router.set_eligible(endpoint.index, not endpoint.is_drained)

    def sweep(self, now_s: float) -> None:
        """Let those be tried again whose time has passed."""
        for endpoint in [each for each, until_s in self._until_s.items() if until_s <= now_s]:
            self.forgive(endpoint)
            self._fleet.together.choose_eligible(endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        """Its model is gone."""
        self._until_s.pop(endpoint, None)

    def route(self, name: str, n_seqs: int, tokens: int, kind: int) -> int:
        """The endpoint of the model or pool whose load is tried again, with the request on it; below 0: none."""
        fleet = self._fleet
        for member in fleet.members.get(name, [name]):
            group = fleet.replicas_of(fleet.roster.id_of(member) or "")
            if group and group[0].load_error is not None and not group[0].is_drained:
                fleet.router.set_eligible(group[0].index, True)
                try:
                    return fleet.router.route(group[0].model_id, None, kind, 0, 0, tokens, n_seqs, b"")
                finally:
                    fleet.router.set_eligible(group[0].index, False)
        return -1
