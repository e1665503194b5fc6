"""Owns: the requests that are being served, wait or ended lately, as their own key sees them, and their end on demand.

An admin's key sees and cancels everybody's, any other only its own; what belongs to others does not exist for it.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.errors import InvalidRequest, LayaError, NotFound, RequestCancelled
from laya.gateway.account import Key
from laya.gateway.desk import reply
from laya.gateway.exchange import Exchange
from laya.gateway.explaining import explain_facts
from laya.gateway.fields import whole_number
from laya.gateway.fleet import Fleet
from laya.gateway.generating import Generating
from laya.gateway.recent import Ended, Recent
from laya.gateway.request_log import redacted
from laya.gateway.request_view import Asked, asked_of, listed, parts_of
from laya.gateway.roles import key_of
from laya.routing.told import Told


class OwnRequests:
    """The handlers."""

    def __init__(self, fleet: Fleet, recent: Recent) -> None:
        self._fleet = fleet
        self._recent = recent
        self._generating = Generating()

    def routes(self) -> list[Route]:
        one = "/v1/requests/{request_id:path}"
        return [
            Route("/v1/requests", self.listed),
            Route(one, self.one, methods=["GET"]),
            Route(one, self.cancel, methods=["DELETE"]),
        ]

    async def listed(self, request: Request) -> Response:
        """`?ended=20`: also so many of those that ended lately, the newest first."""
        key, said = key_of(request), request.query_params.get("ended", "0")
        n_ended = whole_number(said)
        if n_ended is None:
            raise InvalidRequest(f"'ended' is '{said}': expected a whole number.", param="ended")
        found = self._seen_by(key)
        found.sort(key=lambda each: each.arrived_s)
        figures = await self._generating.figures({each.endpoint for each in found if each.endpoint is not None})
        now_s = time.monotonic()
        data = [
            listed(each, self._fleet, now_s, lambda model_id: _may_see(key, model_id, self._fleet))
            | figures.get(each, {})
            for each in found
            if each.outcome is None
        ]
        ended = [each.shown for each in self._ended_for(key)[:n_ended]] if n_ended else []
        return reply({"object": "list", "data": data, "ended": ended})

    async def one(self, request: Request) -> Response:
        """A request that is there or ended lately: where its time went, and its route explained, as it would be now."""
        request_id, key = request.path_params["request_id"], key_of(request)
        now_s = time.monotonic()
        for each in self._seen_by(key):
            if each.request_id.decode("latin-1") == request_id:
                shown = listed(each, self._fleet, now_s, lambda model_id: _may_see(key, model_id, self._fleet))
                engine = {"engine": each.endpoint.name if each.endpoint is not None else None}
                body = redacted(each.said.decode("utf-8", "replace")) if each.said else None
                return self._told(shown | engine, parts_of(each, now_s), asked_of(each), body, key)
        for ended in self._ended_for(key):
            if ended.shown["id"] == request_id:
                return self._told(ended.shown, ended.parts, ended.asked, ended.body, key)
        raise NotFound(f"No request '{request_id}' is there, or ended lately.", param="request_id")

    def _told(
        self, shown: dict[str, Any], parts: list[dict[str, Any]], asked: Asked | None, body: str | None, key: Key | None
    ) -> Response:
        route, why_no_route = None, None
        if asked is None:
            why_no_route = "it went straight to the one engine of its model, or was refused before a route was chosen"
        else:
            try:
                route = _for(key, explain_facts(self._fleet, asked.facts, asked.prefix_blocks), self._fleet)
            except LayaError as error:
                why_no_route = error.message
        captures = self._fleet.config.request_log
        return reply(
            shown
            | {
                "object": "request",
                "parts": parts,
                "route": route,
                "why_no_route": why_no_route,
                "body": body,
                "is_captured": captures.path is not None and captures.content,
            }
        )

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

    def _ended_for(self, key: Key | None) -> list[Ended]:
        ended = self._recent.look()
        if key is None or key.role == "admin":
            return ended
        return [each for each in ended if each.owner == key.grant.owner]

    def _seen_by(self, key: Key | None) -> list[Exchange]:
        sees_all = key is None or key.role == "admin"
        return [each for each in self._all() if sees_all or each.key is key]

    def _all(self) -> list[Exchange]:
        endpoints = self._fleet.endpoints.values()
        there = [each for endpoint in endpoints for each in (*endpoint.live, *endpoint.queue)]
        return [each for each in there if each.outcome is None]


def _may_see(key: Key | None, model_id: str, fleet: Fleet) -> bool:
    return key is None or key.may_use(model_id, model_id, fleet.roster.id_of)


def _for(key: Key | None, told: Told, fleet: Fleet) -> Told:
    """What of an explanation a key may read: another's models do not exist for it, and rules are the admins'."""
    if key is None or key.role == "admin":
        return told
    tried = tuple(each for each in told.tried if _may_see(key, each.model, fleet))
    models = tuple(each for each in told.models if _may_see(key, each, fleet))
    return msgspec.structs.replace(told, verdicts=(), tried=tried, models=models)
