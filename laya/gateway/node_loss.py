"""Owns: what becomes of requests when a node of the cluster is lost with the engines on it.

An engine's connections break, or stay silent, before anybody says that its node is gone. So one that breaks there makes
the engine suspect: nothing more is let in, and it is asked whether it lives. One that can't be reached is lost, and is
loaded again elsewhere. Requests that have not got a byte wait for that; streams that have end with an error. Engines on
other nodes hear nothing of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from laya.errors import EngineCrashed, LayaError

if TYPE_CHECKING:
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange
    from laya.gateway.fleet import Fleet

MOST_TRIES = 3  # of one request, by engines that broke under it
SUSPECT_S = 3.0  # that an engine may not be reached; one that crashed is told within half a second
ASK_EVERY_S = 0.2
ANSWER_S = 2.0
_HOLDER = "node"


class NodeLoss:
    """See the module; of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._suspects: set[Endpoint] = set()

    def suspect(self, endpoint: Endpoint) -> None:
        """A connection to its engine broke, or none can be made."""
        if endpoint in self._suspects or endpoint.pool is None:
            return
        self._suspects.add(endpoint)
        endpoint.hold(_HOLDER, f"node {endpoint.node} does not answer")
        self._fleet.spawn(self._look_into(endpoint))

    async def _look_into(self, endpoint: Endpoint) -> None:
        pool, end_s = endpoint.pool, self._fleet.now_s() + SUSPECT_S
        try:
            while pool is not None and endpoint.pool is pool and pool.address.alive_path is not None:
                try:
                    await pool.fetch("GET", pool.address.alive_path, deadline_s=ANSWER_S)
                    return
                except OSError as error:
                    if self._fleet.now_s() > end_s:
                        self._fleet.supervisor.lose(endpoint.name, f"its engine can't be reached ({error})")
                        return
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            self._suspects.discard(endpoint)
            endpoint.hold(_HOLDER, None)
            self._fleet.pump(endpoint)

    def lost(self, endpoint: Endpoint, node: str) -> None:
        """Its engine is gone with that node, and a new one is on its way."""
        fleet = self._fleet
        fleet.placing.avoid(node)
        fleet.stats.count_unload(endpoint.model_id, "node_lost")
        text = f"the engine of '{endpoint.name}' is lost with node {node} and is loaded again"
        fleet.events.add("node_lost", text, model=endpoint.model_id)
        for exchange in list(endpoint.live):  # nobody else tells those on a node that only went silent
            exchange.fail(EngineCrashed(f"The engine of '{endpoint.name}' is lost with its node {node}."))
        fleet.wake(endpoint)


def wait_for_next(dispatcher: Dispatcher, exchange: Exchange, *, is_counting: bool = False) -> bool:
    """A request whose engine, on a node, broke under it waits for the next one; False where it may not.

    is_counting: the engine had been asked how long it is, which nothing has been sent for.
    """
    endpoint = exchange.endpoint
    if endpoint is None or endpoint.node is None or not (exchange.sent_s or is_counting):
        return False
    if exchange.head_sent or exchange.disconnected or exchange.n_tries >= MOST_TRIES:
        return False
    exchange.read_taken()
    if not exchange.can_be_sent_again:
        return False
    dispatcher.fleet.losses.suspect(endpoint)
    connection, exchange.connection = exchange.connection, None
    if connection is not None:
        connection.abort()
    endpoint.release(exchange)
    exchange.begin_anew()
    exchange.n_tries += 1
    try:
        endpoint.rejoin(exchange)
        if endpoint.pool is None:
            dispatcher.fleet.wake(endpoint)
    except LayaError as error:
        exchange.fail(error)
    return True
