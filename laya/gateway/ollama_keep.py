"""Owns: `keep_alive` of Ollama's API: how long a model stays loaded without a request, until its engine goes.

Stands in for the model's `ttl`, which holds again from its next load on, and after a request that says nothing. A
pinned model stays pinned.
"""

from __future__ import annotations

import msgspec

from laya.gateway.endpoint import Endpoint
from laya.gateway.fleet import Fleet
from laya.gateway.ollama_request import FOREVER
from laya.types import EngineAddress, ModelState


class KeepAlive:
    """See the module; one for each gateway."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        fleet.supervisor.on_state(self._engine_changed)

    def keep(self, endpoint: Endpoint, seconds: float | None) -> None:
        """From now on the model stays so long, `FOREVER` for as long as there is room; None: as the config says."""
        if endpoint.settings.pinned:
            return
        ttl_s = self._configured(endpoint) if seconds is None else None if seconds == FOREVER else seconds
        for each in self._fleet.replicas(endpoint):
            if each.settings.ttl_s != ttl_s:
                each.settings = msgspec.structs.replace(each.settings, ttl_s=ttl_s)

    def _configured(self, endpoint: Endpoint) -> float | None:
        return self._fleet.config.for_model(endpoint.model_id).ttl_s

    def _engine_changed(self, name: str, state: ModelState, address: EngineAddress | None) -> None:
        if state not in ("unloaded", "failed"):
            return
        group = self._fleet.replicas_of(self._fleet.model_of(name))
        if group:
            self.keep(group[0], None)
