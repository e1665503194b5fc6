"""Owns: what requests tell of the engines that had them: verdicts into the circuit breakers, and their clock.

A verdict costs nothing while an engine has no faults: only an endpoint that failed lately (`is_troubled`) hears of
requests that were served. Knows no engine's process; what an engine does not say by its answers is watch.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from laya.routing.health import Breakers

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet


class Health:
    """The breakers of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._breakers = Breakers(fleet.router.table)

    def failed(self, endpoint: Endpoint) -> None:
        """The engine failed a request by its own fault: it did not answer, broke off, or said that it failed."""
        fleet = self._fleet
        fleet.stats.count_engine_error(endpoint.model_id)
        endpoint.is_troubled, endpoint.failed_s = True, fleet.now_s()
        # Where a request has nowhere else to go, a breaker would only turn an engine's words into Laya's.
        if self._breakers.failed(endpoint.index, fleet.now_s(), may_open=self._has_others(endpoint)):
            text = f"the engine of '{endpoint.name}' failed request after request; it gets none for a while"
            fleet.events.add("breaker_open", text, model=endpoint.model_id)

    def _has_others(self, endpoint: Endpoint) -> bool:
        """Whether anything leads from its model to another engine: replicas, a pool, a rule. Asked after faults."""
        fleet = self._fleet
        if len(fleet.replicas(endpoint)) > 1:
            return True
        routing = fleet.config.routing
        pools = {**fleet.spares, **routing.pools}
        ways: list[Iterable[str]] = [*pools.values()]
        for rule in routing.rules:
            ways += [(target, *rule.fallbacks) for target in rule.split or (rule.to,)]
        for names in ways:
            ids = {fleet.roster.id_of(each) for name in names for each in pools.get(name, (name,))} - {None}
            if len(ids) > 1 and endpoint.model_id in ids:
                return True
        return False

    def ended(self, endpoint: Endpoint, *, served: bool) -> None:
        """A request of a troubled endpoint ended otherwise: well, or without a verdict."""
        if not served:
            self._breakers.dropped(endpoint.index)
        elif self._breakers.served(endpoint.index):
            endpoint.is_troubled = False

    def give_back(self, endpoint: Endpoint, n_seqs: int, tokens: int) -> None:
        """A request that was routed there leaves without having asked its engine for anything."""
        self._fleet.router.settle_route(endpoint.index, n_seqs, tokens)
        if endpoint.is_troubled:
            self._breakers.dropped(endpoint.index)

    def renew(self, endpoint: Endpoint) -> None:
        """Its engine is a new one, or gone: what the old one did is forgotten."""
        if endpoint.is_troubled:
            endpoint.is_troubled = False
            self._breakers.renew(endpoint.index)

    def sweep(self, now_s: float) -> None:
        """Let trials through that are due. A trial whose answer has begun is a good one."""
        if self._breakers.next_s() is None:
            return
        for endpoint in self._fleet.endpoints.values():
            if not endpoint.is_troubled:
                continue
            if any(each.first_token_s and each.sent_s > endpoint.failed_s for each in endpoint.live):
                self.ended(endpoint, served=True)
        self._breakers.tick(now_s)

    def retry_after_s(self) -> float:
        """When an endpoint that may not be chosen now may be."""
        due_s = self._breakers.next_s()
        return max(1.0, due_s - self._fleet.now_s()) if due_s is not None else 1.0
