"""Owns: the requests that are being served or wait, as their own key sees them, and their end on demand.

An admin's key sees and cancels everybody's, any other only its own; what belongs to others does not exist for it.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.errors import NotFound, RequestCancelled
from laya.gateway.account import Key
from laya.gateway.desk import reply
from laya.gateway.exchange import Exchange
from laya.gateway.fleet import Fleet
from laya.gateway.roles import key_of


class OwnRequests:
    """The handlers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[Route]:
        return [
            Route("/v1/requests", self.listed),
            Route("/v1/requests/{request_id:path}", self.cancel, methods=["DELETE"]),
        ]

    async def listed(self, request: Request) -> Response:
        now_s = time.monotonic()
        found = self._seen_by(key_of(request))
        found.sort(key=lambda each: each.arrived_s)
        return reply({"object": "list", "data": [_shown(each, now_s) for each in found]})

    async def cancel(self, request: Request) -> Response:
        """End it where it is: its client is told so, its engine stops, its place is free."""
        request_id, key = request.path_params["request_id"], key_of(request)
        found = [each for each in self._seen_by(key) if each.request_id.decode("latin-1") == request_id]
        if not found:
            raise NotFound(f"No request '{request_id}' is waiting or being served.", param="request_id")
        for each in found:
            by = "its key" if key is None or each.key is key else f"'{key.name}'"
            each.fail(RequestCancelled(f"This request was cancelled by {by}."))
        return reply({"id": request_id, "object": "request", "cancelled": True})

    def of(self, key: Key) -> list[Exchange]:
        """What a key runs."""
        return [each for each in self._all() if each.key is key]

    def cancel_all(self, key: Key) -> int:
        """End whatever a key runs; how many that were."""
        found = self.of(key)
        for each in found:
            each.fail(RequestCancelled(f"The key '{key.name}' was revoked."))
        return len(found)

    def _seen_by(self, key: Key | None) -> list[Exchange]:
        sees_all = key is None or key.role == "admin"
        return [each for each in self._all() if sees_all or each.key is key]

    def _all(self) -> list[Exchange]:
        endpoints = self._fleet.endpoints.values()
        there = [each for endpoint in endpoints for each in (*endpoint.live, *endpoint.queue)]
        return [each for each in there if each.outcome is None]


def _shown(exchange: Exchange, now_s: float) -> dict[str, Any]:
    model = {"model": exchange.endpoint.model_id if exchange.endpoint is not None else None}
    return model | exchange.as_state(now_s)
