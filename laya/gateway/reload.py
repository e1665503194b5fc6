"""Owns: a new configuration in a running server: read, compared, and in force as a whole or not at all.

Whatever can be wrong is found before anything is changed; the change itself is one step of the event loop, between two
requests. Engines follow afterwards, each model by itself: what is gone finishes what it has and ends, what is started
otherwise finishes and is loaded anew, and a model has one such follower however often the file is changed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from laya.config import Config
from laya.config.pools import first_of
from laya.errors import ConfigError, LayaError, ServerStopping
from laya.gateway import peers
from laya.gateway.draining import DEADLINE_S, finish
from laya.gateway.reload_diff import ModelChange, Report, adopt, model_changed, settings_changed
from laya.gateway.rolling import Rolling, Way
from laya.gateway.roster import Roster
from laya.gateway.shelf import settings_for
from laya.routing import RequestRouter, RouteTable
from laya.types import ModelFile, ModelState

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

logger = logging.getLogger(__name__)
_HAS_ENGINE: tuple[ModelState, ...] = ("loading", "ready", "degraded", "draining")


class Reloader:
    """Reloads of one server, one at a time."""

    def __init__(
        self,
        fleet: Fleet,
        read: Callable[[], Config],
        in_force: Callable[[Config], None],
        check: Callable[[Config], None] = lambda new: None,
    ) -> None:
        """read: the configuration as it stands in the file now; raises ConfigError. check: raises ConfigError for one
        that must not follow the one that runs. in_force: told of it in the step in which it comes into force, for what
        is no model; must not raise."""
        self._fleet = fleet
        self._read = read
        self._check = check
        self._in_force = in_force
        self._rolling = Rolling(fleet)
        self._one_at_a_time = asyncio.Lock()
        self._following: set[str] = set()  # models whose engines are being brought to their settings
        self._ending: set[Endpoint] = set()

    async def reload(self, *, dry_run: bool = False) -> Report:
        """Bring the file into force; what did not change stays untouched. dry_run: only say what would change.

        Raises ConfigError, and nothing is changed.
        """
        async with self._one_at_a_time:
            new = await asyncio.to_thread(self._read)
            roster = Roster(new, self._fleet.roster.home)
            entries, found = await asyncio.to_thread(lambda: (list(roster.entries.found()), roster.on_disk()))
            _claim(roster, entries, _carried(self._fleet, new), found)
            _check_names(roster, new)
            ways = await self._ways(self._compare(roster, new, dry_run=dry_run), roster, new)
            report = _with_ways(self._compare(roster, new, dry_run=dry_run), ways)
            self._check(new)
            if not dry_run:
                self._apply(roster, new, report)
            return report

    async def reload_and_tell(self) -> None:
        """As `reload`, for who is not there to hear what is wrong: the log and the events have it."""
        try:
            await self.reload()
        except LayaError as error:
            self._fleet.events.add("reload_failed", f"the configuration stays as it was: {error.message}")

    def _compare(self, roster: Roster, new: Config, *, dry_run: bool) -> Report:
        fleet = self._fleet
        served = {group[0].model_id: group[0] for group in fleet.served()}
        changed: list[ModelChange] = []
        for model_id, endpoint in served.items():
            file = roster.files.get(model_id)
            if file is not None:
                now = settings_for(file, new.for_model(model_id))
                is_other_file = file.path != fleet.files[model_id].path
                change = model_changed(endpoint.settings, now, is_other_file=is_other_file)
                changed += [change] if change is not None else []
        live, with_server = settings_changed(fleet.config, new)
        return Report(
            dry_run=dry_run,
            added=tuple(model_id for model_id in roster.files if model_id not in served),
            removed=tuple(model_id for model_id in served if model_id not in roster.files),
            changed=tuple(changed),
            settings=live,
            needs_server_restart=with_server,
            not_served={model_id: fault.message for model_id, fault in roster.entries.faults.items()},
        )

    async def _ways(self, report: Report, roster: Roster, new: Config) -> dict[str, Way]:
        """How the engines of models that restart come to their settings. Reads files, so what is compared may change
        meanwhile."""
        ways = {}
        for change in report.changed:
            if change.restarts:
                file, group = roster.files[change.id], self._fleet.replicas_of(change.id)
                settings = settings_for(file, new.for_model(change.id))
                ways[change.id] = await self._rolling.way(group, settings, file)
        return ways

    def _apply(self, roster: Roster, new: Config, report: Report) -> None:
        fleet = self._fleet
        adopt(fleet.config, new)
        fleet.restock(roster)
        self._in_force(new)
        if report.has_changes:
            fleet.events.add("reloaded", _in_words(report), level="info")
        for endpoint in list(fleet.retiring - self._ending):
            self._ending.add(endpoint)
            fleet.spawn(self._end(endpoint))
        changed = {each.id: {setting.name for setting in each.settings} for each in report.changed}
        for model_id in (*changed, *report.added):
            if model_id not in self._following:
                is_asked_for = model_id in new.models and "preload" in changed.get(model_id, ("preload",))
                self._following.add(model_id)
                fleet.spawn(self._follow(model_id, may_preload=is_asked_for))

    # engines follow
    async def _end(self, endpoint: Endpoint) -> None:
        """What it has been given is finished, then its engine ends and it is forgotten; unless it is wanted again."""
        fleet = self._fleet
        try:
            if endpoint in fleet.retiring:
                await fleet.draining.end_load(endpoint)
            if await finish((endpoint,), DEADLINE_S, lambda: endpoint in fleet.retiring):
                await fleet.unload(endpoint, deadline_s=0.0)
            if endpoint in fleet.retiring:
                fleet.retire(endpoint)
        except LayaError as error:
            logger.error("the engine of '%s' does not end: %s", endpoint.name, error.message)
        finally:
            self._ending.discard(endpoint)

    async def _follow(self, model_id: str, *, may_preload: bool) -> None:
        """Load anew what runs with other settings than its model has, after its requests; load what is to be there.

        It may change again meanwhile, so this ends only when nothing runs with other settings.
        """
        fleet = self._fleet
        try:
            while True:
                is_due = await self._unload_stale(model_id)
                group = fleet.replicas_of(model_id)
                is_due |= may_preload and any(each.settings.preload for each in group)
                if not is_due or not group or not fleet.is_wanted(group[0]):
                    break
                may_preload = False
                await fleet.load(group[0])
            if group and fleet.is_wanted(group[0]):
                await fleet.together.load_rest(group[0])
        except ServerStopping:
            logger.info("'%s' is not loaded anew: the server ends", model_id)
        except LayaError as error:
            fleet.events.add("reload_failed", f"'{model_id}' is not loaded anew: {error.message}", model=model_id)
        finally:
            self._following.discard(model_id)

    async def _unload_stale(self, model_id: str) -> bool:
        """Whether an engine of the model ran with other settings; none does when this returns."""
        fleet, was_loaded = self._fleet, False
        while stale := [each for each in fleet.replicas_of(model_id) if self._is_stale(each)]:
            was_loaded = True
            for each in stale:
                if each.pool is None:  # whoever waits for this load gets it: to end it would refuse them
                    await _outcome(fleet, each)
            if await self._rolling.renew(stale):
                continue
            await asyncio.gather(*(fleet.unload(each, DEADLINE_S) for each in stale))
        return was_loaded

    def _is_stale(self, endpoint: Endpoint) -> bool:
        """Whether an engine is there, or on its way, that was started with other settings or another file."""
        fleet = self._fleet
        states = {status.id: status.state for status in fleet.supervisor.status()}
        return states.get(endpoint.name) in _HAS_ENGINE and fleet.together.is_outdated(endpoint)


async def _outcome(fleet: Fleet, endpoint: Endpoint) -> None:
    """Wait for a load that is under way, however it ends: its own waiters are told."""
    try:
        await fleet.ready(endpoint)
    except LayaError as error:
        logger.info("the load of '%s' ended: %s", endpoint.name, error.message)


def _with_ways(report: Report, ways: Mapping[str, Way]) -> Report:
    changed = []
    for change in report.changed:
        way = ways.get(change.id, Way(False))
        changed.append(msgspec.structs.replace(change, is_rolling=way.is_rolling, at_once=way.why_not))
    return msgspec.structs.replace(report, changed=tuple(changed))


def _carried(fleet: Fleet, new: Config) -> list[ModelFile]:
    """Models that no entry names and that are served because their files or peers are there, by the names they have."""
    files = [fleet.files[group[0].model_id] for group in fleet.served()]
    here = [file for file in files if file.id not in fleet.config.models and file.path.exists()]
    return here + peers.carried(fleet.files, new.peers)


def _claim(roster: Roster, entries: list[ModelFile], carried: list[ModelFile], found: list[ModelFile]) -> None:
    """Names as at a start: entries first, then what is served already, then what came to the disk."""
    for file in entries:
        roster.claim(file)
    for file in (*carried, *found):
        if roster.id_of_file(file) is None:
            roster.claim(file)
    roster.is_scan_due()


def _check_names(roster: Roster, config: Config) -> None:
    """Raise ConfigError where the router could not have these models and pools, by trying it on an empty one."""
    router = RequestRouter(RouteTable())
    ids = list(roster.files)
    if sum(config.for_model(model_id).replicas for model_id in ids) > router.table.max_endpoints:
        raise ConfigError(f"There can be {router.table.max_endpoints} engines at most; name fewer models or replicas.")
    router.set_models((model_id, (), roster.aliases(model_id)) for model_id in ids)
    router.set_pools(first_of(config))


def _in_words(report: Report) -> str:
    parts = [
        f"{verb} {', '.join(ids)}"
        for verb, ids in (
            ("added", report.added),
            ("removed", report.removed),
            ("changed", tuple(each.id for each in report.changed)),
            ("set", tuple(each.name for each in report.settings)),
        )
        if ids
    ]
    return "the configuration was read again: " + "; ".join(parts)
