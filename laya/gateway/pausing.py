"""Owns: a pause of the whole server, asked for by a person: new requests wait in their queues, what runs goes on.

Engines stay loaded. Knows no memory; when that is short is relief's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.gateway.fleet import Fleet

_BY = "pause"


class Pausing:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.reason: str | None = None  # why requests wait; None: they do not

    @property
    def is_on(self) -> bool:
        return self.reason is not None

    def set(self, is_on: bool) -> None:
        """Begin or end it; what waited is let in then."""
        if is_on == self.is_on:
            return
        self.reason = "all models are paused" if is_on else None
        text = "all models are paused: new requests wait" if is_on else "the pause is over"
        self._fleet.events.add("paused" if is_on else "resumed", text, level="info")
        for endpoint in list(self._fleet.endpoints.values()):
            endpoint.hold(_BY, self.reason)
            if not is_on:
                self._fleet.pump(endpoint)
