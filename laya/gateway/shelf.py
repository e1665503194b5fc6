"""Owns: which endpoints there are: one for each model of the roster, by index and by model id, as files come and go.

Knows the disk through the roster, and the router as the one who must hear of names. Loads nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from laya.config import Config, ResolvedModel
from laya.engines.supervisor import Supervisor
from laya.gateway.endpoint import Endpoint
from laya.gateway.plain import lane_of
from laya.gateway.roster import Roster
from laya.metrics import GatewayStats
from laya.routing import RequestRouter
from laya.types import ModelFile


class Shelf:
    """All endpoints. What makes one ready is the fleet's, which is a shelf too."""

    def __init__(
        self, config: Config, *, home: Path, router: RequestRouter, stats: GatewayStats, supervisor: Supervisor
    ) -> None:
        self.config = config
        self.router = router
        router.set_pools(config.routing.pools)
        self.stats = stats
        self.supervisor = supervisor
        self.lane = lane_of(router)
        self.endpoints: dict[int, Endpoint] = {}
        self.roster = Roster(config, home)
        self.files = self.roster.files
        self._by_id: dict[str, Endpoint] = {}

    def scan(self) -> None:
        """Register every model of the config, the store and models_dir."""
        self.roster.is_scan_due()
        for file in self.roster.configured():
            self.register(file, self.config.for_model(file.id))
        self._update(self.roster.on_disk())

    async def refresh(self) -> None:
        """Register what came to the disk, drop what is gone from it; at most once in `RESCAN_EVERY_S`."""
        if self.roster.is_scan_due():
            self._update(await asyncio.to_thread(self.roster.on_disk))

    def _update(self, found: list[ModelFile]) -> None:
        gone, new = self.roster.compare(found)
        for model_id in gone:
            self._drop(self._by_id[model_id])
        for file in new:
            self.register(file, self.config.for_model(file.id))

    def _drop(self, endpoint: Endpoint) -> None:
        """Forget a model whose file is gone, unless something still works with it: then a later scan does."""
        status = next((status for status in self.supervisor.status() if status.id == endpoint.model_id), None)
        has_engine = status is not None and status.state not in ("unloaded", "failed")
        if has_engine or endpoint.pool or endpoint.is_busy or self.router.load(endpoint.index) != (0, 0):
            return
        self.router.remove_model(endpoint.model_id)
        self.router.remove_endpoint(endpoint.index)
        self.roster.forget(endpoint.model_id)
        self.forget(endpoint)
        del self.endpoints[endpoint.index], self._by_id[endpoint.model_id]

    def forget(self, endpoint: Endpoint) -> None:
        """The model is gone from the disk and from here."""

    def register(self, file: ModelFile, settings: ResolvedModel) -> Endpoint:
        """A model is known from now on by its names, as far as they are free. Raises ConfigError where none is."""
        file, losers = self.roster.claim(file)
        index = self.router.add_endpoint(name=file.id)
        task = file.task if file.task and "task" not in settings.fixed else settings.task
        settings = msgspec.structs.replace(settings, id=file.id, task=task)
        endpoint = Endpoint(index, settings, self.stats.model(file.id), self.lane)
        self.endpoints[index] = self._by_id[file.id] = endpoint
        self._publish({file.id, *losers})
        self.attend(endpoint)
        return endpoint

    def attend(self, endpoint: Endpoint) -> None:
        """A model is new here."""

    def _publish(self, model_ids: set[str]) -> None:
        """Tell the router the names of these models."""
        policies = {model_id: self._by_id[model_id].settings.policy for model_id in model_ids}
        models = ((model_id, [self._by_id[model_id].index], self.roster.aliases(model_id)) for model_id in model_ids)
        self.router.set_models(models, policies)

    def find(self, name: str) -> Endpoint:
        """The endpoint of a model, also of a file that was dropped into models_dir a moment ago.

        Raises: ModelNotFound, and what the models room says of a file that is there but broken.
        """
        model_id = self.roster.id_of(name)
        if model_id is None:
            file = self.roster.look_up(name)
            model_id = self.roster.id_of_file(file)
            if model_id is None:
                model_id = self.register(file, self.config.for_model(file.id)).model_id
            if self.roster.learn(model_id, name):
                self._publish({model_id})
        return self._by_id[model_id]

    def names_text(self) -> str:
        return ", ".join(endpoint.model_id for endpoint in self.endpoints.values()) or "none; `laya pull` gets one"

    def aliases(self, endpoint: Endpoint) -> list[str]:
        return self.roster.aliases(endpoint.model_id)
