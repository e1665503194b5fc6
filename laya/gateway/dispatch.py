"""Owns: the one way of a request. Routing, memory and engines meet here and nowhere else.

1 parse the body, 2 route to an endpoint, 3 admit (reserve, queue or refuse), 4 have the engine ready, 5 relay the
answer, 6 settle. Steps 1 to 3 are plain calls that never wait; waiting is the endpoint's queue; 6 is one function that
every outcome passes. A refusal is an outcome and is never tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from laya.config.pools import away_of
from laya.errors import EngineFailed, InvalidRequest, LayaError
from laya.gateway.body import ParsedBody
from laya.gateway.express import Express
from laya.gateway.keep_alive import keep
from laya.gateway.length import must_count, refuse_hopeless, settle_length
from laya.gateway.node_loss import wait_for_next
from laya.gateway.outbox import Outbox
from laya.gateway.plain import parse
from laya.gateway.pump import Pump
from laya.gateway.relay import broke_off
from laya.gateway.retry import Retries
from laya.gateway.ruling import choose, wrong_task
from laya.gateway.sending import Sending
from laya.gateway.tool_support import check_told
from laya.routing import UNKNOWN_MODEL
from laya.routing.rules import Rules
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya.gateway.auth import KeyRing
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange
    from laya.gateway.fleet import Fleet
    from laya.metrics import GatewayStats
    from laya.routing import RequestRouter

logger = logging.getLogger(__name__)
MOST_TOKENS = 2**32 - 1  # what the routing feature holds
_KIND_NAMES = {kind: kind.name.lower() for kind in EndpointKind}


class Dispatcher:
    """The six steps."""

    def __init__(self, fleet: Fleet, router: RequestRouter, keys: KeyRing, stats: GatewayStats) -> None:
        self.fleet = fleet
        self.router = router
        self.keys = keys
        self.stats = stats
        self.outbox = Outbox()  # to clients
        self.rules = Rules(fleet.config.routing, away_of(fleet.config))
        self.crash_error: Callable[[str, str], LayaError] = broke_off  # (model, reason); the guard knows better
        self.streams = Pump(self.outbox)
        self.express = Express(self)
        keys.on_replaced = self.express.take_all
        self._tasks: set[asyncio.Task[None]] = set()
        self.keeps_said = 0  # bytes of each body, for the request log
        self.keeps_headers: frozenset[str] = frozenset()  # what rules and traces ask of a head
        self.settled: Callable[[Exchange], None] = lambda exchange: None  # who counts what was used
        self.retries = Retries(self)
        self.sending = Sending(self)
        self.send_again = self.sending.send_again

    def arrive(self, exchange: Exchange, authorization: bytes | None, headers: list[tuple[bytes, bytes]]) -> None:
        """A head was read on an inference path. What it already tells to be refused never reads its body."""
        self.stats.arrivals += 1
        self.stats.in_flight += 1
        try:
            key = exchange.key = self.keys.check(authorization, headers)
            if key is not None and key.is_bound:
                key.admit(exchange)
            if self.keys.origins:
                exchange.extra_headers += self.keys.cors_headers(headers)
            if self.keeps_headers:
                said = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
                exchange.kept_headers = {name: value for name, value in said if name in self.keeps_headers}
            name = exchange.header_model
            if name is not None and not self.rules and exchange.early_error is None and exchange.account is None:
                self.router.resolve(name) or self.fleet.find(name)
        except LayaError as error:
            exchange.early_error = error
        except Exception as error:
            exchange.early_error = self.fault(f"request {exchange.request_id!r}", error)

    def dispatch(self, exchange: Exchange) -> None:
        """The body is complete and it is this exchange's turn on its connection."""
        exchange.read_s = time.monotonic()
        try:
            parsed = exchange.parsed = parse(exchange.kind, exchange.body)  # 1 parse
            if self.keeps_said:
                exchange.said = bytes(exchange.body[: self.keeps_said])
            exchange.body = b""  # `parsed` has it
            if exchange.account is None:  # 2 route
                endpoint = exchange.endpoint = self._route(exchange, parsed)
            else:
                endpoint = exchange.account.route(exchange, parsed, self._route, self.fleet.roster.id_of)
            if endpoint.use is not None:
                endpoint.use.begin(exchange)
                endpoint.use.charge(exchange, endpoint)
            if parsed.keep_alive_s is not None:
                most_s = self.fleet.config.server.max_keep_alive
                keep(self.fleet.replicas(endpoint), parsed.keep_alive_s, exchange.key, most_s)
            self.admit(exchange, endpoint)  # 3 admit
        except LayaError as error:
            exchange.fail(error)
        except Exception as error:
            exchange.fail(self.fault(f"request {exchange.request_id!r}", error))

    def dispatch_taken(
        self,
        exchange: Exchange,
        index: int,
        request: bytes,
        routed_tokens: int,
        promised_tokens: int,
        route_s: float,
        wants_usage: bool | None,
    ) -> None:
        """Steps 1 and 2 of a request that the plain lane took are done; the rest, where it goes straight through."""
        exchange.read_s, exchange.route_s = exchange.arrived_s, route_s
        exchange.routed_seqs, exchange.routed_tokens = 1, routed_tokens
        endpoint = exchange.endpoint = self.fleet.endpoints[index]
        self.stats.route.observe(route_s)
        try:
            if exchange.account is not None:
                exchange.account.take(exchange, endpoint, endpoint.model_id, self.fleet.roster.id_of)
            connection = endpoint.take_straight(exchange, promised_tokens)
            if connection is None:
                exchange.read_taken()
                self.admit(exchange, endpoint)
                return
            self.sending.send_taken(exchange, endpoint, request, connection, wants_usage)  # 5 relay
        except LayaError as error:
            exchange.fail(error)
        except Exception as error:
            exchange.fail(self.fault(f"request {exchange.request_id!r}", error))

    def fault(self, what: str, error: BaseException) -> LayaError:
        """A fault of Laya's own: one request fails and says so, the log has the rest."""
        if isinstance(error, LayaError):
            return error
        logger.error("%s failed", what, exc_info=error)
        return LayaError("Laya failed on this request; its log says why.")

    # 2 route
    def _route(self, exchange: Exchange, parsed: ParsedBody) -> Endpoint:
        name = exchange.header_model or parsed.model
        if name is None:
            raise InvalidRequest(f"'model' is missing. This server has: {self.fleet.names_text()}.", param="model")
        tokens = (parsed.prompt_bound_tokens + (parsed.max_tokens or 0)) * parsed.n_seqs
        if tokens > MOST_TOKENS:
            tokens = MOST_TOKENS
        start_s = time.perf_counter()
        index, candidate = choose(self, exchange, parsed, name, tokens)
        exchange.route_s = time.perf_counter() - start_s
        self.stats.route.observe(exchange.route_s)
        if index < 0:
            if index == UNKNOWN_MODEL:
                self.fleet.find(candidate)  # a file that was just dropped into models_dir, or model_not_found
                index, candidate = choose(self, exchange, parsed, name, tokens)
            if index < 0 and candidate in self.fleet.members:
                self.fleet.pools.open_to_all(candidate)
                index, candidate = choose(self, exchange, parsed, name, tokens)
            if index < 0:
                self.fleet.draining.check(name)
                index = self.fleet.together.unloadable.route(candidate, parsed.n_seqs, tokens, exchange.kind)
            if index < 0:
                raise EngineFailed(
                    f"No engine of '{name}' can take requests now: each failed one after another.",
                    retry_after_s=self.fleet.health.retry_after_s(),
                )
        exchange.routed_seqs, exchange.routed_tokens = parsed.n_seqs, tokens
        endpoint = self.fleet.endpoints[index]
        exchange.endpoint = endpoint
        if exchange.kind not in endpoint.kinds:
            raise wrong_task(self.fleet, endpoint, exchange.kind)
        check_told(self.fleet, endpoint, parsed)
        if parsed.generates and parsed.max_tokens is None:  # promised and clamped as if the client had said it
            parsed.max_tokens = endpoint.settings.defaults.get("max_tokens")
            exchange.has_default_length = True
        return endpoint

    # 3 admit
    def admit(self, exchange: Exchange, endpoint: Endpoint) -> None:
        if endpoint.pool is None:
            endpoint.enqueue(exchange)
            if endpoint.is_replica:
                self.fleet.together.leave_to_others(endpoint)
            if endpoint.queue:
                self.fleet.wake(endpoint)  # 4 ready: the queue is pumped when the engine is there
        elif must_count(exchange, endpoint):
            refuse_hopeless(exchange, endpoint)
            endpoint.check_queue(is_counted=False)
            endpoint.n_counting += 1
            self.spawn(self._count_then_admit(exchange, endpoint))
        elif not endpoint.queue and endpoint.try_reserve(exchange):
            self.sending.send(exchange, endpoint)
        else:
            endpoint.enqueue(exchange)

    def pump(self, endpoint: Endpoint) -> None:
        """Let in what waits, whoever is next in line first, as far as there is room."""
        if endpoint.is_pumping:
            return
        endpoint.is_pumping = True
        try:
            self._let_in(endpoint)
        finally:
            endpoint.is_pumping = False

    def _let_in(self, endpoint: Endpoint) -> None:
        while endpoint.queue and endpoint.pool is not None:
            exchange = endpoint.queue.peek()
            if must_count(exchange, endpoint):
                if endpoint.held_back is not None:  # nobody is let in, and the engine may not even be there
                    return
                endpoint.queue.take()
                try:
                    refuse_hopeless(exchange, endpoint)
                except LayaError as error:
                    exchange.fail(error)
                    continue
                endpoint.n_counting += 1
                self.spawn(self._count_then_admit(exchange, endpoint, first=True))
                continue
            try:
                if not endpoint.try_reserve(exchange):
                    return
            except LayaError as error:
                endpoint.queue.take()
                exchange.fail(error)
                continue
            endpoint.queue.take()
            self.sending.send(exchange, endpoint)

    async def _count_then_admit(self, exchange: Exchange, endpoint: Endpoint, *, first: bool = False) -> None:
        """Ask the engine's tokenizer, refuse or clamp by the exact number, go on with step 3."""
        try:
            try:
                if endpoint.pool is not None and exchange.outcome is None:
                    await settle_length(exchange, endpoint)
            finally:
                endpoint.n_counting -= 1
            if exchange.outcome is not None:
                return
            if endpoint.pool is None:  # the engine went away meanwhile
                self.admit(exchange, endpoint)
            elif (first or not endpoint.queue) and endpoint.try_reserve(exchange):
                self.sending.send(exchange, endpoint)
            else:
                endpoint.enqueue(exchange, first=first)
        except LayaError as error:
            exchange.fail(error)
        except OSError as error:
            if isinstance(error, ConnectionError) and self.retries.refused(exchange, endpoint):
                return
            if isinstance(error, ConnectionError) and not exchange.tried_later:
                await self.sending.try_later(exchange, endpoint)
            elif not wait_for_next(self, exchange, is_counting=True):
                exchange.fail(EngineFailed(f"The engine of '{endpoint.model_id}' could not count the prompt: {error}"))
        except Exception as error:
            exchange.fail(self.fault(f"request {exchange.request_id!r}", error))

    def let_go(self, exchange: Exchange) -> None:
        """Its engine is done with it, before it is settled: another one may have its place."""
        assert exchange.endpoint is not None
        exchange.endpoint.release(exchange)
        self.pump(exchange.endpoint)

    # 6 settle
    def settle(self, exchange: Exchange) -> None:
        """Release and count. Called once for each exchange, by `Exchange.finish`."""
        outcome, endpoint, stats = exchange.outcome, exchange.endpoint, self.stats
        assert outcome is not None
        stats.in_flight -= 1
        stats.outcomes[outcome] += 1
        if exchange.turns is not None:
            exchange.turns.restore()
        self.settled(exchange)
        if exchange.account is not None:
            exchange.account.end(exchange)
        if endpoint is None:
            stats.unknown.count(_KIND_NAMES[exchange.kind], outcome)
            return
        self.router.settle_route(endpoint.index, exchange.routed_seqs, exchange.routed_tokens)
        if endpoint.is_troubled:
            self.fleet.health.ended(endpoint, served=outcome == "served")
        if endpoint.use is not None:
            endpoint.use.end(exchange)
        endpoint.release(exchange)
        model = endpoint.stats
        model.count(_KIND_NAMES[exchange.kind], outcome)
        if exchange.first_token_s:
            model.ttft.observe(exchange.first_token_s - exchange.arrived_s)
        if outcome == "served":
            answering_s = time.monotonic() - exchange.first_token_s if exchange.first_token_s else 0.0
            model.count_tokens(exchange.prompt_tokens or 0, exchange.n_tokens_out, answering_s)
        if exchange.engine_lost:
            self.sending.pump_soon(endpoint)
        elif endpoint.queue:
            self.pump(endpoint)
        elif endpoint.is_replica:
            self.fleet.together.spread(endpoint)

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
