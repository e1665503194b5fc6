"""Owns: step 5 up to the engine's first byte: a request goes out on a kept connection or a new one, once more where the
engine never read it, and waits for the next engine where this one is gone. What comes back is relay.py's.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from laya.errors import EngineFailed, LayaError
from laya.gateway.endpoint import ENGINE_STARTS
from laya.gateway.engine_body import engine_body
from laya.gateway.hops import check_hops, hop_line
from laya.gateway.node_loss import wait_for_next
from laya.gateway.relay import relay_taken
from laya.gateway.relay_choice import relay_for
from laya.gateway.upstream import UpstreamConnection

if TYPE_CHECKING:
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange

CRASH_NOTICE_S = 0.2  # an engine's connections break a moment before its end is known


class Sending:
    """For the exchanges that have their place at an endpoint."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._stats = dispatcher.stats

    def send(self, exchange: Exchange, endpoint: Endpoint) -> None:
        assert exchange.parsed is not None
        exchange.sent_s = time.monotonic()
        if exchange.turns is None or not exchange.turns.n_answered:
            endpoint.stats.queue_wait.observe(exchange.sent_s - exchange.arrived_s)
        try:
            if endpoint.is_remote:
                check_hops(exchange.request_id)
            exchange.upstream_body = exchange.upstream_body or engine_body(exchange, endpoint)
            # who has a head already can't be sent once more, as over a kept connection that may be needed
            connection = endpoint.pool.take() if endpoint.pool is not None and not exchange.head_sent else None
            if connection is not None:
                self._write(exchange, endpoint, connection)
            else:
                self._send_fresh(exchange, endpoint)
        except Exception as error:  # whoever made room for it goes on
            exchange.fail(self._dispatcher.fault(f"request {exchange.request_id!r}", error))

    def send_taken(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        request: bytes,
        connection: UpstreamConnection,
        wants_usage: bool | None,
    ) -> None:
        """As the plain lane put it together, on a kept connection."""
        exchange.sent_s = time.monotonic()
        endpoint.stats.queue_wait.observe(exchange.sent_s - exchange.arrived_s)
        exchange.connection, exchange.was_sent = connection, True
        connection.send(request, relay_taken(exchange, wants_usage))
        self._stats.added.observe(time.monotonic() - exchange.read_s)

    def send_again(self, exchange: Exchange) -> None:
        """The connection was closed before the request was read: once more, on a new one."""
        assert exchange.endpoint is not None
        exchange.sent_again, exchange.was_sent = True, False
        exchange.read_taken()
        exchange.upstream_body = exchange.upstream_body or engine_body(exchange, exchange.endpoint)
        self._send_fresh(exchange, exchange.endpoint)

    def _send_fresh(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Over a connection that is opened for it."""
        pool = endpoint.pool
        if pool is None:
            exchange.fail(EngineFailed(f"The engine of '{endpoint.model_id}' has just stopped."))
            return

        def connected(result: UpstreamConnection | OSError) -> None:
            if exchange.endpoint is not endpoint or exchange.outcome is not None:
                if not isinstance(result, OSError):
                    result.abort()
            elif _is_away(result, endpoint) and self._dispatcher.retries.refused(exchange, endpoint):
                return
            elif isinstance(result, ConnectionError) and not exchange.tried_later:
                self._dispatcher.spawn(self.try_later(exchange, endpoint))
            elif isinstance(result, OSError):
                if not wait_for_next(self._dispatcher, exchange):
                    exchange.fail(EngineFailed(f"The engine of '{endpoint.model_id}' can't be reached: {result}"))
            else:
                self._write(exchange, endpoint, result)

        pool.connect(connected)

    def _write(self, exchange: Exchange, endpoint: Endpoint, connection: UpstreamConnection) -> None:
        pool = endpoint.pool
        if pool is None:
            connection.abort()
            exchange.fail(EngineFailed(f"The engine of '{endpoint.model_id}' has just stopped."))
            return
        exchange.connection, exchange.was_sent = connection, True
        if exchange.upstream_paused:  # since it waited
            connection.pause()
        more = hop_line(exchange.request_id) if endpoint.is_remote else b""
        request = pool.request_bytes(ENGINE_STARTS[exchange.kind], exchange.upstream_body, more)
        connection.send(request, relay_for(exchange))
        if not exchange.deadline_s:  # it went straight through: what it took here is Laya's own time
            self._stats.added.observe(time.monotonic() - exchange.read_s)

    async def try_later(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """The engine is gone and never saw the request, which waits, once, for the next one."""
        exchange.tried_later = True
        exchange.read_taken()
        exchange.sent_s = 0.0
        endpoint.release(exchange)
        await asyncio.sleep(CRASH_NOTICE_S)
        if exchange.outcome is None:
            try:
                self._dispatcher.admit(exchange, endpoint)
            except LayaError as error:
                exchange.fail(error)
        self._dispatcher.pump(endpoint)

    def next_turn(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Some of its prompts are answered: it gives its places back and waits for the next ones behind the others."""
        exchange.was_sent = exchange.sent_again = exchange.tried_later = False
        exchange.read_s = time.monotonic()
        endpoint.rejoin(exchange)
        endpoint.release(exchange)
        exchange.sent_s = 0.0  # only now: what was not sent leaves the line when it is released
        if endpoint.pool is None:
            self._dispatcher.fleet.wake(endpoint)
        else:
            self._dispatcher.pump(endpoint)

    def pump_soon(self, endpoint: Endpoint) -> None:
        """A place became free at an engine that may be dying: whoever waits is for the next one."""
        if endpoint.queue:
            asyncio.get_running_loop().call_later(CRASH_NOTICE_S, self._dispatcher.pump, endpoint)


def _is_away(result: UpstreamConnection | OSError, endpoint: Endpoint) -> bool:
    """Whether it is the engine that takes no connection. Of another server any reason says so: its name, its route, its
    certificate; to an engine here Laya itself may have no files left."""
    return isinstance(result, OSError if endpoint.is_remote else ConnectionError)
