"""Owns: the engines of one model together: which of them requests may go to, which are loaded after the first, which
come back. A model with one engine is the plain case of it, and nothing here changes what that one does.

While none is ready, the first is the door: requests wait there, and the load that they wait for brings the others with
it. What is ready then serves; what is not is not chosen, and what waits at it moves to what is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from laya.errors import LayaError
from laya.gateway.endpoint import Endpoint
from laya.gateway.reload_diff import needs_restart
from laya.gateway.unloadable import Unloadable
from laya.types import PlannedSettings

if TYPE_CHECKING:
    from laya.gateway.fleet import Fleet

logger = logging.getLogger(__name__)
TRY_AGAIN_S = 30.0  # after a replica was refused: whoever waits asks for it again


class Replicas:
    """See the module; over the endpoints of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.unloadable = Unloadable(fleet)
        self._next_try_s: dict[Endpoint, float] = {}
        self._following: set[Endpoint] = set()

    def choose_eligible(self, endpoint: Endpoint) -> None:
        """An engine of this model came or went, or is stuck: requests may go to those that are ready, else the door."""
        if endpoint.pool is not None:
            self.unloadable.forgive(endpoint)
        group = self._fleet.replicas(endpoint)
        if len(group) == 1 or endpoint.is_drained:
            return
        chosen = [each for each in group if each.takes_new] or [each for each in group if each.is_serving]
        chosen = chosen or [group[0]]
        for each in group:
            self._fleet.router.set_eligible(each.index, each in chosen and each.load_error is None)

    def spread(self, free: Endpoint) -> None:
        """An engine is ready, or done: what waits at the others of its model moves to it, as far as it has room."""
        for other in self._fleet.replicas(free):
            while other.queue and other is not free and free.admission is not None:
                may_move = free.admission.free_seqs > 0 or not other.is_serving
                if not (may_move and self._fleet.pass_on(other.queue.peek())):
                    break

    def leave_to_others(self, endpoint: Endpoint) -> None:
        """Its engine serves nobody for now: what waits at it goes to the others of its model, where there are any."""
        for exchange in list(endpoint.queue):
            if not self._fleet.pass_on(exchange):
                return

    async def load_rest(self, endpoint: Endpoint) -> None:
        """Load the others of its model, one after the other. What refuses one is its state's error, not ours."""
        group = self._fleet.replicas(endpoint)
        for other in group:
            if not any(each.is_serving for each in group):
                return  # unloaded meanwhile
            if other.pool is None and other not in self._following and self._fleet.is_wanted(other):
                await self._load(other)

    async def load_another(self, endpoint: Endpoint) -> bool:
        """The load of this one failed: of other addresses of its model, one may answer; whether one does."""
        for other in self._fleet.replicas(endpoint):
            if endpoint.is_remote and other is not endpoint and self._fleet.is_wanted(other):
                await self._load(other)
                if other.pool is not None:
                    return True
        return False

    async def _load(self, endpoint: Endpoint) -> None:
        self._following.add(endpoint)
        self._next_try_s[endpoint] = self._fleet.now_s() + TRY_AGAIN_S
        try:
            await self._fleet.ready(endpoint)
        except LayaError as error:
            retry_s = error.retry_after_s if error.retry_after_s is not None else TRY_AGAIN_S
            self._next_try_s[endpoint] = self._fleet.now_s() + min(retry_s, TRY_AGAIN_S)
            logger.info("replica %s is not loaded: %s", endpoint.name, error.message)
        finally:
            self._following.discard(endpoint)

    def sweep(self, now_s: float) -> None:
        """Bring back what failed beside a replica that runs; load what is not loaded where requests wait."""
        self.unloadable.sweep(now_s)
        for group in self._fleet.groups():
            if len(group) == 1 or group[0].is_drained or not any(each.is_serving for each in group):
                continue
            is_waited_for = any(each.queue for each in group)
            for each in group:
                is_due = each.pool is None and self._next_try_s.get(each, 0.0) <= now_s and each not in self._following
                if is_due and (is_waited_for or each.has_failed):
                    self._following.add(each)
                    self._fleet.spawn(self._load(each))

    def is_outdated(self, endpoint: Endpoint) -> bool:
        """Whether its engine was started with other settings, or another file, than its model has now."""
        started = self._fleet.started_with.get(endpoint.name)
        if started is None:
            return False
        settings, file = started
        return needs_restart(settings, endpoint.settings) or file.path != self._fleet.files[endpoint.model_id].path

    def twin(self, endpoint: Endpoint, *, may_be_outdated: bool = False) -> PlannedSettings | None:
        """What another engine of its model runs with."""
        other = self._twin(endpoint, may_be_outdated=may_be_outdated)
        return other.planned if other is not None else None

    def variant_path(self, endpoint: Endpoint) -> str | None:
        """The variant that another engine of its model runs; None: there is none, or nothing was to choose."""
        other = self._twin(endpoint)
        plan = self._fleet.plans.get(other.name) if other is not None else None
        return plan.variant.path if plan is not None and plan.variant is not None else None

    def _twin(self, endpoint: Endpoint, *, may_be_outdated: bool = False) -> Endpoint | None:
        others = (each for each in self._fleet.replicas(endpoint) if each is not endpoint and each.planned is not None)
        return next((each for each in others if may_be_outdated or not self.is_outdated(each)), None)

    def to_load(self, endpoint: Endpoint) -> tuple[int, list[Endpoint]]:
        """How many engines of its model are still to be loaded, itself among them; and which of those run meanwhile,
        since they are loaded anew after it."""
        others = [each for each in self._fleet.replicas(endpoint) if each is not endpoint]
        outdated = [each for each in others if each.pool is not None and self.is_outdated(each)]
        return 1 + sum(each.pool is None for each in others) + len(outdated), outdated

    def forget(self, endpoint: Endpoint) -> None:
        """Its model is gone."""
        self._next_try_s.pop(endpoint, None)
        self.unloadable.forget(endpoint)
