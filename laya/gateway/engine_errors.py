"""Owns: what an engine answered instead of an answer, as one of Laya's errors: the client's fault, the model's limits,
or the engine's own trouble. Knows how llama.cpp puts each of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from laya.errors import (
    ContextLengthExceeded,
    EngineBusy,
    EngineFailed,
    EngineRefused,
    InvalidRequest,
    LayaError,
    ModelLoading,
    NotSupported,
)

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

# What llama.cpp says with status 500 of a request that no other try makes better. The "input" that it also fails to
# parse is the model's own answer, and another try may well help.
_UNREADABLE = re.compile(r"(?i)failed to parse (?!input)|unable to generate parser|json.?schema|json\.exception\.")
# OpenAI's words for a prompt that is too long, and vLLM's
_TOO_LONG = re.compile(r"maximum (context|model) length (is|of) \d+")
SAID_LIMIT_CHARS = 500


class _TooLongThere(InvalidRequest):
    """Longer than the window by another server's count, in its words."""

    code = ContextLengthExceeded.code


def model_of(exchange: Exchange) -> str:
    return exchange.endpoint.model_id if exchange.endpoint else "?"


def _who_sees(exchange: Exchange) -> str:
    groups = exchange.dispatcher.fleet.groups()
    able = [group[0].model_id for group in groups if group[0].settings.mmproj is not None]
    return f". Models here that see: {', '.join(able)}." if able else ". No model here sees: none has an 'mmproj'."


def engine_error(status: int, headers: dict[bytes, bytes], body: bytes, exchange: Exchange) -> LayaError:
    """What an engine answered instead of an answer, as one of Laya's. Its own faults and limits let another try."""
    who = f"The {'server' if exchange.is_remote else 'engine'} of '{model_of(exchange)}'"
    retry_s = _retry_after_s(headers)
    if status in _REFUSALS or 300 <= status < 400 or (exchange.is_remote and status >= 500 and status != 501):
        said = _fields(body).get("message") or f"status {status} without a reason"
        return _own_fault(status, who, str(said)[:SAID_LIMIT_CHARS], retry_s)
    error = _fields(body)
    message = str(error.get("message") or f"{who} refused the request: status {status} without a reason")
    n_ctx, n_prompt_tokens = error.get("n_ctx"), error.get("n_prompt_tokens")
    if error.get("type") == "exceed_context_size_error" and isinstance(n_ctx, int) and isinstance(n_prompt_tokens, int):
        return ContextLengthExceeded(n_ctx, n_prompt_tokens)
    if status == 400 and (error.get("code") == ContextLengthExceeded.code or _TOO_LONG.search(message)):
        return _TooLongThere(message, param=_text(error.get("param")))
    if status == 501 or re.search(r"(image|audio) input is not supported", message):
        hint = _who_sees(exchange) if message.startswith("image") else ""
        return NotSupported(f"The model '{model_of(exchange)}' can't do this: {message}{hint}")
    if message.startswith("logprobs is not supported with tools"):
        return NotSupported(f"{who} gives no logprobs beside tools; leave out one of them.", param="logprobs")
    if status == 503:
        return ModelLoading(f"{who} is not ready: {message}", retry_s or 2.0)
    if 400 <= status < 500 or _UNREADABLE.search(message):
        return InvalidRequest(message, param=_text(error.get("param")))
    return EngineFailed(f"{who} failed: {message}", retry_after_s=retry_s)


# What no request of a client's is to blame for: Laya chose the engine, its key, its path and the model's name there.
_REFUSALS = {
    401: "refused Laya's key",
    403: "refused Laya's key",
    404: "does not know what it is asked for",
    405: "does not know what it is asked for",
    407: "wants a proxy's key",
    408: "waited too long for the request",
    429: "takes no more requests now",
}


def _own_fault(status: int, who: str, said: str, retry_s: float | None) -> EngineFailed:
    if status == 429:
        return EngineBusy(f"{who} {_REFUSALS[status]}: {said}", retry_after_s=retry_s or 1.0)
    if status >= 500:
        return EngineFailed(f"{who} failed ({status}): {said}", retry_after_s=retry_s)
    if status < 400:
        return EngineRefused(f"{who} redirects ({status}), and redirects are not followed.")
    if status in (401, 403):  # its words may quote the key
        return EngineRefused(f"{who} {_REFUSALS[status]} ({status}).")
    return EngineRefused(f"{who} {_REFUSALS[status]} ({status}): {said}", retry_after_s=retry_s)


def _fields(body: bytes) -> dict[str, Any]:
    """Of OpenAI's envelope; a mere text is a message."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error") or {}
    except msgspec.DecodeError:
        return {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _retry_after_s(headers: dict[bytes, bytes]) -> float | None:
    """Seconds, as most say it; a date is left aside."""
    said = headers.get(b"retry-after", b"")
    return float(said) if said.isdigit() else None
