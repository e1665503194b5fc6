"""Owns: models that take nothing new while what they have been given is finished: drained by a person, or taken out of
the configuration. Stops no engine before its requests are done, or the deadline has passed; one that is still loading
has none.

A request for a drained model goes to another member of its pool, or is told when to come back; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from laya.errors import ModelDraining, ModelRemoved

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

LOOK_EVERY_S = 0.05
DEADLINE_S = 3600.0  # an answer of a slow model may take long; what lasts longer is taken for lost
COME_BACK_S = 30.0


class Draining:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._working: set[str] = set()

    def begin(self, endpoint: Endpoint, deadline_s: float = DEADLINE_S) -> None:
        """From now on its model takes no request; it is unloaded when those it has are done. Does not wait."""
        model_id = endpoint.model_id
        for each in self._fleet.replicas(endpoint):
            each.is_drained = True
            self._fleet.router.set_eligible(each.index, False)
        if model_id not in self._working:
            self._working.add(model_id)
            self._fleet.spawn(self._drain(endpoint, deadline_s))

    def undo(self, endpoint: Endpoint) -> None:
        """Its model takes requests again."""
        group = self._fleet.replicas(endpoint)
        for each in group:
            self._fleet.together.unloadable.forgive(each)
        if any(each.is_drained for each in group):
            for each in group:
                each.is_drained = False
            self._fleet.router.set_eligible(group[0].index, True)
            self._fleet.together.choose_eligible(group[0])

    def check(self, name: str) -> None:
        """Raise ModelDraining where the model that is called so is drained, and so are all members of a pool."""
        fleet = self._fleet
        members = fleet.members.get(name, [name])
        groups = (fleet.replicas_of(fleet.roster.id_of(member) or "") for member in members)
        if any(each.is_drained for group in groups for each in group):
            raise ModelDraining(
                f"'{name}' is drained and takes no new requests; `laya load {name}` ends that.", COME_BACK_S
            )

    async def end_load(self, endpoint: Endpoint) -> None:
        """It was taken out of the configuration: a load of it ends at once, and who waits for that hears why."""
        fleet = self._fleet
        if endpoint.pool is not None:
            return
        fleet.together.leave_to_others(endpoint)
        if fleet.is_wanted(fleet.replicas(endpoint)[0]) and endpoint.queue:
            return  # one engine fewer of a model that stays, and no other one is there yet
        why = ModelRemoved(endpoint.model_id)
        endpoint.fail_waiting(why)
        await fleet.supervisor.unload(endpoint.name, 0.0, why)

    async def _drain(self, endpoint: Endpoint, deadline_s: float) -> None:
        try:
            while await finish(self._fleet.replicas(endpoint), deadline_s, lambda: endpoint.is_drained):
                await self._fleet.unload_model(endpoint, "drained", deadline_s=0.0)
                if not self._is_loading(endpoint):
                    break  # else somebody had asked for a load before, which waited for the unload
        finally:
            self._working.discard(endpoint.model_id)

    def _is_loading(self, endpoint: Endpoint) -> bool:
        names = {each.name for each in self._fleet.replicas(endpoint)}
        return any(each.state == "loading" for each in self._fleet.supervisor.status() if each.id in names)


async def finish(group: Collection[Endpoint], deadline_s: float, is_wanted: Callable[[], bool]) -> bool:
    """Wait until these endpoints have nothing to do, or for the deadline; whether it is still wanted then."""
    end_s = time.monotonic() + deadline_s
    while is_wanted() and time.monotonic() < end_s and any(each.is_busy or each.n_counting for each in group):
        await asyncio.sleep(LOOK_EVERY_S)
    return is_wanted()
