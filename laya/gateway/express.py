"""Owns: which clients' plain requests go the express lane: from socket to socket in the native core, on this loop's
thread, without an exchange. Answers are whole, or streams that are over within a moment.

A client whose last request was plain is lent to the core with its socket, and so is a connection to the engine. A
request there holds its reservation as any other does. It becomes an exchange, and its client and its connection come
back, when somebody looks at what the endpoint runs, when it takes longer than a moment, or when anything about it or
its answer is not plain; from then on it goes the full way. Where there is no native core, nobody is lent.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from laya.gateway.answering import SSE_HEAD
from laya.gateway.exchange import Exchange
from laya.gateway.heads import own_id_prefix
from laya.gateway.plain import ExpressLane
from laya.gateway.relay import StreamRelay, relay_taken
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya._core import StreamBack
    from laya.gateway.account import Key
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.protocol import LayaProtocol
    from laya.gateway.upstream import UpstreamConnection

logger = logging.getLogger(__name__)
MOMENT_S = 0.25  # a request that takes longer is an exchange
IDLE_S = 1.0  # who is idle for longer is not kept
_KIND = EndpointKind.CHAT.name.lower()


class KnownAs(NamedTuple):
    """What a client's requests said when its key was checked; who says the same is the same."""

    authorization: bytes | None
    host: bytes | None
    key: Key | None
    n_changes: int  # of keys, before it was checked


