"""Owns: what the page asks beside the state: what would fit and why, what there is room for, the last ten minutes, the
catalogue, the lines that connect clients; and what it does: pin a model, pause them all.

Answers only; the work is in the modules of the same names.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.connect import names, snippet
from laya.errors import InvalidRequest
from laya.gateway.desk import reply, switch
from laya.gateway.headroom import Headrooms
from laya.gateway.history import EVERY_S, KEPT_S, History
from laya.gateway.roles import key_of
from laya.gateway.trial import try_load
from laya.gateway.tuning import pin
from laya.models import entries

if TYPE_CHECKING:
    from laya.gateway.desk import Desk

_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")


class PageDesk:
    """The handlers."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._fleet = desk.fleet
        self._headrooms = Headrooms(desk.fleet)
        self.history = History(desk.devices)

    def routes(self) -> list[Route]:
        return [
            Route("/admin/fit", self.fit),
            Route("/admin/headroom", self.headroom),
            Route("/admin/history", self.past),
            Route("/admin/catalogue", self.catalogue),
            Route("/admin/pause", self.pause, methods=["POST"]),
            Route("/admin/models/{model_id:path}/pin", self.pin, methods=["POST"]),
            Route("/v1/connect", self.connect),
        ]

    async def fit(self, request: Request) -> Response:
        """What a load of `model` would do now, with `flags` instead of its configured settings."""
        query = request.query_params
        if not query.get("model"):
            raise InvalidRequest("'model' is missing: the model that would be loaded.", param="model")
        return reply(await try_load(self._fleet, query["model"], query.get("flags", "")))

    async def headroom(self, request: Request) -> Response:
        return reply({"devices": await self._headrooms.of(self._desk.devices())})

    async def past(self, request: Request) -> Response:
        """Samples younger than `after`, Unix seconds."""
        said = request.query_params.get("after", "0")
        if not _SECONDS.fullmatch(said):
            raise InvalidRequest(f"'after' is '{said[:64]}': expected Unix seconds.", param="after")
        return reply({"every_s": EVERY_S, "kept_s": KEPT_S, "devices": self.history.after(float(said))})

    async def catalogue(self, request: Request) -> Response:
        """The catalogue's models that are not served here."""
        await self._fleet.refresh()
        known = {name for group in self._fleet.served() for name in self._names(group[0].model_id)}
        shown: list[dict[str, Any]] = [
            {"id": entry.id, "task": entry.task, "what_for": entry.what_for, "file_bytes": entry.file_bytes}
            for entry in entries()
            if known.isdisjoint(entry.names)
        ]
        return reply({"models": shown})

    def _names(self, model_id: str) -> list[str]:
        return [model_id, *self._fleet.roster.aliases(model_id)]

    async def connect(self, request: Request) -> Response:
        """The lines for every client: this server as it was reached, `model`, its window, and the key of who asks."""
        name, key = request.query_params.get("model", ""), key_of(request)
        roster = self._fleet.roster
        if key is not None and not key.may_use(name, roster.id_of(name), roster.id_of):
            raise key.forbidden_model(name)
        endpoint = self._fleet.find(name)
        said = request.headers.get("authorization", "").partition(" ")[2] if key is not None else ""
        window = await self._fleet.window(endpoint)
        url = f"{request.url.scheme}://{request.url.netloc}"
        lines = [
            snippet(
                client,
                url,
                endpoint.model_id,
                api_key=said or None,
                context_length=window,
                needs_key=key is not None,
            )
            for client in names()
        ]
        return reply(
            {"base_url": f"{url}/v1", "context_length": window, "needs_key": key is not None, "clients": lines}
        )

    async def pause(self, request: Request) -> Response:
        """`?on=true`: new requests wait from now on; `?on=false`: they do not any more."""
        self._fleet.pausing.set(switch(request, "on"))
        return reply({"is_paused": self._fleet.pausing.is_on})

    async def pin(self, request: Request) -> Response:
        """`?on=true`: the model stays when another one needs room, until the configuration is read again."""
        endpoint = self._fleet.find(request.path_params["model_id"])
        pin(self._fleet, endpoint, is_pinned=switch(request, "on"))
        await asyncio.sleep(0)  # who waited for room looks again
        return reply({"model": endpoint.model_id, "pinned": endpoint.settings.pinned})
