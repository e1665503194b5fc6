"""Owns: engines of one model that are loaded anew one after another, so that a request always finds one that serves.

That takes two of them and room for a new one beside the others; where there is none they are all loaded anew at once,
and who asks hears why. Until the last one is new, requests are served with the old settings or the new.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from laya.config import ResolvedModel
from laya.errors import InsufficientMemory, LayaError, MemoryBusy
from laya.gateway.draining import DEADLINE_S
from laya.memory import size_text
from laya.types import ModelFile

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet


class Way(msgspec.Struct, frozen=True):
    """Whether engines are renewed one after another, and why several of them are not."""

    is_rolling: bool
    why_not: str | None = None


class Rolling:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def way(self, group: Collection[Endpoint], settings: ResolvedModel, file: ModelFile) -> Way:
        """How these engines would come to other settings or another file now."""
        serving = [each for each in group if each.takes_new]
        if len(serving) < 2:
            return Way(False)
        planned = serving[0].planned
        if planned is not None and planned.task != settings.task:
            return Way(False, "they are for another task then")
        if serving[0].node is not None:  # of a cluster, where what the old one held is free for the new one
            return Way(True)
        try:
            plan = await self._fleet.loading.plan_in_place(serving[0], settings, file)
        except LayaError as error:
            return Way(False, error.message)
        if plan.fits:
            return Way(True)
        need, room = size_text(plan.need_bytes), size_text(sum(device.budget_bytes for device in plan.devices))
        return Way(False, f"a new one needs {need}, and beside the others there is room for {room}")

    async def renew(self, outdated: Collection[Endpoint]) -> bool:
        """Load one of these anew while others of its model serve; False where that can't be.

        Raises what a new engine fails with: the others go on as they are.
        """
        fleet = self._fleet
        endpoint = next((each for each in outdated if each.pool is not None), None)
        if endpoint is None:
            return False
        way = await self.way(fleet.replicas(endpoint), endpoint.settings, fleet.files[endpoint.model_id])
        if not way.is_rolling or not any(each is not endpoint and each.takes_new for each in fleet.replicas(endpoint)):
            return False
        await fleet.unload(endpoint, DEADLINE_S)
        if fleet.is_wanted(endpoint):
            try:
                await fleet.ready(endpoint)
            except (InsufficientMemory, MemoryBusy):  # somebody else took it
                return False
        return True
