"""Owns: for how long engines that tell no progress (programs, other servers) have said nothing to their requests.

What was heard is counted by the kernel, in bytes that came over the request's connection. That is the same whichever
way an answer goes, the native pump's too, and costs requests nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange


class Silence:
    """Of the requests of one fleet. Times are by the caller's clock."""

    def __init__(self) -> None:
        self._heard: dict[Endpoint, dict[Exchange, tuple[object, float]]] = {}  # what was, and since when it is that
        self._served: dict[Endpoint, tuple[object, float]] = {}

    def look(self, endpoint: Endpoint, now_s: float) -> dict[Exchange, float]:
        """Seconds since each of its requests was sent or last heard of; none for those that wait for their client."""
        before, now = self._heard.get(endpoint, {}), {}
        for exchange in endpoint.live:
            connection = exchange.connection
            if connection is not None and not exchange.upstream_paused:
                sign = connection, connection.n_received()
                was = before.get(exchange)
                now[exchange] = was if was is not None and was[0] == sign else (sign, now_s)
                if was is not None and was[0] != sign:
                    self._served[endpoint] = endpoint.mean_service_s, now_s
        self._heard[endpoint] = now
        # moves with each request that is served, whole between two looks too
        if self._served.setdefault(endpoint, (endpoint.mean_service_s, now_s))[0] != endpoint.mean_service_s:
            self._served[endpoint] = endpoint.mean_service_s, now_s
        return {exchange: now_s - since_s for exchange, (_, since_s) in now.items()}

    def of_all(self, endpoint: Endpoint, now_s: float) -> float:
        """Seconds since any of its requests was heard of, or it was first looked at."""
        return now_s - self._served[endpoint][1] if endpoint in self._served else 0.0

    def forget(self, endpoint: Endpoint) -> None:
        """Its engine is a new one, or gone."""
        self._heard.pop(endpoint, None)
        self._served.pop(endpoint, None)
