"""Owns: other Laya servers as places for their models: which models are here through them, and which peer is best.

Each peer is asked again and again how it stands. Each model that it has itself is one here, `PEER/MODEL`, with one
endpoint that is open while the peer answers. Its own names stand for it too, as a pool of all peers that have it, as
long as nothing here is called so. A peer that is gone leaves its models here: they are `failed`, and why is told.
Nothing of this is on the way of a request: the route table is told what has changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from laya.config.check_routing import AUTO
from laya.config.peers import PeerConfig, read_peer, split_name
from laya.engines.peer import PeerFault, PeerModel, PeerState, ask_peer
from laya.errors import LayaError
from laya.gateway.draining import DEADLINE_S, finish
from laya.gateway.hops import INSTANCE
from laya.types import ANY_LENGTH, ModelFile, ModelStatus

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

logger = logging.getLogger(__name__)
ASK_EVERY_S = 3.0
SILENCES = 3  # answers that are late in a row, after which it is gone; one that takes no connection is gone at once
ORIGIN = "peer"  # of the files that its models are here
_LOADED = ("ready", "degraded", "loading")  # or will be in a moment


class Peer:
    """One of them, as it was last heard."""

    def __init__(self, name: str, config: PeerConfig) -> None:
        self.name = name
        self.config = config
        self.state: PeerState | None = None  # None: it cannot be used
        self.fault: LayaError | None = None
        self.models: dict[str, PeerModel] = {}  # by their ids here, as it last told
        self.since_s = time.monotonic()
        self.n_silences = 0
        self.task: asyncio.Task[None] | None = None

    def shown(self) -> dict[str, Any]:
        state = self.state
        return {
            "name": self.name,
            "url": self.config.url,
            "state": "reachable" if state is not None else "unreachable" if self.fault is not None else "unknown",
            "since_s": time.monotonic() - self.since_s,
            "error": self.fault.message if self.fault is not None else None,
            "version": state.version if state is not None else None,
            "budget_bytes": state.memory.budget_bytes if state is not None else None,
            "free_bytes": state.free_bytes if state is not None else None,
            "models": len(self.models),
        }


class Peers:
    """Those of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._peers: dict[str, Peer] = {}
        self._leaving: set[str] = set()  # ids of models that a peer has no more

    # asking
    async def run(self) -> None:
        """Ask for as long as the server runs."""
        self.follow()
        try:
            await asyncio.Event().wait()
        finally:
            for peer in self._peers.values():
                _end(peer)

    def follow(self) -> None:
        """The configuration is another one: ask whom it names. Models of those that it does not are for the reload."""
        wanted = self._fleet.config.peers
        for name in [name for name, peer in self._peers.items() if wanted.get(name) != peer.config]:
            _end(self._peers.pop(name))
        for name, config in wanted.items():
            if name not in self._peers:
                peer = self._peers[name] = Peer(name, config)
                peer.task = asyncio.get_running_loop().create_task(self._ask(peer))
        self._update_names()

    async def _ask(self, peer: Peer) -> None:
        remote = read_peer(peer.config)
        while True:
            try:
                state = await ask_peer(peer.name, remote)
                if state.instance == INSTANCE:
                    raise PeerFault("refused", f"peer '{peer.name}' at {peer.config.url} is this server itself")
                self._heard(peer, state)
            except PeerFault as fault:
                peer.n_silences += 1
                if fault.kind != "silent" or peer.n_silences >= SILENCES:
                    self._lost(peer, fault)
            except Exception:  # a fault of ours with one of them is none of the others
                logger.exception("what peer '%s' told could not be used", peer.name)
            await asyncio.sleep(ASK_EVERY_S)

    def _heard(self, peer: Peer, state: PeerState) -> None:
        fleet, was_there = self._fleet, peer.state is not None
        peer.n_silences, peer.fault, peer.state = 0, None, state
        if not was_there:
            peer.since_s = time.monotonic()
            fleet.events.add("peer_reachable", f"peer '{peer.name}' answers: {peer.config.url}", level="info")
        told = {f"{peer.name}/{each.id}": each for each in state.models if each.is_served}
        for model_id in [model_id for model_id in peer.models if model_id not in told]:
            self._drop(model_id)
        peer.models = told
        for model_id, model in told.items():
            self._show(peer, model_id, model)
        self._update_names()
        fleet.pools.update()

    def _show(self, peer: Peer, model_id: str, model: PeerModel) -> None:
        """It is a model of this server, and requests for it need not wait."""
        fleet = self._fleet
        if model_id in self._leaving:
            return
        names = (f"{peer.name}/{alias}" for alias in model.known_aliases)
        aliases = tuple(name for name in names if name not in peer.models)
        file = ModelFile(
            id=model_id, path=Path(model_id), format="remote", file_bytes=0, origin=ORIGIN, aliases=aliases,
            task=model.known_task,
        )  # fmt: skip
        group, known = fleet.replicas_of(model_id), fleet.files.get(model_id)
        try:
            if not group and fleet.roster.id_of(model_id) is not None:
                return  # still an alias of another model, whose turn is to come
            if not group:
                fleet.register(file, fleet.config.for_model(model_id))
            elif known != file or any(fleet.roster.id_of(alias) is None for alias in aliases):
                fleet.renew(file)
        except LayaError as error:
            logger.warning("'%s' of peer '%s' is not served here: %s", model.id, peer.name, error.message)
            return
        if known is not None and group and known.task != file.task:
            for endpoint in group:  # planned for the old one; the next answer of the peer opens it again
                fleet.spawn(fleet.unload(endpoint))
            return
        for endpoint in fleet.replicas_of(model_id):
            if endpoint.pool is None and fleet.is_wanted(endpoint):
                fleet.spawn(self._open(endpoint))

    async def _open(self, endpoint: Endpoint) -> None:
        try:
            await self._fleet.ready(endpoint)
        except LayaError as error:
            logger.info("'%s' is not open: %s", endpoint.name, error.message)

    def _lost(self, peer: Peer, fault: PeerFault) -> None:
        """Requests for its models go to other peers that have them; what it answers already goes on."""
        fleet, was_told = self._fleet, peer.fault is not None and peer.fault.message == fault.message
        if peer.state is not None:
            peer.since_s = time.monotonic()
        peer.state, peer.fault = None, fault
        if not was_told:
            fleet.events.add("peer_lost", fault.message)
        for model_id in peer.models:
            for endpoint in fleet.replicas_of(model_id):
                if endpoint.pool is not None:
                    fleet.spawn(fleet.unload(endpoint, deadline_s=0.0))
        fleet.pools.update()

    def _drop(self, model_id: str) -> None:
        """The peer has it no more."""
        fleet = self._fleet
        for endpoint in fleet.replicas_of(model_id):
            fleet.router.remove_model(model_id)
            fleet.retiring.add(endpoint)
            self._leaving.add(model_id)
            fleet.spawn(self._end_of(model_id, endpoint))

    async def _end_of(self, model_id: str, endpoint: Endpoint) -> None:
        fleet = self._fleet
        try:
            await fleet.draining.end_load(endpoint)
            await finish((endpoint,), DEADLINE_S, lambda: endpoint in fleet.retiring)
            await fleet.unload(endpoint, deadline_s=0.0)
            fleet.retire(endpoint)
        finally:
            self._leaving.discard(model_id)

    # names
    def _update_names(self) -> None:
        """What its peers call a model stands for it, on whichever of them."""
        spares: dict[str, list[str]] = {}
        for peer in self._peers.values():
            for model_id, model in peer.models.items():
                if self._fleet.replicas_of(model_id):
                    for name in {model.id, *model.known_aliases} - {AUTO}:  # which leaves the choice to the rules
                        spares.setdefault(name, []).append(model_id)
        found = {name: tuple(members) for name, members in spares.items()}
        if found != self._fleet.spares:
            self._fleet.set_spares(found)

    def names_of(self, model_id: str) -> list[str]:
        """Names without a peer's that stand for it now."""
        router = self._fleet.router
        return [name for name, ids in self._fleet.spares.items() if model_id in ids and router.resolve(name) == name]

    def best_first(self, members: Iterable[str]) -> list[str]:
        """Of models of peers: those on peers that answer first, loaded ones before others, then by free bytes."""
        return sorted(members, key=lambda model_id: self._rank(model_id), reverse=True)

    def first(self, members: Iterable[str]) -> frozenset[int]:
        """The endpoints of the best of them; nobody: all are alike."""
        ranks = {model_id: self._rank(model_id)[:2] for model_id in members}
        best = max(ranks.values(), default=(False, False))
        if not best[0]:
            return frozenset()
        chosen = [model_id for model_id in self.best_first(ranks) if ranks[model_id] == best]
        if not best[1]:
            chosen = chosen[:1]  # where it has to be loaded, on the one with most room
        return frozenset(each.index for model_id in chosen for each in self._fleet.replicas_of(model_id))

    def _rank(self, model_id: str) -> tuple[bool, bool, int]:
        """(it can be used, it is loaded there, bytes that are free there)"""
        peer, model = self._of(model_id)
        endpoints = self._fleet.replicas_of(model_id)
        is_usable = any(each.takes_new and not (each.is_troubled or each.load_error) for each in endpoints)
        if peer is None or peer.state is None or model is None or not is_usable:
            return False, False, 0
        return True, model.state in _LOADED, peer.state.free_bytes

    def _of(self, model_id: str) -> tuple[Peer | None, PeerModel | None]:
        named = split_name(self._fleet.config.peers, model_id)
        peer = self._peers.get(named[0]) if named is not None else None
        return peer, peer.models.get(model_id) if peer is not None else None

    # what users see
    def shown(self) -> list[dict[str, Any]]:
        return [peer.shown() for peer in self._peers.values()]

    def check(self, model_id: str) -> None:
        """Raise why its peer, where it is a peer's, cannot be used."""
        peer, _ = self._of(model_id)
        if peer is not None and peer.fault is not None and peer.state is None:
            raise peer.fault

    def is_there(self, model_id: str) -> bool:
        """Whether its peer, where it is a peer's, answers."""
        peer, _ = self._of(model_id)
        return peer is None or peer.state is not None

    def told_there(self, model_id: str) -> str:
        """What to do instead of loading or unloading it here."""
        peer, model = self._of(model_id)
        if peer is None or model is None:
            return f"'{model_id}' is a model of a peer, which loads it itself."
        return (
            f"'{model_id}' is a model of the peer '{peer.name}', which loads it at its first request and decides when "
            f"it goes: there it is `laya load {model.id}`, with LAYA_URL={peer.config.url}."
        )

    def window(self, model_id: str) -> int | None:
        """Tokens of a request, where it is loaded there."""
        _, model = self._of(model_id)
        return model.window if model is not None and model.window != ANY_LENGTH else None

    def standing(self, status: ModelStatus) -> ModelStatus:
        """A model of a peer as it stands there; failed where the peer does not answer."""
        peer, model = self._of(status.id)
        if peer is None or model is None:
            return status
        extra = status.extra | {"peer": {"name": peer.name, "url": peer.config.url, "model": model.id}}
        if peer.state is None:
            error = peer.fault.message if peer.fault is not None else None
            return msgspec.structs.replace(status, state="failed", error=error, extra=extra)
        extra["peer"] |= {"running": model.running, "queued": model.queued}
        return msgspec.structs.replace(status, state=model.known_state, error=model.error or status.error, extra=extra)


def carried(files: Mapping[str, ModelFile], peers: Mapping[str, PeerConfig]) -> list[ModelFile]:
    """Models of those peers, as they are known here."""
    return [file for file in files.values() if file.origin == ORIGIN and split_name(peers, file.id) is not None]


def _end(peer: Peer) -> None:
    if peer.task is not None:
        peer.task.cancel()
