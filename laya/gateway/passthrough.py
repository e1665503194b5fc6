"""Owns: /upstream/MODEL/PATH, by which admins reach what an engine serves beside this server's own API, as it is.

Nothing is translated or counted, and nothing is promised in the ledger for it: not the way of users' requests. The
model is loaded where it is not, and its `ttl` counts from here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from laya.errors import EngineFailed, NotFound
from laya.gateway.endpoint import Endpoint
from laya.gateway.fleet import Fleet
from laya.gateway.limits import body_too_large
from laya.types import EngineAddress

PREFIX = "/upstream/"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_ASKED = ("accept", "content-type", "content-encoding")  # never who asks: the engine has a key of its own
_TOLD = frozenset({"content-type", "content-length", "content-encoding", "cache-control", "location"})
_TIMEOUT = httpx.Timeout(None, connect=10.0)


class Passthrough:
    """The handler; one for each gateway."""

    def __init__(self, fleet: Fleet, max_body_bytes: int) -> None:
        self._fleet = fleet
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [Route(PREFIX + "{path:path}", self.relay, methods=_METHODS)]

    async def relay(self, request: Request) -> Response:
        endpoint, path = self._split(request.path_params["path"])
        body = await self._body(request)
        address = await self._address(endpoint)
        client = httpx.AsyncClient(trust_env=False, verify=False, timeout=_TIMEOUT)
        headers = {name: value for name in _ASKED if (value := request.headers.get(name)) is not None}
        if address.api_key:
            headers["authorization"] = f"Bearer {address.api_key}"
        url = httpx.URL(
            scheme="http", host=address.host, port=address.port, path=path, query=request.scope["query_string"]
        )
        try:
            answer = await client.send(
                client.build_request(request.method, url, headers=headers, content=body), stream=True
            )
        except httpx.HTTPError as error:
            await client.aclose()
            raise EngineFailed(f"The engine of '{endpoint.model_id}' does not answer {path}: {error}.") from None
        told = {name: value for name, value in answer.headers.items() if name in _TOLD}
        pieces = _pieces(client, answer, endpoint, request.state.break_off)
        return StreamingResponse(pieces, answer.status_code, told)

    def _split(self, path: str) -> tuple[Endpoint, str]:
        """The model that the path begins with, whose name may have slashes, and the engine's path."""
        steps = path.split("/")
        for n_steps in range(1, len(steps) + 1):
            name = "/".join(steps[:n_steps])
            if self._fleet.roster.id_of(name) is not None:
                return self._fleet.find(name), "/" + "/".join(steps[n_steps:])
        known = self._fleet.names_text()
        raise NotFound(f"'{PREFIX}{path}' begins with no model's name. This server has: {known}.", param="model")

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for data in request.stream():
            body += data
            if len(body) > self._max_body_bytes:
                raise body_too_large(len(body), self._max_body_bytes)
        return bytes(body)

    async def _address(self, endpoint: Endpoint) -> EngineAddress:
        group = self._fleet.replicas(endpoint)
        live = next((each.pool for each in group if each.pool is not None), None)
        return live.address if live is not None else await self._fleet.load(endpoint)


async def _pieces(
    client: httpx.AsyncClient, answer: httpx.Response, endpoint: Endpoint, break_off: Callable[[], None]
) -> AsyncIterator[bytes]:
    """The answer as it comes. Where it breaks off, so does ours: nothing can be said in an answer that is not ours."""
    try:
        async for data in answer.aiter_raw():
            endpoint.last_used_s = time.monotonic()
            yield data
    except httpx.HTTPError:
        break_off()
    finally:
        await answer.aclose()
        await client.aclose()
