"""Owns: the page at `/` and its files: which there are, their types, and what a browser may do with them.

The files in `laya/web` are few and small and hold nothing of this server: they are read once and need no key. What
they show comes from the API, where the key is checked. Who asks `/` without wanting HTML gets JSON.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

WEB = Path(__file__).parent.parent / "web"
PREFIX = "/page/"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked each time, sent only when it is another Laya's
}
_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}  # the system's own table may say otherwise

Handler = Callable[[Request], Awaitable[Response]]


def page_files() -> dict[str, bytes]:
    """Path -> content of everything a browser loads beside `/` itself."""
    return {PREFIX + file.name: file.read_bytes() for file in sorted(WEB.iterdir()) if file.suffix != ".html"}


def page_routes(as_json: Handler) -> list[Route]:
    """`/`, answered by `as_json` for who asks for no HTML, and the files of the page."""
    index = (WEB / "index.html").read_bytes()

    async def root(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            answer = await as_json(request)
        else:
            answer = _answer(request, index, "text/html")
        answer.headers["vary"] = "accept"
        return answer

    return [Route("/", root), *(_route(path, content) for path, content in page_files().items())]


def _route(path: str, content: bytes) -> Route:
    suffix = Path(path).suffix
    media_type = _TYPES.get(suffix) or mimetypes.types_map[suffix]

    async def file(request: Request) -> Response:
        return _answer(request, content, media_type)

    return Route(path, file)


def _answer(request: Request, content: bytes, media_type: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = _HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)
