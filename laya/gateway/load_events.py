"""Owns: what the events tell of loads: how far each has come, in steps, and that it is ready, as planned or not.

The percentage of one load only rises, and the last one says `ready`; what ends it otherwise is told by others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.gateway.standing import fallen_words
from laya.gateway.variants import variant_words
from laya.types import EngineAddress

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

    def changed(self, endpoint: Endpoint, ready_at: EngineAddress | None) -> None:
        """Its engine has another state: a load has ended, or one begins. ready_at: it is ready, there."""
        self._told.pop(endpoint.name, None)
        if ready_at is not None:
            plan = self._fleet.plans.get(endpoint.name)
            words = variant_words(plan) if plan is not None else ""
            text = f"'{endpoint.name}' is ready" + (f" as {words}" if words else "")
            self._fleet.events.add("ready", text, level="info", model=endpoint.model_id, percent=100)
            layers = ready_at.gpu_layers
            if layers is not None and layers.is_short:
                text = f"'{endpoint.name}' is degraded: {fallen_words(layers)}"
                figures = {"planned_layers": float(layers.planned), "gpu_layers": float(layers.loaded)}
                self._fleet.events.add("degraded", text, level="warning", model=endpoint.model_id, **figures)
