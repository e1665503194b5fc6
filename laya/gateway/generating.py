"""Owns: how many tokens a live request has so far, asked of its engine while somebody looks, and only then.

Streams flow past this process uncounted, so llama.cpp is asked for its slots (`/slots`), at most twice a second
whoever looks. A slot is a request's where the gateway named it; else requests and slots are matched in the order in
which they were sent and taken up, where there are as many of one as of the other. Knows no page.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange

logger = logging.getLogger(__name__)
ASK_EVERY_S = 0.5
PATIENCE_S = 2.0


class _Next(msgspec.Struct):
    n_decoded: int = 0


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool
    id_task: int = -1
    next_token: list[_Next] = []


_SLOTS = msgspec.json.Decoder(list[_Slot])


class Generating:
    """See the module. One for all who look."""

    def __init__(self) -> None:
        self._seen: dict[Endpoint, tuple[float, list[_Slot]]] = {}
        self._one_at_a_time = asyncio.Lock()  # who looks at the same moment has what the first one was told

    async def figures(self, endpoints: Iterable[Endpoint]) -> dict[Exchange, dict[str, Any]]:
        """Request -> `tokens`, `tokens_per_s`, for those whose answer has begun and whose engine tells."""
        found: dict[Exchange, dict[str, Any]] = {}
        for endpoint in endpoints:
            live = [each for each in endpoint.live if each.sent_s and each.outcome is None]
            if not live or not endpoint.is_llamacpp or endpoint.pool is None:
                continue
            async with self._one_at_a_time:
                told_s, slots = await self._slots(endpoint)
            for exchange, slot in _matched(live, slots):
                n_tokens = slot.next_token[0].n_decoded if slot.next_token else 0
                answering_s = told_s - exchange.first_token_s
                if exchange.first_token_s and answering_s > 0 and n_tokens > 1:
                    found[exchange] = {"tokens": n_tokens, "tokens_per_s": round((n_tokens - 1) / answering_s, 1)}
        return found

    async def _slots(self, endpoint: Endpoint) -> tuple[float, list[_Slot]]:
        told_s, slots = self._seen.get(endpoint, (0.0, []))
        pool, now_s = endpoint.pool, time.monotonic()
        if now_s - told_s < ASK_EVERY_S or pool is None:
            return told_s, slots
        try:
            status, answer = await pool.fetch("GET", "/slots", deadline_s=PATIENCE_S)
            slots = _SLOTS.decode(answer) if status == 200 else []
        except (OSError, msgspec.DecodeError) as error:  # the list goes without, and tells the rest
            logger.debug("the slots of %s are not known: %s", endpoint.name, error)
            slots = []
        self._seen[endpoint] = told_s, slots = time.monotonic(), slots
        return told_s, slots


def _matched(live: list[Exchange], slots: list[_Slot]) -> list[tuple[Exchange, _Slot]]:
    at_work = {slot.id: slot for slot in slots if slot.is_processing}
    named = [(each, at_work.pop(each.slot.id)) for each in live if each.slot is not None and each.slot.id in at_work]
    others = sorted((each for each in live if each.slot is None), key=lambda each: each.sent_s)
    left = sorted(at_work.values(), key=lambda slot: slot.id_task)
    return named + (list(zip(others, left, strict=True)) if len(others) == len(left) else [])
