"""Owns: in which words each API tells an error: OpenAI's by default, Anthropic's and Ollama's under their own paths.

The fault is the same LayaError; its code and details are in every envelope. Where a status has a meaning of its own in
an API, it is that API's.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from laya.errors import ContextLengthExceeded, InvalidApiKey, LayaError, NotSupported, QueueFull
from laya.gateway.desk import reply

MESSAGES = "/v1/messages"
OLLAMA = "/api/"
_OVERLOADED = 529  # of Anthropic's: busy, try again later
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


def answer_error(error: LayaError, path: str) -> Response:
    """The answer to a request to this path that failed so."""
    if path == MESSAGES or path.startswith(MESSAGES + "/"):
        return anthropic_error(error)
    if path.startswith(OLLAMA):
        return reply(ollama_body(error), error.http_status, error.headers())
    return reply(error.body(), error.http_status, error.headers())


def anthropic_error(error: LayaError) -> Response:
    return reply(anthropic_body(error), _anthropic_status(error), error.headers())


def anthropic_body(error: LayaError) -> dict[str, Any]:
    """Anthropic's envelope, also the data of an `error` event."""
    status = _anthropic_status(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"type": kind, "message": _anthropic_message(error), "code": error.code, "param": error.param}
    return {"type": "error", "error": told | error.details}


def _anthropic_status(error: LayaError) -> int:
    if isinstance(error, NotSupported):
        return 400
    return _OVERLOADED if isinstance(error, QueueFull) and error.http_status == 503 else error.http_status


def _anthropic_message(error: LayaError) -> str:
    """Agents shorten a conversation when they read these words of a prompt that is too long, and no others."""
    if isinstance(error, ContextLengthExceeded):
        found = error.details
        return f"prompt is too long: {found['prompt_tokens']} tokens > {found['max_seq_len']} maximum"
    if isinstance(error, InvalidApiKey):
        return error.message.replace("'Authorization: Bearer KEY'", "'x-api-key: KEY' or 'Authorization: Bearer KEY'")
    return error.message


def ollama_body(error: LayaError) -> dict[str, Any]:
    """Ollama's envelope, also the last line of a stream that broke off."""
    return {"error": error.message, "code": error.code, "param": error.param} | error.details
