"""Owns: the state of one model's engine. One task runs every transition, so a state is never read and then acted on.

Public methods only post events and wait for the answer. Slow work (planning, loading, draining, stopping) runs in
tasks of its own that end by posting an event. States, and what may follow them:

    unloaded -> loading -> ready -> draining -> unloaded
                loading -> failed, unloaded (refused), draining (unloaded while loading)
                ready   -> failed (crashed)
    failed   -> loading (on the next demand, after the back-off), unloaded
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from laya.engines.log import EngineLog
from laya.engines.process import MemoryReading
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed, LayaError
from laya.types import EngineAddress, ModelState, ModelStatus, Task

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # after the first, second, ... failure in a row
STABLE_S = 60.0  # an engine that was ready this long starts the row anew

StateListener = Callable[[str, ModelState, EngineAddress | None], None]
Waiter = asyncio.Future[EngineAddress]


class Engine(Protocol):
    """What an owner needs of a process; EngineProcess is one."""

    pid: int | None

    async def start(self) -> EngineAddress: ...
    async def stop(self) -> None: ...
    async def wait_exit(self) -> str: ...
    def kill(self) -> None: ...
    def measure(self) -> MemoryReading | None: ...


@dataclass(frozen=True)
class ModelHooks:
    """What the gateway does for a model. Only `settings` may raise, and only a LayaError."""

    settings: Callable[[], Awaitable[EngineSettings]]  # plans, reserves the memory, and says how to start
    release: Callable[[], None]  # the child is gone (or never came): its memory is free; once per `settings`
    drained: Callable[[], Awaitable[None]] | None = None  # returns when no request is in flight any more
    task: Task = "chat"


@dataclass(frozen=True)
class Surroundings:
    """What all owners of a supervisor share."""

    load_lock: asyncio.Lock  # one load at a time: two would read the disk against each other
    make_engine: Callable[[EngineSettings, EngineLog], Engine]
    announce: StateListener
    clock: Callable[[], float] = time.monotonic


class ModelOwner:
    """One model. `address` is the only thing to read on the hot path."""

    def __init__(self, model_id: str, hooks: ModelHooks, log: EngineLog, around: Surroundings) -> None:
        self.model_id = model_id
        self.hooks = hooks  # may be replaced; the next load uses it
        self.log = log
        self.state: ModelState = "unloaded"
        self.address: EngineAddress | None = None
        self.error: str | None = None
        self._around = around
        self._since = around.clock()
        self._events: asyncio.Queue[tuple[Callable[..., None], tuple[Any, ...]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None  # the load or the stop that is going on
        self._watch: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._release: Callable[[], None] | None = None  # set while memory is reserved for an engine
        self._waiters: list[Waiter] = []
        self._unloading: list[asyncio.Future[None]] = []
        self._hurry = asyncio.Event()
        self._closing = False
        self._failures = 0  # in a row
        self._not_before = 0.0
        self._loads = 0
        self._measured_bytes: int | None = None

    # Thin clients: they post and wait.

    async def ensure_ready(self, *, forced: bool = False) -> EngineAddress:
        """The address of the ready engine. forced: a person asks, so the back-off does not count."""
        if self.address is not None:
            return self.address
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._post(self._on_demand, waiter, forced)
        return await waiter

    async def unload(self, deadline_s: float) -> None:
        """Returns when the engine is gone; requests in flight get at most `deadline_s` before."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(self._on_unload, done, deadline_s)
        await done

    async def close(self) -> None:
        """Stop at once and for good."""
        self._closing = True
        await self.unload(0)
        if self._task is not None:
            self._task.cancel()

    def kill(self) -> None:
        if self._engine is not None:
            self._engine.kill()

    def status(self) -> ModelStatus:
        reading = self._engine.measure() if self._engine is not None else None
        if reading is not None:
            self._measured_bytes = reading.peak_bytes
        wait_s = self._not_before - self._around.clock()
        return ModelStatus(
            id=self.model_id,
            state=self.state,
            task=self.hooks.task,
            since_s=self._around.clock() - self._since,
            measured_bytes=self._measured_bytes,
            pid=self._engine.pid if self._engine is not None else None,
            error=self.error,
            restarts=max(0, self._loads - 1) if self._failures else 0,
            extra={"waiting": len(self._waiters)} | ({"retry_in_s": wait_s} if wait_s > 0 else {}),
        )

    # The run loop: the only place where anything changes.

    def _post(self, handler: Callable[..., None], *args: Any) -> None:
        self._events.put_nowait((handler, args))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"engine owner {self.model_id}")

    async def _run(self) -> None:
        while True:
            handler, args = await self._events.get()
            try:
                handler(*args)
            except Exception:  # a fault here must not take the other models, or the server, with it
                logger.exception("engine owner of %s: %s failed", self.model_id, handler.__name__)
                self._answer_waiters(EngineFailed(f"The engine of '{self.model_id}' is in trouble; see the server's log"))

    def _on_demand(self, waiter: Waiter, forced: bool) -> None:
        if waiter.done():  # its caller left while it was queued
            return
        # 1. shutting down: nothing starts any more
        if self._closing:
            waiter.set_exception(EngineFailed(f"'{self.model_id}' is not served any more: Laya is shutting down"))
        # 2. ready
        elif self.address is not None:
            waiter.set_result(self.address)
        # 3. a load is on its way, or follows when the drain is over
        elif self.state in ("loading", "draining"):
            self._waiters.append(waiter)
        # 4. it failed a moment ago
        elif not forced and (wait_s := self._not_before - self._around.clock()) > 0:
            refusal = EngineFailed(f"{self.error} (next try in {wait_s:.0f} s)", param="model")
            refusal.retry_after_s = wait_s
            waiter.set_exception(refusal)
        # 5. nothing runs: load
        else:
            self._waiters.append(waiter)
            self._begin_load()

    def _on_unload(self, done: asyncio.Future[None], deadline_s: float) -> None:
        self._unloading.append(done)
        if self.state == "ready":
            self._set("draining")
            self._begin_stop(deadline_s)
        elif self.state == "loading":
            self._set("draining")
            self._answer_waiters(EngineFailed(f"'{self.model_id}' was unloaded while it was loading", param="model"))
            assert self._work is not None
            self._work.cancel()
        elif self.state == "draining":
            if deadline_s <= 0:
                self._hurry.set()
        else:
            self._on_stopped()

    def _on_loaded(self, engine: Engine, address: EngineAddress) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._watch_exit(engine))
        if self.state == "draining":  # an unload came when the load was just over
            self._begin_stop(0)
            return
        self.error = None
        self._set("ready", address)
        for waiter in self._take_waiters():
            waiter.set_result(address)

    def _on_load_failed(self, error: LayaError | None) -> None:
        """error None: the load was cancelled by an unload."""
        started, self._engine = self._engine is not None, None
        self._release_memory()
        if error is None or self.state == "draining":
            self._on_stopped()
            return
        # A refusal (it does not fit, a wrong config) is not a failure of the engine: it may be asked again at once.
        if started:
            self._count_failure()
            error.retry_after_s = max(self._not_before - self._around.clock(), 0) or None
        self.error = error.message
        self._set("failed" if started else "unloaded")
        self._answer_waiters(error)

    def _on_exited(self, engine: Engine, reason: str) -> None:
        if engine is not self._engine or self.state != "ready":
            return  # it was asked to stop
        if self._around.clock() - self._since >= STABLE_S:
            self._failures = 0
        self._count_failure()
        self._engine = None
        self._release_memory()
        self.error = f"The engine of '{self.model_id}' stopped by itself: {reason}"
        logger.error("%s", self.error)
        self._set("failed")

    def _on_stopped(self) -> None:
        self._engine = None
        self._release_memory()
        self._failures, self._not_before, self.error = 0, 0.0, None
        self._set("unloaded")
        done, self._unloading = self._unloading, []
        for future in done:
            if not future.done():
                future.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if not waiter.done()]
        if self._closing:
            self._answer_waiters(EngineFailed(f"'{self.model_id}' is not served any more: Laya is shutting down"))
        elif self._waiters:
            self._begin_load()

    # Slow work, in tasks of its own.

    def _begin_load(self) -> None:
        self._loads += 1
        self._set("loading")
        self._work = asyncio.get_running_loop().create_task(self._load(), name=f"load {self.model_id}")

    async def _load(self) -> None:
        try:
            async with self._around.load_lock:
                hooks = self.hooks
                settings = await hooks.settings()
                self._release = hooks.release
                engine = self._around.make_engine(settings, self.log)
                self._engine = engine
                address = await engine.start()
        except asyncio.CancelledError:
            self._post(self._on_load_failed, None)
        except LayaError as error:
            self._post(self._on_load_failed, error)
        except Exception as error:
            logger.exception("loading %s failed", self.model_id)
            self._post(self._on_load_failed, EngineFailed(f"'{self.model_id}' could not be loaded: {error!r}"))
        else:
            self._post(self._on_loaded, engine, address)

    def _begin_stop(self, deadline_s: float) -> None:
        self._hurry.clear()
        assert self._engine is not None
        self._work = asyncio.get_running_loop().create_task(self._drain_and_stop(self._engine, deadline_s))

    async def _drain_and_stop(self, engine: Engine, deadline_s: float) -> None:
        try:
            if self.hooks.drained is not None and deadline_s > 0:
                await self._drain(self.hooks.drained(), deadline_s)
            await engine.stop()
        except Exception:
            logger.exception("stopping %s failed", self.model_id)
        self._post(self._on_stopped)

    async def _drain(self, drained: Awaitable[None], deadline_s: float) -> None:
        """Until nothing is in flight, somebody is in a hurry, or the deadline."""
        waits = {asyncio.ensure_future(drained), asyncio.ensure_future(self._hurry.wait())}
        _, pending = await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    async def _watch_exit(self, engine: Engine) -> None:
        self._post(self._on_exited, engine, await engine.wait_exit())

    # Small steps of the transitions.

    def _set(self, state: ModelState, address: EngineAddress | None = None) -> None:
        self.state, self.address, self._since = state, address, self._around.clock()
        self._around.announce(self.model_id, state, address)

    def _count_failure(self) -> None:
        self._failures += 1
        self._not_before = self._around.clock() + BACK_OFF_S[min(self._failures, len(BACK_OFF_S)) - 1]

    def _release_memory(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def _take_waiters(self) -> list[Waiter]:
        waiters, self._waiters = self._waiters, []
        return [waiter for waiter in waiters if not waiter.done()]

    def _answer_waiters(self, error: LayaError) -> None:
        for waiter in self._take_waiters():
            waiter.set_exception(error)
