"""Owns: the Starlette app beside the hot path: which path has which handler, the key check, what errors look like.

The handlers are `desk.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from laya.errors import InvalidRequest, LayaError, NotFound, nearest
from laya.gateway import openapi
from laya.gateway.auth import KeyRing, with_bearer
from laya.gateway.desk import Desk
from laya.gateway.envelopes import answer_error
from laya.gateway.heads import HOT_PATHS, new_request_id
from laya.gateway.key_desk import KeyDesk
from laya.gateway.limits import REQUEST_ID_LIMIT_BYTES
from laya.gateway.live_keys import LiveKeys
from laya.gateway.own import OwnRequests
from laya.gateway.page import page_files, page_routes
from laya.gateway.roles import KEY, may_reach, out_of_reach

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Any, Any], Awaitable[None]]
_OPEN_PATHS = frozenset({"/", "/health", "/ready", *page_files()})
OTHER_APIS = frozenset({"/v1/complete", "/completion", "/generate"})  # and what of /api/ is not here
_OF_OPENAI = (
    "assistants", "audio", "batches", "containers", "conversations", "evals", "files", "fine_tuning", "images",
    "moderations", "realtime", "threads", "uploads", "vector_stores", "videos",
)  # fmt: skip


class Guard:
    """ASGI middleware: the key check, and the request id on every answer."""

    def __init__(self, app: ASGIApp, keys: KeyRing, routes: list[Route]) -> None:
        self._app = app
        self._keys = keys
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        request_id = given if 0 < len(given) <= REQUEST_ID_LIMIT_BYTES else new_request_id()
        if request_id is not given:
            scope["headers"] = [*headers, (b"x-request-id", request_id)]  # the same one for what a handler asks for
        scope["headers"] = with_bearer(scope["headers"])

        has_begun = False

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id)
        except (Exception, asyncio.CancelledError):  # uvicorn logs it, but would not answer in an API's words
            if not has_begun:
                await answer_error(_own_fault(), scope["path"])(scope, receive, send_with_id)
            raise

    async def _answer(self, scope: Scope, receive: Any, send: Any) -> None:
        app: Any = self._app
        if scope["path"] not in _OPEN_PATHS:
            try:
                self._check(scope)
            except LayaError as error:
                app = answer_error(error, scope["path"])
        await app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """The key, and whether its role reaches this path; where nothing is, the answer says that instead."""
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        key = scope[KEY] = self._keys.check(authorization, scope["headers"])
        if key is not None and not may_reach(key, scope["path"]) and self._is_somewhere(scope):
            raise out_of_reach(key, scope["path"])

    def _is_somewhere(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] != Match.NONE for route in self._routes)


def build_app(desk: Desk, keys: LiveKeys, lifespan: Any) -> ASGIApp:
    """All cold routes. A hot path that comes here came with the wrong method."""
    own = OwnRequests(desk.fleet, desk.recent)
    admin = "/admin/models/{model_id:path}"
    routes = [
        *page_routes(desk.root),
        Route("/health", desk.health),
        Route("/ready", desk.ready),
        Route("/metrics", desk.metrics),
        Route("/v1/models", desk.models),
        Route("/v1/models/{model_id:path}", desk.model),
        Route(openapi.PATH, openapi.answer),
        Route("/admin/state", desk.state),
        Route("/admin/events", desk.events),
        Route("/admin/route/explain", desk.explain),
        Route(admin + "/load", desk.load, methods=["POST"]),
        Route(admin + "/unload", desk.unload, methods=["POST"]),
        Route(admin + "/slots", desk.slots),
        Route(admin + "/logs", desk.logs),
        *own.routes(),
        *KeyDesk(keys, own, desk.fleet).routes(),
        *desk.apis,
    ]
    for route in routes:
        if route.path.startswith(openapi.PREFIX):
            route.app = openapi.StrictQuery(route.app, route.path)
    known = [route.path for route in routes if "{" not in route.path] + [path.decode() for path in HOT_PATHS]

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 405 or path.encode() in HOT_PATHS:
            methods = "POST" if path.encode() in HOT_PATHS else (error.headers or {}).get("Allow", "GET")
            allow = ", ".join(sorted(methods.split(", ")))
            fault = MethodNotAllowed(f"{request.method} is not allowed on {path}; use {allow}.")
            answer = answer_error(fault, path)
            answer.headers["allow"] = allow
            return answer
        return answer_error(_nothing_at(path, known), path)

    async def on_client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # that nobody reads

    async def on_own_fault(request: Request, error: Exception) -> Response:
        """The traceback goes to the log. async: a thread for it might be what cannot be had."""
        return answer_error(_own_fault(), request.url.path)

    async def on_fault(request: Request, error: Exception) -> Response:
        assert isinstance(error, LayaError)
        return answer_error(error, request.url.path)

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            HTTPException: on_http_error,
            LayaError: on_fault,
            ClientDisconnect: on_client_gone,
            Exception: on_own_fault,
        },
    )
    guarded: ASGIApp = Guard(app, keys, routes)
    if not keys.origins:
        return guarded
    # outside the key check: a browser asks for permission without its key
    return CORSMiddleware(
        guarded,
        allow_origins=sorted(keys.origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        max_age=600,
    )


def _own_fault() -> LayaError:
    return LayaError("Laya failed on this request; its log says why.")


def _nothing_at(path: str, known: list[str]) -> NotFound:
    """404 with what was most likely meant. A route with a name in it is never proposed: nobody can call it so."""
    if path.rstrip("/") in OTHER_APIS or path.startswith("/api/"):
        return NotFound(f"{path} is not part of this version of Laya: use /v1/chat/completions.")
    if path.startswith("/v1/") and path.split("/")[2] in _OF_OPENAI:
        return NotFound(f"{path} is an endpoint of OpenAI that this version of Laya does not have.")
    close = None if path.startswith("/admin/models/") else nearest(path, known)
    return NotFound(f"There is nothing at {path}." + (f" Did you mean {close}?" if close else ""))


class MethodNotAllowed(InvalidRequest):
    code, http_status = "method_not_allowed", 405
