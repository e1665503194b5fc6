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


def model_of(exchange: Exchange) -> str:
    return exchange.endpoint.model_id if exchange.endpoint else "?"


def _who_sees(exchange: Exchange) -> str:
    groups = exchange.dispatcher.fleet.groups()
    able = [group[0].model_id for group in groups if group[0].settings.mmproj is not None]
    return f". Models here that see: {', '.join(able)}." if able else ". No model here sees: none has an 'mmproj'."


def engine_error(status: int, body: bytes, exchange: Exchange) -> LayaError:
    """What an engine answered instead of an answer, as one of Laya's errors."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error") or {}
    except msgspec.DecodeError:
        error = {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    message = str(error.get("message") or f"status {status} without a reason")
    n_ctx, n_prompt_tokens = error.get("n_ctx"), error.get("n_prompt_tokens")
    if error.get("type") == "exceed_context_size_error" and isinstance(n_ctx, int) and isinstance(n_prompt_tokens, int):
        return ContextLengthExceeded(n_ctx, n_prompt_tokens)
    if status == 501 or re.search(r"(image|audio) input is not supported", message):
        hint = _who_sees(exchange) if message.startswith("image") else ""
        return NotSupported(f"The model '{model_of(exchange)}' can't do this: {message}{hint}")
    if message.startswith("logprobs is not supported with tools"):
        return NotSupported(
            f"The engine of '{model_of(exchange)}' gives no logprobs beside tools; leave out one of them.",
            param="logprobs",
        )
    if status == 503:
        return ModelLoading(f"The engine of '{model_of(exchange)}' is not ready: {message}", 2.0)
    if 400 <= status < 500 or _UNREADABLE.search(message):
        return InvalidRequest(message)
    return EngineFailed(f"The engine of '{model_of(exchange)}' failed: {message}")


def remote_error(status: int, headers: dict[bytes, bytes], body: bytes, exchange: Exchange) -> LayaError:
    """What another server answered instead of an answer. Its own faults and limits let a third one try."""
    who = f"The server of '{model_of(exchange)}'"
    retry_s = _retry_after_s(headers)
    if status == 429:
        return EngineBusy(f"{who} takes no more requests now: {_said(status, body)}", retry_after_s=retry_s or 1.0)
    if status in (401, 403):
        return EngineFailed(f"{who} refused Laya's key ({status}).")
    if 300 <= status < 400:
        return EngineFailed(f"{who} redirects, and redirects are not followed.")
    if status == 404:
        return EngineFailed(f"{who} does not know what it is asked for: {_said(status, body)}")
    if status >= 500:
        return EngineFailed(f"{who} failed ({status}): {_said(status, body)}", retry_after_s=retry_s)
    return engine_error(status, body, exchange)


def _said(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error")
    except msgspec.DecodeError:
        error = None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or f"status {status} without a reason")[:500]


def _retry_after_s(headers: dict[bytes, bytes]) -> float | None:
    """Seconds, as most say it; a date is left aside."""
    said = headers.get(b"retry-after", b"")
    return float(said) if said.isdigit() else None
