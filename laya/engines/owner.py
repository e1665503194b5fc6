"""Owns: the state of one model's engine. Transitions run one by one, so a state is never read and then acted on.

Public methods only post events and wait for the answer. Slow work (planning, loading, draining, stopping) runs in
tasks of its own that end by posting an event. States, and what may follow them:

    unloaded -> loading -> ready -> draining -> unloaded
                loading -> failed, unloaded (refused), draining (unloaded while loading), loading (lost with its node)
                ready   -> failed (crashed), loading (lost with its node)
    failed   -> loading (on the next demand, after the back-off), unloaded
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from laya.engines.backoff import BackOff
from laya.engines.cpu_time import family_cpu_s
from laya.engines.held import Held
from laya.engines.hooks import Engine, ModelHooks, Surroundings
from laya.engines.log import EngineLog
from laya.engines.placed import PlacedEngine
from laya.engines.process import EngineProcess
from laya.errors import ConfigError, EngineFailed, LayaError, ModelMisconfigured, ServerStopping
from laya.types import EngineAddress, ModelState, ModelStatus

logger = logging.getLogger(__name__)

Waiter = asyncio.Future[EngineAddress]


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
        self._held = Held(model_id)
        self._waiters: list[Waiter] = []
        self._unloading: list[asyncio.Future[None]] = []
        self._hurry = asyncio.Event()
        self._closing = False
        self._back_off = BackOff()
        self._restarts = 0
        self._load_s: float | None = None
        self._measured_bytes: int | None = None

    # Thin clients: they post and wait.

    async def ensure_ready(self, *, forced: bool = False) -> EngineAddress:
        """The address of the ready engine. forced: a person asks, so the back-off does not count.

        Raises what the settings factory refused with, or EngineFailed.
        """
        if self.address is not None:
            return self.address
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._post(self._on_demand, waiter, forced)
        return await waiter

    async def unload(self, deadline_s: float, why: LayaError | None = None) -> None:
        """Returns when the engine is gone; requests in flight get at most `deadline_s` before.

        why: what is told to who waits for a load that this ends.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(self._on_unload, done, deadline_s, why)
        await done

    async def close(self) -> None:
        """Stop at once and for good: a later demand is refused."""
        self._closing = True
        await self.unload(0)

    def kill(self) -> None:
        """SIGKILL to the engine, if there is one; the state follows from its exit."""
        if self._engine is not None:
            self._engine.kill()

    def lose(self, why: str) -> None:
        """Take its engine for lost, where that is on a node: nothing of it can be reached any more."""
        if isinstance(self._engine, PlacedEngine):
            self._engine.lose(why)

    @property
    def load_percent(self) -> int | None:
        """How far the load has come; None where none goes on, or nothing is known of it."""
        return self._engine.load_percent if self.state == "loading" and self._engine is not None else None

    @property
    def cpu_s(self) -> float | None:
        """How long its engine has computed; None where there is none."""
        if isinstance(self._engine, PlacedEngine):
            return self._engine.cpu_s
        pid = self._engine.pid if self._engine is not None else None
        return family_cpu_s(pid) if pid is not None else None

    def status(self) -> ModelStatus:
        """`since_s` is how long the state has lasted; `measured_bytes` outlives the engine."""
        reading = self._held.note(self._engine)
        if reading is not None:
            self._measured_bytes = reading.peak_bytes
        now_s = self._around.clock()
        return ModelStatus(
            id=self.model_id,
            state=self.state,
            task=self.hooks.task,
            since_s=now_s - self._since,
            measured_bytes=self._measured_bytes,
            pid=self._engine.pid if self._engine is not None else None,
            node=self._engine.node if isinstance(self._engine, PlacedEngine) else None,
            error=self.error,
            restarts=self._restarts,
            gpu_layers=self.address.gpu_layers if self.address is not None else None,
            anonymous_bytes=reading.anonymous_bytes if reading is not None else 0,
            extra={
                "waiting": len(self._waiters),
                "load_s": self._load_s,
                "load_percent": self.load_percent,
                "retry_in_s": self._back_off.wait_s(now_s),
            },
        )

    # The run loop: the only place where a state changes.

    def _post(self, handler: Callable[..., None], *args: Any) -> None:
        self._events.put_nowait((handler, args))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"engine owner {self.model_id}")

    async def _run(self) -> None:
        while not self._events.empty():
            handler, args = self._events.get_nowait()
            try:
                handler(*args)
            except Exception:  # a fault here must not take the other models, or the server, with it
                logger.exception("engine owner of %s: %s failed", self.model_id, handler.__name__)
                self._answer_waiters(
                    EngineFailed(f"The engine of '{self.model_id}' is in trouble; see the server's log")
                )

    def _on_demand(self, waiter: Waiter, forced: bool) -> None:
        wait_s = self._back_off.wait_s(self._around.clock())
        # 1. its caller left while it was queued
        if waiter.done():
            return
        # 2. shutting down: nothing starts any more
        if self._closing:
            waiter.set_exception(self._gone())
        # 3. ready
        elif self.address is not None:
            waiter.set_result(self.address)
        # 4. a load is on its way, or follows when the drain is over
        elif self.state in ("loading", "draining"):
            self._waiters.append(waiter)
        # 5. it failed a moment ago
        elif wait_s > 0 and not forced:
            again = f"{self.error} (next try in {wait_s:.0f} s)"
            waiter.set_exception(EngineFailed(again, param="model", retry_after_s=wait_s))
        # 6. nothing runs: load
        else:
            self._waiters.append(waiter)
            self._begin_load()

    def _on_unload(self, done: asyncio.Future[None], deadline_s: float, why: LayaError | None) -> None:
        self._unloading.append(done)
        if self.state == "ready":
            self._set("draining")
            self._begin_stop(deadline_s)
        elif self.state == "loading":
            self._set("draining")
            why = why or EngineFailed(f"'{self.model_id}' was unloaded while it was loading", param="model")
            self._answer_waiters(self._gone() if self._closing else why)
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
        self._load_s = self._around.clock() - self._since
        self.error = None
        self._set("ready", address)
        for waiter in self._take_waiters():
            waiter.set_result(address)

    def _on_load_failed(self, error: LayaError | None) -> None:
        """error None: the load was cancelled by an unload."""
        engine = self._engine
        if error is None or self.state == "draining":
            self._on_stopped()
            return
        if isinstance(error, ConfigError):
            error = ModelMisconfigured(self.model_id, error)
        self._engine = None
        self._held.end(engine)
        now_s = self._around.clock()
        was_tried = engine is not None and (engine.pid is not None or error.retry_after_s is not None)
        if was_tried:  # a refusal before that costs nothing, so no back-off
            self._back_off.failed(now_s)
            error.retry_after_s = self._back_off.wait_s(now_s) or None
        self.error = error.message
        if self._goes_elsewhere(engine):
            self._begin_load()
            return
        self._set("unloaded" if engine is None else "failed")
        self._answer_waiters(error)

    def _on_exited(self, engine: Engine, reason: str) -> None:
        if engine is not self._engine or self.state != "ready":
            return  # it was asked to stop
        now_s = self._around.clock()
        self._back_off.failed(now_s, ready_for_s=now_s - self._since)
        self._engine = None
        self._held.end(engine)
        self.error = f"The engine of '{self.model_id}' stopped by itself: {reason}"
        logger.error("%s", self.error)
        if self._goes_elsewhere(engine):
            self._begin_load()
        else:
            self._set("failed")

    def _goes_elsewhere(self, engine: Engine | None) -> bool:
        """Whether it was lost with its node, and is loaded on another one at once; who is lost again and again is left
        alone."""
        return isinstance(engine, PlacedEngine) and engine.is_lost and self._back_off.failures == 1

    def _on_stuck(self) -> None:
        """SIGKILL did not help yet: whoever waits is told, the memory stays reserved."""
        error = EngineFailed(f"The engine of '{self.model_id}' does not end; the kernel holds it", param="model")
        for future in self._take_unloading():
            future.set_exception(error)
        self._answer_waiters(error)

    def _on_stopped(self) -> None:
        engine, self._engine = self._engine, None
        self._held.end(engine)
        self._back_off.reset()
        self.error = None
        self._set("unloaded")
        for future in self._take_unloading():
            future.set_result(None)
        if self._closing:
            self._answer_waiters(self._gone())
        elif any(not waiter.done() for waiter in self._waiters):
            self._begin_load()

    # Slow work, in tasks of its own.

    def _begin_load(self) -> None:
        self._set("loading")
        self._work = asyncio.get_running_loop().create_task(self._load(), name=f"load {self.model_id}")
        self._work.add_done_callback(self._load_ended)

    def _load_ended(self, load: asyncio.Task[None]) -> None:
        """A load that was cancelled may never have begun, so its end is not told by itself."""
        if load.cancelled():
            self._post(self._on_load_failed, None)

    async def _load(self) -> None:
        try:
            hooks = self.hooks
            async with self._around.load_lock if hooks.takes_turns else contextlib.nullcontext():
                hooks = self.hooks
                settings = await hooks.settings()
                self._held.begin(hooks)
                engine = self._engine = self._around.make_engine(settings, self.log)
                self._restarts += self._back_off.failures > 0
                if isinstance(engine, EngineProcess):
                    load = asyncio.current_task()
                    engine.on_still = lambda: self._around.load_lock.let_others(load)
                address = await engine.start()
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
            self._held.note(engine)
            if not await engine.stop():
                self._post(self._on_stuck)
            await engine.wait_exit()
        except Exception:
            logger.exception("stopping %s failed", self.model_id)
        self._post(self._on_stopped)

    async def _drain(self, drained: Awaitable[None], deadline_s: float) -> None:
        """Until nothing is in flight, somebody is in a hurry, or the deadline."""
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(drained), asyncio.ensure_future(self._hurry.wait())}
        _, pending = await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    async def _watch_exit(self, engine: Engine) -> None:
        self._post(self._on_exited, engine, await engine.wait_exit())

    # Small steps of the transitions.

    def _set(self, state: ModelState, address: EngineAddress | None = None) -> None:
        self.state, self.address, self._since = state, address, self._around.clock()
        self._around.announce(self.model_id, state, address)

    def _gone(self) -> ServerStopping:
        return ServerStopping(f"'{self.model_id}' is not served any more: Laya is shutting down", param="model")

    def _take_unloading(self) -> list[asyncio.Future[None]]:
        taken, self._unloading = self._unloading, []
        return [future for future in taken if not future.done()]

    def _take_waiters(self) -> list[Waiter]:
        taken, self._waiters = self._waiters, []
        return [waiter for waiter in taken if not waiter.done()]

    def _answer_waiters(self, error: LayaError) -> None:
        for waiter in self._take_waiters():
            waiter.set_exception(error)
