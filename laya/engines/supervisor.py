"""Owns: all models of this server and the door to their engines. Knows no memory, no routes and no requests.

The gateway registers models with hooks (plan and reserve, release, drained) and listens to states. Every model has
an owner task (owner.py); what they share is one load at a time. Nothing that happens to an engine raises out of here
except as a LayaError to whoever asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from laya.engines.hooks import Ending, EngineMaker, ModelHooks, SettingsFactory, StateListener, Surroundings
from laya.engines.load_turns import LoadTurns
from laya.engines.log import EngineLog, log_path
from laya.engines.owner import ModelOwner
from laya.engines.process import EngineProcess
from laya.errors import LayaError, ModelNotFound
from laya.types import EngineAddress, ModelState, ModelStatus, Task

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
SHUTDOWN_S = 10.0
KILLED_WAIT_S = 2.0  # for the kernel to take a killed engine down


class Supervisor:
    """The engines of one server; used on one event loop, that of the main thread."""

    def __init__(
        self,
        logs_dir: Path | None,
        *,
        make_engine: EngineMaker = EngineProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """logs_dir: where `<model>.log` files go; None keeps logs in memory only."""
        self._logs_dir = logs_dir
        self._owners: dict[str, ModelOwner] = {}
        self._listeners: list[StateListener] = []
        self._around = Surroundings(LoadTurns(), make_engine, self._announce, clock)

    def register(
        self,
        model_id: str,
        settings_factory: SettingsFactory,
        release: Callable[[], None],
        *,
        task: Task = "chat",
        drained: Callable[[], Awaitable[None]] | None = None,
        ended: Callable[[Ending], None] | None = None,
        takes_turns: bool = True,
    ) -> None:
        """Make a model known; nothing is loaded. For a known model the next load uses the new hooks.

        settings_factory: awaited just before each load, one load at a time; plans, reserves memory, and returns how
            to start, or raises the LayaError that refuses.
        release: called once after each time settings_factory returned, when the child is gone or never came.
        drained: returns when no request of the model is in flight; awaited by `unload` before the engine stops.
        ended: told what an engine held when it is gone, before `release`.
        takes_turns: whether its loads wait for others, and others for them.
        """
        hooks = ModelHooks(settings_factory, release, drained, task, ended, takes_turns)
        if owner := self._owners.get(model_id):
            owner.hooks = hooks
            return
        log = EngineLog(log_path(self._logs_dir, model_id) if self._logs_dir is not None else None)
        self._owners[model_id] = ModelOwner(model_id, hooks, log, self._around)

    async def forget(self, model_id: str) -> None:
        """Unload at once and make unknown. Raises ModelNotFound."""
        owner = self._owner(model_id)
        await owner.close()
        owner.log.close()
        del self._owners[model_id]

    def on_state(self, listener: StateListener) -> None:
        """`listener(model_id, state, address)` is called on every transition; the address is set when ready."""
        self._listeners.append(listener)

    def address(self, model_id: str) -> EngineAddress | None:
        """The address of a ready engine, else None. For the hot path: two lookups, no wait."""
        owner = self._owners.get(model_id)
        return owner.address if owner is not None else None

    def load_percent(self, model_id: str) -> int | None:
        """How far the load of an engine has come; None where none goes on, or nothing is known of it."""
        owner = self._owners.get(model_id)
        return owner.load_percent if owner is not None else None

    def cpu_s(self, model_id: str) -> float | None:
        """How long an engine and what it started have computed, in seconds of all threads; None where there is none."""
        owner = self._owners.get(model_id)
        return owner.cpu_s if owner is not None else None

    def lose(self, model_id: str, why: str) -> None:
        """Take a model's engine for lost, where that is on a node: it is loaded again, on another one if there is."""
        if owner := self._owners.get(model_id):
            owner.lose(why)

    async def ensure_ready(self, model_id: str) -> EngineAddress:
        """Load if need be; any number of callers share one load, and one that leaves does not end it for the others.

        Raises ModelNotFound, the refusal of the settings factory, or EngineFailed (with retry_after_s while an engine
        that keeps failing is left alone).
        """
        return await self._owner(model_id).ensure_ready()

    async def load(self, model_id: str) -> EngineAddress:
        """As `ensure_ready`, but asked for by a person: a back-off is ignored."""
        return await self._owner(model_id).ensure_ready(forced=True)

    async def unload(self, model_id: str, deadline_s: float = DRAIN_S, why: LayaError | None = None) -> None:
        """Stop the engine once its requests are drained, at the latest after `deadline_s`; ends a load at once.

        Requests that come meanwhile wait and load it again. why: told to who waits for a load that this ends. Raises
        ModelNotFound; EngineFailed when not even SIGKILL ends it.
        """
        await self._owner(model_id).unload(deadline_s, why)

    def status(self) -> list[ModelStatus]:
        """All models in the order of registration. Reads /proc for the memory of those that run."""
        return [owner.status() for owner in self._owners.values()]

    def logs(self, model_id: str) -> EngineLog:
        """The model's log: `tail`, `follow`, `path`. Raises ModelNotFound."""
        return self._owner(model_id).log

    async def shutdown(self, deadline_s: float = SHUTDOWN_S) -> None:
        """Stop every engine and refuse new loads. After `deadline_s` what still runs is killed."""
        closing = [asyncio.ensure_future(owner.close()) for owner in self._owners.values()]
        if not closing:
            return
        _, late = await asyncio.wait(closing, timeout=deadline_s)
        if late:
            for owner in self._owners.values():
                owner.kill()
            _, late = await asyncio.wait(closing, timeout=KILLED_WAIT_S)
        for task in late:
            task.cancel()
        for owner in self._owners.values():
            owner.log.close()
        results = await asyncio.gather(*closing, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                logger.error("an engine did not stop: %s", error)

    def kill(self) -> None:
        """SIGKILL to every engine; their states follow. Safe in a signal handler of Python's."""
        for owner in self._owners.values():
            owner.kill()

    def _owner(self, model_id: str) -> ModelOwner:
        owner = self._owners.get(model_id)
        if owner is None:
            raise ModelNotFound(model_id, self._owners)
        return owner

    def _announce(self, model_id: str, state: ModelState, address: EngineAddress | None) -> None:
        for listener in self._listeners:
            try:
                listener(model_id, state, address)
            except Exception:  # a listener's fault must not stop an owner half-way through a transition
                logger.exception("a listener of %s -> %s failed", model_id, state)