class Express:
    """Clients and connections by the number that the native lane gave them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._stats = dispatcher.stats
        self._fleet = dispatcher.fleet
        self._native: ExpressLane | None = None
        self._clients: dict[int, tuple[LayaProtocol, KnownAs]] = {}
        self._engines: dict[int, UpstreamConnection] = {}
        self._endpoints: dict[int, Endpoint] = {}  # those that lent a connection
        self._n_changes = 0  # of keys

    def __len__(self) -> int:
        return len(self._clients)

    # clients
    def note(self, exchange: Exchange, authorization: bytes | None, host: bytes | None, *, is_plain: bool) -> None:
        """The plain lane took this request of a client: whether its next one may go here."""
        key, client = exchange.key, exchange.protocol
        is_plain &= exchange.early_error is None and exchange.account is None and not exchange.extra_headers
        is_lasting = key is None or key.grant.expires_s is None
        client.known_as = KnownAs(authorization, host, key, self._n_changes) if is_plain and is_lasting else None

    def lend(self, client: LayaProtocol, known_as: KnownAs, data: bytes) -> bool:
        """Lend a client that has just sent `data`; False where its transport is still busy."""
        client.known_as = None
        transport = client.transport
        is_idle = self._dispatcher.outbox.is_clear(transport)
        if known_as.n_changes != self._n_changes or not is_idle or client.scheme != "http" or client.lane is None:
            return False
        native = self._native
        if native is None:
            native = self._native = ExpressLane(client.lane, own_id_prefix(), SSE_HEAD, client.limits.plain_body_bytes)
            asyncio.get_running_loop().add_reader(native.fileno(), self._turn)
        fd = transport.get_extra_info("socket").fileno()
        number = native.add_client(fd, known_as.authorization, known_as.host)
        if not number:
            return False
        self._clients[number] = client, known_as
        client.lend(number)
        self._see_to(native.offer(number, data, self._reserve))
        return True

    def take_back(self, number: int) -> None:
        """Have one client back."""
        if self._native is not None:
            self._see_to(self._native.take_client(number))

    def recall(self, endpoint: Endpoint) -> None:
        """Have what an endpoint runs, and its connections."""
        if self._native is not None:
            self._see_to(self._native.take_endpoint(endpoint.index))

    def take_all(self) -> None:
        """Have everybody back: who may ask for what has changed."""
        self._n_changes += 1
        if self._native is not None:
            self._see_to(self._native.take_all())

    def sweep(self, now_s: float) -> None:
        """Called a few times a second."""
        if self._native is not None:
            self._see_to(self._native.take_old(now_s - MOMENT_S, now_s - IDLE_S))

    def close(self) -> None:
        """The server ends, or what it was told of requests has changed: the next one to lend begins anew."""
        self.take_all()
        if self._native is not None:
            asyncio.get_running_loop().remove_reader(self._native.fileno())
            self._native = None

    # requests
    def _turn(self) -> None:
        assert self._native is not None
        self._see_to(self._native.turn(self._reserve))

    def _reserve(self, index: int, tokens: int, lacks_engine: bool) -> bool:
        """Asked by the native lane. What is refused here goes the full way, which says why or lets it wait."""
        endpoint = self._fleet.endpoints[index]
        if (lacks_engine and not self._lend_engine(endpoint)) or not endpoint.reserve_express(tokens):
            return False
        self._stats.arrivals += 1
        self._stats.in_flight += 1
        return True

    def _lend_engine(self, endpoint: Endpoint) -> bool:
        pool = endpoint.pool
        connection = pool.take() if pool is not None else None
        if connection is None or pool is None or self._native is None:
            return False
        address = pool.address
        n_answers, fd = address.answers_kept - connection.n_uses, connection.fileno()
        number = self._native.add_engine(fd, endpoint.index, n_answers, address.keeps_streams, endpoint.origin)
        if not number:
            pool.give_back(connection, keep=True)
            return False
        self._engines[number] = connection
        self._endpoints[endpoint.index] = endpoint
        endpoint.recall = self.recall
        connection.lend(lambda: self.recall(endpoint))
        return True

    def _see_to(self, seen: Any) -> None:
        """What came of a call of the native lane, in an order in which every count is right before anybody looks."""
        served, clients, engines = seen
        touched = self._settle(served) if served else ()
        asking = [self._make_exchange(number, asked) for number, _, _, asked in clients if asked is not None]
        for number, n_uses, is_spent, raw in engines:
            self._give_back(self._engines.pop(number), n_uses, raw, is_spent=is_spent)
        for number, raw, unsent, _ in clients:
            client, _ = self._clients.pop(number)
            client.lent = 0
            if unsent and not client.transport.is_closing():
                client.transport.write(unsent)
            client.come_back(raw)
        for connection, answer in asking:
            connection.come_back(answer.raw, answer.error)
        for endpoint in touched:
            self._after(endpoint)

    def _settle(self, served: list[Any]) -> set[Endpoint]:
        """Release and count, as `Dispatcher.settle` does."""
        stats, touched = self._stats, set()
        stats.in_flight -= len(served)
        stats.outcomes["served"] += len(served)
        for each in served:
            number, request_id, index, tokens, route_s, arrived_s, sent_s, first_s, answered_s, n_in, n_out = each
            endpoint = self._endpoints[index]
            self._count_start(endpoint, route_s, sent_s - arrived_s)
            endpoint.stats.ttft.observe(first_s - arrived_s)
            endpoint.stats.count_tokens(n_in, n_out, answered_s - first_s)
            endpoint.stats.count(_KIND, "served")
            endpoint.end_express(tokens, sent_s, answered_s)
            touched.add(endpoint)
            client, known_as = self._clients[number]
            exchange = Exchange(client, self._dispatcher, EndpointKind.CHAT, http_1_0=False, keep_alive=True)
            exchange.request_id, exchange.key, exchange.endpoint = request_id, known_as.key, endpoint
            exchange.arrived_s, exchange.sent_s, exchange.first_token_s = arrived_s, sent_s, first_s
            exchange.route_s = route_s
            exchange.prompt_tokens, exchange.n_tokens_out = n_in or None, n_out
            exchange.outcome, exchange.response_complete = "served", True
            self._dispatcher.settled(exchange)
        return touched

    def _count_start(self, endpoint: Endpoint, route_s: float, own_s: float) -> None:
        self._stats.route.observe(route_s)
        self._stats.added.observe(own_s)
        endpoint.stats.queue_wait.observe(own_s)

    def _after(self, endpoint: Endpoint) -> None:
        """Requests of it have ended."""
        if not endpoint.is_running:
            endpoint.on_busy(endpoint)
        if endpoint.is_troubled:
            self._fleet.health.ended(endpoint, served=True)
        if endpoint.queue:
            self._dispatcher.pump(endpoint)
        elif endpoint.is_replica:
            self._fleet.together.spread(endpoint)

    def _make_exchange(self, number: int, asked: Any) -> tuple[UpstreamConnection, StreamBack]:
        """Gives the connection that its answer comes on, and what is here of that."""
        data, request_id, index, routed, promised, route_s, arrived_s, sent_s, *with_engine = asked
        engine, n_uses, unsent, is_stream, answer = with_engine
        client, known_as = self._clients[number]
        endpoint, connection = self._endpoints[index], self._engines.pop(engine)
        exchange = Exchange(client, self._dispatcher, EndpointKind.CHAT, http_1_0=False, keep_alive=True)
        exchange.request_id, exchange.key, exchange.taken = request_id, known_as.key, data
        exchange.body_complete = exchange.started = exchange.was_sent = True
        exchange.arrived_s = exchange.read_s = arrived_s
        exchange.sent_s, exchange.route_s = sent_s, route_s
        exchange.routed_seqs, exchange.routed_tokens = 1, routed
        exchange.connection = connection
        endpoint.make_live(exchange, promised)
        self._count_start(endpoint, route_s, sent_s - arrived_s)
        client.take_turn(exchange)
        relay = relay_taken(exchange, False if is_stream else None)
        if isinstance(relay, StreamRelay):
            exchange.head_sent = answer.is_head_sent
            relay.has_flowed(answer)
        connection.adopt(relay, n_uses, unsent)
        return connection, answer

    def _give_back(self, connection: UpstreamConnection, n_uses: int, raw: bytes, *, is_spent: bool) -> None:
        """To its pool, for any request; what an engine says without being asked ends the connection."""
        connection.n_uses += n_uses
        if is_spent:
            connection.has_flowed(keep=False)
            return
        connection.come_back(raw, 0)
        connection.keep_idle()
        connection.idle_since_s -= IDLE_S  # it may have been idle for so long
