"""Owns: `/admin/models/ID/experts`: a text in, the shares of the experts that the model chose for it out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.engines.ceiling import Ceilings
from laya.gateway.desk import reply, small_body
from laya.gateway.expert_measuring import ExpertMeasuring, documents_in
from laya.gateway.fleet import Fleet


class ExpertDesk:
    """The handler."""

    def __init__(self, fleet: Fleet, ceilings: Ceilings) -> None:
        self._fleet = fleet
        self._measuring = ExpertMeasuring(fleet, ceilings)

    def routes(self) -> list[Route]:
        return [Route("/admin/models/{model_id:path}/experts", self.measure, methods=["POST"])]

    async def measure(self, request: Request) -> Response:
        """Computes the text once more beside the engine; a client that leaves ends that."""
        documents = documents_in(await small_body(request))
        endpoint = self._fleet.find(request.path_params["model_id"])

        async def is_wanted() -> bool:
            return not await request.is_disconnected()

        return reply(await self._measuring.measure(endpoint, documents, is_wanted))
