"""Owns: what users see of all endpoints: how each model stands, with its plan, and the tokens that it may hold.

Only reads. A model's engines are one to users; `standing.py` says how they add up.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from laya.config import Config
from laya.engines.supervisor import Supervisor
from laya.gateway.shelf import Shelf
from laya.gateway.standing import fallen_words, standing
from laya.metrics import GatewayStats
from laya.routing import RequestRouter
from laya.types import ModelStatus, Plan


class Shown(Shelf):
    """A shelf whose engines have plans and states. What gives them those is the fleet's."""

    def __init__(
        self, config: Config, *, home: Path, router: RequestRouter, stats: GatewayStats, supervisor: Supervisor
    ) -> None:
        super().__init__(config, home=home, router=router, stats=stats, supervisor=supervisor)
        self.plans: dict[str, Plan] = {}  # by the names of engines

    def statuses(self) -> list[ModelStatus]:
        """Every model: the state of its engines with their plans; what is wrong with entries that are not served."""
        engines: dict[str, list[ModelStatus]] = {}
        for status in self.supervisor.status():
            endpoint = self._by_name.get(status.id)
            if endpoint is not None:
                plan = self.plans.get(status.id) if status.state not in ("unloaded", "failed") else None
                shown = msgspec.structs.replace(status, plan=plan)
                if endpoint.stuck is not None:
                    shown = msgspec.structs.replace(shown, state="degraded", error=endpoint.stuck)
                elif shown.state == "ready" and shown.gpu_layers is not None and shown.gpu_layers.is_short:
                    shown = msgspec.structs.replace(shown, state="degraded", error=fallen_words(shown.gpu_layers))
                if endpoint.is_drained or endpoint in self.retiring:
                    is_up = shown.state in ("ready", "degraded")
                    extra = shown.extra | {"is_drained": endpoint.is_drained}
                    shown = msgspec.structs.replace(shown, state="draining" if is_up else shown.state, extra=extra)
                engines.setdefault(endpoint.model_id, []).append(shown)
        served = [self.standing_of(standing(model_id, statuses)) for model_id, statuses in engines.items()]
        return served + self.roster.entries.statuses()

    def standing_of(self, status: ModelStatus) -> ModelStatus:
        """A model's status as far as others know better."""
        return status

    def kv_tokens(self) -> dict[str, tuple[int, int]]:
        """Model -> (tokens promised to live requests, tokens that can be held)."""
        out: dict[str, tuple[int, int]] = {}
        for endpoint in self.endpoints.values():
            if endpoint.planned is not None and endpoint.planned.is_computed:
                promised, held = out.get(endpoint.model_id, (0, 0))
                more = endpoint.tokens_promised, endpoint.planned.kv_pool_tokens
                out[endpoint.model_id] = promised + more[0], held + more[1]
        return out
