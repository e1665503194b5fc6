"""Owns: what happened to engines and memory, in words and figures, kept for `/admin/events` and written to the log.

The last `KEPT` events are kept. Knows nothing of who raises them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

KEPT = 500
Level = Literal["info", "warning"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. `id` grows by one from event to event."""

    id: int
    at: float  # Unix time, seconds
    kind: str  # a step of the guard, or "memory_limit", "engine_failed"
    level: Level
    text: str
    model: str | None = None
    figures: dict[str, float] = {}  # names carry their units


class Events:
    """The last events of this server."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self._last_id = 0

    def add(
        self, kind: str, text: str, *, level: Level = "warning", model: str | None = None, **figures: float
    ) -> Event:
        self._last_id += 1
        event = Event(id=self._last_id, at=time.time(), kind=kind, level=level, text=text, model=model, figures=figures)
        self._kept.append(event)
        logger.log(logging.WARNING if level == "warning" else logging.INFO, "%s: %s", kind, text)
        return event

    def after(self, event_id: int = 0) -> list[Event]:
        """Events younger than this one, oldest first."""
        return [event for event in self._kept if event.id > event_id]
