"""Owns: what an engine answered instead of an answer, as one of Laya's errors: the client's fault, the model's limits,
or the engine's own trouble. Knows how llama.cpp puts each of them.
"""

from __future__ import annotations

import math
import re
import time
from email.utils import parsedate_to_datetime
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
# OpenAI's words for a prompt that is too long, and vLLM's for that and for an answer longer than the window
_TOO_LONG = re.compile(
    r"maximum (context|model) length (is|of) \d+|maximum context length \(\d+\)"
    r"|cannot be greater than max_(model_len|total_tokens)"
)
_WRONG = (400, 413, 422)  # of another's engine: what is wrong with a request
SAID_LIMIT_CHARS = 500
LONGEST_WAIT_S = 86400.0
KEY_PLACE = "(the key)"


class _TooLongThere(InvalidRequest):
    """Longer than the window by another server's count, in its words."""

    code = ContextLengthExceeded.code


def model_of(exchange: Exchange) -> str:
    return exchange.endpoint.model_id if exchange.endpoint else "?"


def _who_sees(exchange: Exchange) -> str:
    groups = exchange.dispatcher.fleet.groups()
    able = [group[0].model_id for group in groups if group[0].settings.mmproj is not None]
    return f". Models here that see: {', '.join(able)}." if able else ". No model here sees: none has an 'mmproj'."


def who_of(exchange: Exchange) -> str:
    return f"The {'server' if exchange.is_remote else 'engine'} of '{model_of(exchange)}'"


def engine_error(status: int, headers: dict[bytes, bytes], body: bytes, exchange: Exchange) -> LayaError:
    """What an engine answered instead of an answer, as one of Laya's. Its own faults and limits let another try."""
    who, retry_s, error = who_of(exchange), _retry_after_s(headers), said_error(body, exchange)
    is_ours = exchange.endpoint is None or exchange.endpoint.is_llamacpp
    if status < 300:
        return EngineRefused(f"{who} answers {status}, which is no answer.")
    is_refusal = status in _REFUSALS or status < 400 or (400 <= status < 500 and not is_ours and status not in _WRONG)
    if is_refusal or (exchange.is_remote and status >= 500 and status != 501):
        said = error.get("message") or f"status {status} without a reason"
        return _own_fault(status, who, said[:SAID_LIMIT_CHARS], retry_s)
    message = error.get("message") or f"{who} refused the request: status {status} without a reason"
    n_ctx, n_prompt_tokens = error.get("n_ctx"), error.get("n_prompt_tokens")
    if error.get("type") == "exceed_context_size_error" and isinstance(n_ctx, int) and isinstance(n_prompt_tokens, int):
        return ContextLengthExceeded(n_ctx, n_prompt_tokens)
    if status == 400 and (error.get("code") == ContextLengthExceeded.code or _TOO_LONG.search(message)):
        return _TooLongThere(message, param=_text(error.get("param")))
    if status == 501 or re.search(r"(image|audio) input is not supported", message):
        hint = _who_sees(exchange) if message.startswith("image") else ""
        refused = f"The model '{model_of(exchange)}' can't do this: {message}{hint}"
        return NotSupported(refused, param=_text(error.get("param")))
    if message.startswith("logprobs is not supported with tools"):
        return NotSupported(f"{who} gives no logprobs beside tools; leave out one of them.", param="logprobs")
    if status == 503:
        return ModelLoading(f"{who} is not ready: {message}", retry_s or 2.0)
    if 400 <= status < 500 or _UNREADABLE.search(message):
        return InvalidRequest(message, param=_text(error.get("param")))
    return EngineFailed(f"{who} failed: {message}", retry_after_s=retry_s)


def own_failure(body: bytes, exchange: Exchange) -> LayaError:
    """An error that an engine put into an answer with status 200."""
    said = said_error(body, exchange).get("message") or "it gives no reason"
    return EngineFailed(f"{who_of(exchange)} failed: {said[:SAID_LIMIT_CHARS]}")


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
_OTHER_REFUSAL = "does not take the request"


def _own_fault(status: int, who: str, said: str, retry_s: float | None) -> EngineFailed:
    if status == 429:
        return EngineBusy(f"{who} {_REFUSALS[status]}: {said}", retry_after_s=retry_s or 1.0)
    if status >= 500:
        return EngineFailed(f"{who} failed ({status}): {said}", retry_after_s=retry_s)
    if status < 400:
        return EngineRefused(f"{who} redirects ({status}), and redirects are not followed.")
    if status in (401, 403):  # its words may quote the key
        return EngineRefused(f"{who} {_REFUSALS[status]} ({status}).")
    refusal = _REFUSALS.get(status, _OTHER_REFUSAL)
    return EngineRefused(f"{who} {refusal} ({status}): {said}", retry_after_s=retry_s)


def said_error(body: bytes, exchange: Exchange) -> dict[str, Any]:
    """The error of a body, by any of the ways that servers put it; its message is text without the key."""
    error = _fields(body)
    address = exchange.endpoint.pool.address if exchange.endpoint is not None and exchange.endpoint.pool else None
    if message := error.get("message"):
        message = str(message)
        if address is not None and address.api_key:
            message = message.replace(address.api_key, KEY_PLACE)
        error["message"] = message
    return error


def _fields(body: bytes) -> dict[str, Any]:
    """Of OpenAI's envelope, of FastAPI's (`detail`), of what vLLM had (no envelope), of mere text."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        text = body.decode(errors="replace").strip()
        return {} if text.startswith("<") else {"message": text}  # a page is for people
    if not isinstance(answer, dict):
        return {}
    error = answer.get("error") or answer.get("detail") or answer
    if isinstance(error, list):
        return {"message": "; ".join(map(_detail, error))}
    return dict(error) if isinstance(error, dict) else {"message": str(error)}


def _detail(fault: Any) -> str:
    """`body.messages: field required`, as FastAPI has it."""
    if not isinstance(fault, dict):
        return str(fault)
    where = ".".join(map(str, fault.get("loc") or ()))
    return f"{where}: {fault.get('msg')}" if where else str(fault.get("msg"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _retry_after_s(headers: dict[bytes, bytes]) -> float | None:
    """Seconds, by any of the ways to say it: a number, a date, OpenAI's milliseconds."""
    said = headers.get(b"retry-after", b"").decode("latin-1").strip()
    try:
        if milliseconds := headers.get(b"retry-after-ms"):
            wait_s = float(milliseconds) / 1000
        elif said.endswith("GMT"):
            wait_s = parsedate_to_datetime(said).timestamp() - time.time()
        else:
            wait_s = float(said)
    except ValueError:
        return None
    return min(max(wait_s, 0.0), LONGEST_WAIT_S) if math.isfinite(wait_s) else None
