"""Owns: requests that ended lately, as plain values, for the page: the last few, in memory alone.

Every request that was not served is kept, and every one that took a moment; quick ones only while somebody looks, so
that what a thousand of them a second cost is one comparison each. What was said is kept only where the request log
keeps it too (`request_log.content`), with keys and passwords left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from laya.gateway.request_log import redacted
from laya.gateway.request_view import Asked, asked_of, parts_of

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

KEPT = 200
QUICK_S = 0.05
LOOKED_AT_S = 10.0  # who looks asks again within this time


class Notes(Protocol):
    """An engine's log, as far as a line is added to it."""

    def note(self, text: str) -> None: ...


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has its outcome."""

    owner: str | None  # `KeyGrant.owner` of its key; None: it had none
    shown: dict[str, Any]  # as a list shows it
    parts: list[dict[str, Any]]
    asked: Asked | None
    body: str | None


class Recent:
    """See the module."""

    def __init__(self, log_of: Callable[[str], Notes]) -> None:
        """log_of: the log of the engine with this name; a failed request is told there, under its id."""
        self._log_of = log_of
        self._kept: deque[Ended] = deque(maxlen=KEPT)
        self._looked_until_s = 0.0

    def note(self, exchange: Exchange) -> None:
        """A request has its outcome."""
        now_s = time.monotonic()
        is_quick = exchange.outcome == "served" and now_s - exchange.arrived_s < QUICK_S
        if is_quick and now_s > self._looked_until_s:
            return
        endpoint, fault = exchange.endpoint, exchange.fault
        if exchange.outcome == "failed" and endpoint is not None and fault is not None:
            said = exchange.request_id.decode("latin-1")
            self._log_of(endpoint.name).note(f"request {said} failed ({fault.code}): {fault.message}")
        self._kept.append(
            Ended(
                owner=exchange.key.grant.owner if exchange.key is not None else None,
                shown=_shown(exchange, now_s),
                parts=parts_of(exchange, now_s),
                asked=asked_of(exchange),
                body=redacted(exchange.said.decode("utf-8", "replace")) if exchange.said else None,
            )
        )

    def look(self) -> list[Ended]:
        """The newest first; who looks sees quick ones from now on."""
        self._looked_until_s = time.monotonic() + LOOKED_AT_S
        return list(reversed(self._kept))


def _shown(exchange: Exchange, now_s: float) -> dict[str, Any]:
    endpoint, fault, first_s = exchange.endpoint, exchange.fault, exchange.first_token_s
    address = getattr(exchange.protocol, "client", None)
    answering_s = now_s - first_s if first_s and exchange.n_tokens_out > 1 else 0.0
    return {
        "id": exchange.request_id.decode("latin-1"),
        "model": endpoint.model_id if endpoint is not None else None,
        "engine": endpoint.name if endpoint is not None else None,
        "key": exchange.key_name,
        "client": address[0] if address else None,
        "phase": "ended",
        "outcome": exchange.outcome,
        "error": {"code": fault.code, "message": fault.message} if fault is not None else None,
        "ended": round(time.time(), 3),
        "age_s": round(now_s - exchange.arrived_s, 3),
        "prompt_tokens": exchange.prompt_tokens,
        "tokens": exchange.n_tokens_out,
        "tokens_per_s": round((exchange.n_tokens_out - 1) / answering_s, 1) if answering_s > 0 else None,
    }
