"""Owns: what the events tell of loads: how far each has come, in steps, and that it is ready.

The percentage of one load only rises, and its last event is `ready`; what ends it otherwise is told by others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

STEP_PERCENT = 20  # events are few and kept long; a stream that waits is told each percent


class LoadEvents:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._told: dict[str, int] = {}  # by the names of engines that load: the last step

    def sweep(self) -> None:
        """A few times a second."""
        for endpoint in self._fleet.endpoints.values():
            if endpoint.pool is None:
                percent = self._fleet.supervisor.load_percent(endpoint.name)
                if percent is not None:
                    self._tell(endpoint, percent)

    def _tell(self, endpoint: Endpoint, percent: int) -> None:
        step = percent // STEP_PERCENT * STEP_PERCENT
        if step > self._told.get(endpoint.name, -1):
            self._told[endpoint.name] = step
            text = f"'{endpoint.name}' is loading: {percent} %"
            self._fleet.events.add("loading", text, level="info", model=endpoint.model_id, percent=percent)

    def changed(self, endpoint: Endpoint, *, is_ready: bool) -> None:
        """Its engine has another state: a load has ended, or one begins."""
        self._told.pop(endpoint.name, None)
        if is_ready:
            text = f"'{endpoint.name}' is ready"
            self._fleet.events.add("ready", text, level="info", model=endpoint.model_id, percent=100)
