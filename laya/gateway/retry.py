"""Owns: another replica for a request that its own will not serve: one that waits there, or one whose engine failed it;
and another model, by its rule or pool, for one that waits where the load failed.

Never after a byte of the answer was sent. What an engine may have begun to work on is tried again once, and within a
budget; what no engine has seen merely moves. Decides nothing about health; the route table says who may be chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.errors import LayaError
from laya.gateway.node_loss import wait_for_next
from laya.gateway.ruling import choose
from laya.gateway.tool_support import check_told
from laya.routing.health import RetryBudget, may_retry
from laya.routing.table import FLAG_STREAMING

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange


class Retries:
    """See the module; one for each gateway."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._budget = RetryBudget()
        self._n_seen = 0  # arrivals that the budget knows of

    def failed(self, exchange: Exchange) -> bool:
        """A request has met an engine's own fault; whether another replica takes it."""
        if exchange.was_sent and exchange.endpoint is not None:
            self._dispatcher.fleet.health.failed(exchange.endpoint)
        return self.try_elsewhere(exchange) or wait_for_next(self._dispatcher, exchange)

    def turned_away(self, exchange: Exchange) -> None:
        """An engine answered that it will not do it: as if it had never been sent there."""
        exchange.was_sent = False
        if exchange.endpoint is not None:
            self._dispatcher.fleet.health.failed(exchange.endpoint)

    def refused(self, exchange: Exchange, endpoint: Endpoint) -> bool:
        """An engine takes no connection, so it never saw this request; whether another replica takes it."""
        self._dispatcher.fleet.health.failed(endpoint)
        return self.try_elsewhere(exchange)

    def try_elsewhere(self, exchange: Exchange) -> bool:
        """Have another replica serve it; False where none may, and nothing has changed then."""
        endpoint = exchange.endpoint
        if endpoint is None or (exchange.head_sent and exchange.sent_s) or exchange.disconnected:
            return False
        if endpoint.load_error is not None and self._try_other_model(exchange, endpoint):
            return True
        fleet = self._dispatcher.fleet
        group = fleet.replicas(endpoint)
        if endpoint.settings.peer is not None:
            return self._try_other_peer(exchange, endpoint)
        others = [each for each in group if each is not endpoint and each.is_serving]
        exchange.read_taken()
        if not others or exchange.n_moves >= len(group) or not exchange.can_be_sent_again:
            return False
        index = self._route_around(exchange, endpoint)
        if index < 0:
            return False
        if exchange.was_sent and not self._may_retry(exchange):
            fleet.health.give_back(fleet.endpoints[index], exchange.routed_seqs, exchange.routed_tokens)
            return False
        if exchange.was_sent:
            exchange.n_tries += 1
            self._dispatcher.stats.count_retry(endpoint.model_id)
        self._leave(exchange, endpoint)
        self._arrive(exchange, fleet.endpoints[index])
        self._dispatcher.sending.pump_soon(endpoint)
        return True

    def _try_other_peer(self, exchange: Exchange, endpoint: Endpoint) -> bool:
        """Where the name that it asked for stands for a model on several peers: another one of them."""
        dispatcher, fleet = self._dispatcher, self._dispatcher.fleet
        exchange.read_taken()
        parsed = exchange.parsed
        name = exchange.header_model or (parsed.model if parsed is not None else None)
        members = fleet.members.get(name or "", ())
        if parsed is None or name is None or endpoint.model_id not in members:
            return False
        if exchange.n_moves >= len(members) or not exchange.can_be_sent_again or exchange.head_sent:
            return False
        index = self._route_around(exchange, endpoint, name)
        if index < 0:
            fleet.pools.open_to_all(name)
            index = self._route_around(exchange, endpoint, name)
        if index < 0:
            return False
        other = fleet.endpoints[index]
        may_move = self._suits(exchange, parsed, other, name) and (not exchange.was_sent or self._may_retry(exchange))
        if not may_move or not counts_there(exchange, endpoint, other):
            fleet.health.give_back(other, exchange.routed_seqs, exchange.routed_tokens)
            return False
        if exchange.was_sent:
            exchange.n_tries += 1
            dispatcher.stats.count_retry(endpoint.model_id)
        self._leave(exchange, endpoint)
        self._arrive(exchange, other)
        dispatcher.sending.pump_soon(endpoint)
        return True

    def _try_other_model(self, exchange: Exchange, endpoint: Endpoint) -> bool:
        """Where the load of its model failed: the next one that may be chosen by what it asked for."""
        dispatcher = self._dispatcher
        fleet = dispatcher.fleet
        exchange.read_taken()
        parsed = exchange.parsed
        name = exchange.header_model or (parsed.model if parsed is not None else None)
        if parsed is None or name is None or exchange.was_sent or exchange.head_sent:
            return False  # a head tells the model
        try:
            index, _ = choose(dispatcher, exchange, parsed, name, exchange.routed_tokens)
        except LayaError:  # the rules are others by now, and leave it undecided
            return False
        if index < 0:
            return False
        other = fleet.endpoints[index]
        if not self._suits(exchange, parsed, other, name) or not counts_there(exchange, endpoint, other):
            fleet.health.give_back(other, exchange.routed_seqs, exchange.routed_tokens)
            return False
        if exchange.has_default_length:
            parsed.max_tokens = other.settings.defaults.get("max_tokens")
        self._leave(exchange, endpoint)
        self._arrive(exchange, other)
        return True

    def _suits(self, exchange: Exchange, parsed: ParsedBody, other: Endpoint, name: str) -> bool:
        fleet, account = self._dispatcher.fleet, exchange.account
        if exchange.kind not in other.kinds:
            return False
        if account is not None and not account.may_use(name, other.model_id, fleet.roster.id_of):
            return False
        try:
            check_told(fleet, other, parsed)
        except LayaError:
            return False
        return True

    def _may_retry(self, exchange: Exchange) -> bool:
        n_arrivals = self._dispatcher.stats.arrivals
        self._budget.arrived(n_arrivals - self._n_seen)
        self._n_seen = n_arrivals
        return may_retry(n_bytes_sent=0, n_tries=exchange.n_tries, budget=self._budget)

    def _route_around(self, exchange: Exchange, endpoint: Endpoint, name: str | None = None) -> int:
        """The endpoint that would serve it were its own not there, with the request on it; below 0: none. name: of a
        pool; None: its model's."""
        router, parsed = self._dispatcher.router, exchange.parsed
        assert parsed is not None
        session, flags = exchange.header_session or parsed.session, FLAG_STREAMING if parsed.wants_stream else 0
        router.set_eligible(endpoint.index, False)
        try:
            return router.route(
                name or endpoint.model_id,
                session,
                exchange.kind,
                flags,
                0,
                exchange.routed_tokens,
                exchange.routed_seqs,
                b"",
            )
        finally:
            was_eligible = endpoint.takes_new  # beside others that serve
            if endpoint.settings.peer is not None:  # it is the only one of its model
                was_eligible = not endpoint.is_drained and endpoint.load_error is None
            router.set_eligible(endpoint.index, was_eligible)

    def _leave(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Give back what it holds there, as its end would."""
        connection, exchange.connection = exchange.connection, None
        if connection is not None:
            connection.abort()
        self._dispatcher.fleet.health.give_back(endpoint, exchange.routed_seqs, exchange.routed_tokens)
        endpoint.release(exchange)  # out of its queue too
        exchange.begin_anew()

    def _arrive(self, exchange: Exchange, endpoint: Endpoint) -> None:
        exchange.endpoint = endpoint
        try:
            self._dispatcher.admit(exchange, endpoint)
        except LayaError as error:
            exchange.fail(error)


def counts_there(exchange: Exchange, endpoint: Endpoint, other: Endpoint) -> bool:
    """Count it against the limits of the other model, no longer against its own's; False where they refuse it."""
    if other.use is endpoint.use:  # an engine of the same model, or neither has limits
        return True
    if other.use is not None:
        try:
            other.use.begin(exchange)
            other.use.charge(exchange, other)
        except LayaError:
            other.use.end(exchange)
            return False
    if endpoint.use is not None:
        endpoint.use.end(exchange)
    return True
