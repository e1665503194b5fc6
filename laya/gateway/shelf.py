"""Owns: which endpoints there are: one for each engine of each model of the roster, by index, by name and by model, as
files come and go.

Knows the disk through the roster, and the router as the one who must hear of names. Loads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laya.config import Config, ResolvedModel
from laya.config.pools import first_of
from laya.engines.supervisor import Supervisor
from laya.gateway.endpoint import Endpoint
from laya.gateway.metering import Metered
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
        self.pool_members = first_of(config)  # of each pool of the configuration, whom a request that names it gets
        router.set_pools(self.pool_members, config.for_model("").policy)
        self.stats = stats
        self.supervisor = supervisor
        self.lane = lane_of(router)
        self.endpoints: dict[int, Endpoint] = {}
        self.roster = Roster(config, home)
        self.files = self.roster.files
        self._replicas: dict[str, tuple[Endpoint, ...]] = {}  # by model id
        self._by_name: dict[str, Endpoint] = {}
        self.spares: dict[str, tuple[str, ...]] = {}  # pools whose names give way to whatever else is called so
        self._uses: dict[str, Metered] = {}  # by the ids of models that have limits
        self.retiring: set[Endpoint] = set()  # no request finds them; they end when what they have is done

    @property
    def members(self) -> dict[str, Sequence[str]]:
        """The models of each pool, as a request that names it gets them."""
        spares: dict[str, Sequence[str]] = {
            name: ids for name, ids in self.spares.items() if self.roster.id_of(name) is None
        }
        return spares | dict(self.pool_members)

    def set_spares(self, spares: dict[str, tuple[str, ...]]) -> None:
        """These names stand for these models, as far as nothing else is called so; the best one first."""
        self.spares = spares
        self.router.set_spares(spares)

    def scan(self) -> None:
        """Register every model of the config, the store and models_dir."""
        self.roster.is_scan_due()
        for file in self.roster.entries.found():
            self.register(file, self.config.for_model(file.id))
        self._update(self.roster.on_disk())

    async def refresh(self) -> None:
        """Register what came to the disk, drop what is gone from it; at most once in `RESCAN_EVERY_S`."""
        roster = self.roster
        if roster.is_scan_due():
            found = await asyncio.to_thread(roster.on_disk)
            if roster is self.roster:  # no reload has read the disk meanwhile, maybe another folder
                self._update(found)

    def _update(self, found: list[ModelFile]) -> None:
        self._mend()
        gone, new = self.roster.compare(found)
        for model_id in gone:
            self._drop(model_id)
        for file in new:
            self.register(file, self.config.for_model(file.id))

    def _mend(self) -> None:
        """Register models of the config whose file has come after all."""
        for file in self.roster.entries.mended():
            self.register(file, self.config.for_model(file.id))

    def _drop(self, model_id: str) -> None:
        """Forget a model whose file is gone, unless something still works with it: then a later scan does."""
        has_engine = {status.id for status in self.supervisor.status() if status.state not in ("unloaded", "failed")}
        for endpoint in self._replicas[model_id]:
            is_held = endpoint.pool or endpoint.is_busy or self.router.load(endpoint.index) != (0, 0)
            if is_held or endpoint.name in has_engine:
                return
        self.router.remove_model(model_id)
        self.roster.forget(model_id)
        for endpoint in self._replicas.pop(model_id):
            self._remove(endpoint)

    def _remove(self, endpoint: Endpoint) -> None:
        self.router.remove_endpoint(endpoint.index)
        self.forget(endpoint)
        del self.endpoints[endpoint.index], self._by_name[endpoint.name]

    def forget(self, endpoint: Endpoint) -> None:
        """The model of this endpoint is gone from the disk and from here."""

    def register(self, file: ModelFile, settings: ResolvedModel) -> Endpoint:
        """A model is known from now on by its names, as far as they are free; gives its first endpoint.

        Raises ConfigError where no name is free.
        """
        file, losers = self.roster.claim(file)
        settings = settings_for(file, settings)
        group = tuple(self._endpoint(settings, number) for number in range(1, settings.replicas + 1))
        self._replicas[file.id] = group
        self._publish({file.id, *losers})
        for endpoint in group:
            self.attend(endpoint)
        return group[0]

    def renew(self, file: ModelFile) -> None:
        """A model that is known has other aliases from now on, or another task."""
        self.roster.forget(file.id)
        file, losers = self.roster.claim(file)
        settings = settings_for(file, self.config.for_model(file.id))
        for endpoint in self._replicas[file.id]:
            endpoint.apply(settings)
            self.attend(endpoint)
        self._publish({file.id, *losers})

    def restock(self, roster: Roster) -> None:
        """These are the models from now on, with the settings of the configuration. What is gone retires.

        Raises ConfigError where the router cannot have these names.
        """
        gone = [model_id for model_id in self._replicas if model_id not in roster.files]
        roster.files |= {model_id: self.files[model_id] for model_id in gone}
        self.roster, self.files = roster, roster.files
        self.router.set_pools({})
        for model_id in gone:
            self.router.remove_model(model_id)
            self.retiring.update(self._replicas[model_id])
        served = [model_id for model_id in self.files if model_id not in gone]
        for model_id in served:
            self._restock(model_id)
        self._publish(set(served))
        self.pool_members = first_of(self.config)
        self.router.set_pools(self.pool_members, self.config.for_model("").policy)

    def _restock(self, model_id: str) -> None:
        """One model's endpoints follow its settings: as many as it has replicas."""
        settings = settings_for(self.files[model_id], self.config.for_model(model_id))
        group = self._replicas.get(model_id, ())
        kept, extra = group[: settings.replicas], group[settings.replicas :]
        self.retiring.difference_update(kept)
        self.retiring.update(extra)
        for endpoint in extra:
            self.router.set_eligible(endpoint.index, False)
        use = self._use_of(settings)
        for endpoint in kept:
            endpoint.use = use
            endpoint.apply(settings)
            self.router.set_weight(endpoint.index, settings.weight)
        new = tuple(self._endpoint(settings, number) for number in range(len(kept) + 1, settings.replicas + 1))
        self._replicas[model_id] = kept + new
        for endpoint in kept + new:
            self.attend(endpoint)  # also one that was there: it may be for another task now

    def retire(self, endpoint: Endpoint) -> None:
        """Forget an endpoint that is done, and its model with the last one."""
        self.retiring.discard(endpoint)
        if self.endpoints.get(endpoint.index) is not endpoint:
            return
        self._remove(endpoint)
        group = self._replicas.get(endpoint.model_id, ())
        rest = tuple(each for each in group if each is not endpoint)
        if rest:
            self._replicas[endpoint.model_id] = rest
        elif group:
            del self._replicas[endpoint.model_id]
            self.roster.forget(endpoint.model_id)

    def _endpoint(self, settings: ResolvedModel, number: int) -> Endpoint:
        """One engine's. While none is ready only the first may be chosen (replicas.py)."""
        name = settings.id if settings.replicas == 1 else f"{settings.id}#{number}"
        while name in self._by_name:  # a model may be called as the replica of another
            name += "'"
        index = self.router.add_endpoint(name=name, eligible=number == 1, weight=settings.weight)
        endpoint = Endpoint(index, settings, self.stats.model(settings.id), self.lane, name=name)
        endpoint.use = self._use_of(settings)
        self.endpoints[index] = self._by_name[name] = endpoint
        return endpoint

    def _use_of(self, settings: ResolvedModel) -> Metered | None:
        """What counts the use of a model that has limits; what runs and was used stays when they change."""
        use = self._uses.pop(settings.id, None) or Metered()
        use.limit(f"The model '{settings.id}'", settings.limits)
        if not use.is_limited:
            return None
        self._uses[settings.id] = use
        return use

    def model_of(self, name: str) -> str:
        """The model of the engine that is called so."""
        endpoint = self._by_name.get(name)
        return endpoint.model_id if endpoint is not None else name

    def replicas(self, endpoint: Endpoint) -> tuple[Endpoint, ...]:
        """The endpoints of its model, itself among them."""
        return self._replicas.get(endpoint.model_id, (endpoint,))

    def replicas_of(self, model_id: str) -> tuple[Endpoint, ...]:
        """The endpoints of a model; none of one whose entry in the config is wrong."""
        return self._replicas.get(model_id, ())

    def is_wanted(self, endpoint: Endpoint) -> bool:
        """Whether an engine may be loaded for it unasked: neither a person nor a reload has taken it away."""
        is_here = endpoint in self.replicas_of(endpoint.model_id) and endpoint not in self.retiring
        return is_here and not endpoint.is_drained

    def groups(self) -> list[tuple[Endpoint, ...]]:
        """The endpoints of each model."""
        return list(self._replicas.values())

    def served(self) -> list[tuple[Endpoint, ...]]:
        """Those of models that requests may name."""
        return [group for group in self.groups() if group[0] not in self.retiring]

    def attend(self, endpoint: Endpoint) -> None:
        """An endpoint is new here."""

    def _publish(self, model_ids: set[str]) -> None:
        """Tell the router the names of these models."""
        groups = {model_id: self._replicas[model_id] for model_id in model_ids}
        policies = {model_id: group[0].settings.policy for model_id, group in groups.items()}
        indexes = {model_id: [each.index for each in group] for model_id, group in groups.items()}
        self.router.set_models(((each, indexes[each], self.roster.aliases(each)) for each in groups), policies)

    def find(self, name: str) -> Endpoint:
        """The first endpoint of a model, also of a file that was dropped into models_dir a moment ago.

        Raises: ModelNotFound, and what the models room says of a file that is there but broken.
        """
        model_id = self.roster.id_of(name)
        if model_id is None:
            self._mend()
            model_id = self.roster.id_of(name)
        if model_id is None and name in self.spares:
            return self._replicas[self.spares[name][0]][0]
        if model_id is None:
            file = self.roster.look_up(name)
            model_id = self.roster.id_of_file(file)
            if model_id is None:
                model_id = self.register(file, self.config.for_model(file.id)).model_id
            if self.roster.learn(model_id, name):
                self._publish({model_id})
        return self._replicas[model_id][0]

    def names_text(self) -> str:
        return ", ".join(group[0].model_id for group in self.served()) or "none; `laya pull` gets one"

    def aliases(self, endpoint: Endpoint) -> list[str]:
        return self.roster.aliases(endpoint.model_id)


def settings_for(file: ModelFile, settings: ResolvedModel) -> ResolvedModel:
    """A model's settings with what its file decides: its id, and its task unless the configuration names one."""
    task = file.task if file.task and "task" not in settings.fixed else settings.task
    return msgspec.structs.replace(settings, id=file.id, task=task)
