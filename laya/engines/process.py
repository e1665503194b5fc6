"""Owns: one engine child from spawn to exit: readiness, the reason of its end in words, its measured memory.

Knows no plan, no queue and no other model. An engine is ready only after it has really answered, and gone only after
it is reaped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from laya.engines.ceiling import GPU_FULL, Ceiling, Ceilings, LimitHit
from laya.engines.child import Child
from laya.engines.cpu import CPUINFO, check_cpu
from laya.engines.exit_words import exit_words
from laya.engines.held_memory import MemoryReading
from laya.engines.launcher import StartSettings
from laya.engines.launchers import launcher_for
from laya.engines.log import EngineLog
from laya.engines.polite_reads import read_politely
from laya.engines.port_owner import MARK, stranger_on
from laya.engines.progress import LoadProgress, until_still
from laya.errors import PROGRAM_ADVICE, EngineFailed, EngineOutOfMemory
from laya.types import EngineAddress

logger = logging.getLogger(__name__)
T = TypeVar("T")

CHILD_NICE = 15  # a thirtieth of a program's CPU weight; with more, a command waits too long (docs/log.md)
CHILD_OOM_SCORE_ADJ = 500  # the kernel takes an engine before the gateway or the user's programs
TERM_WAIT_S = 3.0
KILL_WAIT_S = 5.0
GIVING_UP_WAIT_S = 1.0  # for a child that has said why it gives up
START_TRIES = 3  # where a start that failed may be tried again


class EngineProcess:
    """One child, started once. All methods run on one event loop, that of the main thread."""

    def __init__(
        self,
        settings: StartSettings,
        log: EngineLog,
        *,
        ceilings: Ceilings | None = None,
        cpuinfo: Path = CPUINFO,
    ) -> None:
        """ceilings: where the child's memory is limited to `settings.ceiling_bytes`; None: nowhere."""
        self.settings = settings
        self.log = log
        self.state: Literal["new", "starting", "ready", "stopping", "exited"] = "new"
        self.address: EngineAddress | None = None
        self.pid: int | None = None
        self.started_at: float | None = None  # Unix time
        self.exit_reason: str | None = None
        self.limit_hit: LimitHit | None = None  # set before `exit_reason`, where the memory limit was the cause
        self._launcher = launcher_for(settings)
        self._progress = LoadProgress(self._launcher.files, are_mapped=settings.planned.mmap)
        self._ceilings = ceilings
        self._ceiling: Ceiling | None = None
        self._cpuinfo = cpuinfo
        self._api_key = secrets.token_hex(32)  # on a command line, a dash at its start would make it a flag
        self._mark = secrets.token_hex(8)
        self._child: Child | None = None
        self._peak_bytes = 0  # the most that was seen of it and all it started
        self._gave_up: str | None = None  # the child's own last words
        self._killed_for: str | None = None  # why Laya itself killed it
        self._listening: asyncio.Future[str] | None = None  # host:port
        self._is_port_taken = False  # by another program
        self.on_still: Callable[[], None] = lambda: None  # a program does nothing while it is waited for

    async def start(self) -> EngineAddress:
        """Spawn and return once the engine has really answered.

        Raises ConfigError or BadModelFile before a process is spent, EngineFailed after; then, and when cancelled,
        the child is gone before this returns.
        """
        assert self.state == "new", "an EngineProcess is started once"
        self._launcher.check()
        if self._launcher.needs_cpu:
            check_cpu(self._cpuinfo)
        for n_left in reversed(range(START_TRIES)):
            try:
                self.address = await self._start()
            except EngineFailed:
                is_worth_it = self._is_port_taken or self._launcher.may_try_again(self.log)
                if not n_left or self.limit_hit is not None or not is_worth_it:
                    raise
                self.exit_reason = self._killed_for = None
                self._is_port_taken = False
                self._launcher = launcher_for(self.settings)
            else:
                break
        assert self.address is not None
        self.state = "ready"
        return self.address

    async def _start(self) -> EngineAddress:
        child = self._spawn()
        timeout_s = self.settings.load_timeout_s
        following = asyncio.ensure_future(self._progress.follow(child.pid))
        try:
            return await asyncio.wait_for(self._unless_exited(child, self._unless_still(child)), timeout_s)
        except BaseException as error:
            too_late = None
            if isinstance(error, asyncio.TimeoutError):
                waits_for = self._launcher.waits_for()
                too_late = f"not ready after {timeout_s:g} s (load_timeout_s)" + (f": {waits_for}" if waits_for else "")
            self._kill_for(too_late or "it is not wanted any more")
            await child.wait()
            if too_late is not None:
                raise self._failure(too_late) from None
            raise
        finally:
            following.cancel()

    @property
    def load_percent(self) -> int | None:
        """How far the load has come, as far as that is known; it only rises."""
        return self._progress.percent or self._launcher.load_percent(self.log)

    async def stop(self) -> bool:
        """SIGTERM, then SIGKILL; True when the child is reaped, or never was; False: the kernel still holds it."""
        child = self._child
        if child is None or child.exited.done():
            return True
        self.state = "stopping"
        child.signal_group(signal.SIGTERM)
        if await child.wait(TERM_WAIT_S):
            return True
        self._kill_for(f"it did not end within {TERM_WAIT_S:g} s of SIGTERM")
        if await child.wait(KILL_WAIT_S):
            return True
        logger.error(
            "engine %s (pid %s) is not gone %g s after SIGKILL", self.settings.engine_name, self.pid, KILL_WAIT_S
        )
        return False

    def kill(self) -> None:
        """SIGKILL to the child and whatever it started; `wait_exit` tells when it is gone."""
        if self._child is not None:
            self._child.signal_group(signal.SIGKILL)

    def _kill_for(self, why: str) -> None:
        if self._child is not None and not self._child.has_ended:  # else it was not this that ended it
            self._killed_for = self._killed_for or why
        self.kill()

    async def wait_exit(self) -> str:
        """The reason of the exit, in words, once the child is reaped."""
        assert self._child is not None, "wait_exit before start"
        await self._child.wait()
        return self._ended(self._child.exited.result())

    def measure(self) -> MemoryReading | None:
        """The child's memory now; None when there is no child."""
        reading = self._launcher.measure(self.pid) if self.pid is not None else None
        if reading is None:
            return None
        if self._child is not None:
            self._child.look()
        self._peak_bytes = max(self._peak_bytes, reading.peak_bytes)
        return msgspec.structs.replace(reading, peak_bytes=self._peak_bytes)

    def _spawn(self) -> Child:
        if self._ceilings is not None and self.settings.ceiling_bytes is not None:
            self._ceiling = self._ceilings.make(self.settings.engine_name, self.settings.ceiling_bytes)
        document = json.dumps(self._document()).encode()
        self._listening = asyncio.get_running_loop().create_future()
        try:
            self._child = Child(
                # The model's name is there for whoever reads `ps`.
                [sys.executable, "-m", self._launcher.module, self.settings.engine_name],
                document=document,
                environment=self._launcher.environment(),
                on_stdout=self._on_report,
                on_stderr=self._on_log,
                control_group=self._ceiling.folder if self._ceiling is not None else None,
            )
        except OSError as error:
            if self._ceiling is not None:
                self._ceiling.remove()
            raise self._failure(f"no process could be made ({error})") from None
        if self._ceiling is not None:
            self._ceiling.attend(self._child.pid, self.kill)
        read_politely(self._child.pid)
        self.pid, self.started_at, self.state = self._child.pid, time.time(), "starting"
        self._child.exited.add_done_callback(lambda exited: self._ended(exited.result()))
        self.log.begin(f"engine for {self.settings.engine_name} started, pid {self.pid}")
        self._look_where_it_listens()
        return self._child

    def _document(self) -> dict[str, Any]:
        common = {
            "parent_pid": os.getpid(),
            "group": self._ceiling.entrance if self._ceiling is not None else None,
            "nice": CHILD_NICE,
            "oom_score_adj": CHILD_OOM_SCORE_ADJ,
        }
        document = self._launcher.document(self._api_key)
        if "environment" in document:  # it becomes another program
            document["environment"] = document["environment"] | {MARK: self._mark}
        return common | document

    def _on_report(self, line: bytes) -> None:
        """The child's one line: where it listens, or why it gives up."""
        message = json.loads(line)
        if "address" in message:
            self._on_listening(message["address"].removeprefix("http://"))
        else:
            self._gave_up = message["error"]
            self.log.note(message["error"])
            asyncio.get_running_loop().call_later(GIVING_UP_WAIT_S, self.kill)

    def _on_log(self, data: bytes) -> None:
        self.log.feed(data)
        self._look_where_it_listens()

    def _look_where_it_listens(self) -> None:
        if self._listening is not None and not self._listening.done():
            found = self._launcher.listens_at(self.log)
            if found is not None:
                self._on_listening(found)

    def _on_listening(self, host_and_port: str) -> None:
        assert self._listening is not None
        if not self._listening.done():
            self._listening.set_result(host_and_port)

    async def _become_ready(self) -> EngineAddress:
        assert self._listening is not None
        host, _, port = (await self._listening).rpartition(":")
        try:
            await self._check_port(host, int(port))  # before anything is sent there
            try:
                address = await self._launcher.prove(host, int(port), self._api_key)
            finally:  # what answered, also with an error, may have come meanwhile
                await self._check_port(host, int(port))
        except EngineFailed as error:
            raise self._failure(error.message) from None
        if (fault := self._launcher.load_fault(self.log)) is not None:
            raise self._failure(f"{fault} ({self._launcher.about()})")
        layers = await self._launcher.gpu_layers(self.log)
        return address if layers is None else msgspec.structs.replace(address, gpu_layers=layers)

    async def _check_port(self, host: str, port: int) -> None:
        """Raise EngineFailed where another program has the engine's port."""
        assert self.pid is not None
        stranger = await asyncio.to_thread(stranger_on, host, port, self.pid, self._mark)
        if stranger is not None:
            self._is_port_taken = True
            self.log.note(f"{stranger} has taken {host}:{port}")
            raise EngineFailed(f"another program, {stranger}, has taken {host}:{port}")

    async def _unless_still(self, child: Child) -> EngineAddress:
        """The address once it is ready, or EngineFailed as soon as its load is stuck, which would hold up others."""
        ready, still = asyncio.ensure_future(self._become_ready()), asyncio.ensure_future(until_still(child.pid))
        try:
            ends: set[asyncio.Future[Any]] = {ready, still}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._launcher.files:  # what a program does may be done elsewhere: in a container, by a service
                self.on_still()
                await ready
            if ready.done():
                return ready.result()
        finally:
            ready.cancel()
            still.cancel()
        stuck = f"it has neither read nor computed anything for {still.result():g} s"
        self._kill_for(stuck)
        raise self._failure(stuck)

    async def _unless_exited(self, child: Child, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or EngineFailed as soon as the child is gone."""
        task = asyncio.ensure_future(work)
        try:
            ends: set[asyncio.Future[Any]] = {task, child.exited}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not child.exited.done():
                return task.result()
        finally:
            task.cancel()
        reason = self._ended(child.exited.result())
        if self.limit_hit is not None:
            hit, advice = self.limit_hit, "" if self.settings.planned.is_computed else PROGRAM_ADVICE
            name = self.settings.engine_name
            raise EngineOutOfMemory(name, hit.limit_bytes, hit.peak_bytes, advice=advice, on_gpu=hit.on_gpu)
        if child.exited.result() >= 0:
            words = self._launcher.last_words(self.log) or self._gave_up or reason
            if child.exited.result() == 0 and not self._launcher.files:
                words += "; it ended without a fault: have it stay in the foreground"
            reason = f"{words} ({self._launcher.about()})"
        raise self._failure(reason)

    def _failure(self, words: str) -> EngineFailed:
        return EngineFailed(f"The engine for '{self.settings.engine_name}' did not start: {words}", param="model")

    def _ended(self, returncode: int) -> str:
        """Settle the reason of the exit, once."""
        if self.exit_reason is None:
            words = self._launcher.end_words(self.log, was_ready=self.address is not None)
            self.exit_reason = exit_words(returncode, words)
            if self._killed_for is not None and returncode == -signal.SIGKILL:
                self.exit_reason = f"killed by Laya: {self._killed_for}"
            if self._ceiling is not None:
                self._ceiling.remove()
                self.limit_hit = self._ceiling.hit() if returncode else None  # or what it started was killed
            if self.limit_hit is None and returncode and self._launcher.ran_out(self.log):
                self.limit_hit = GPU_FULL
            if self.limit_hit is not None:
                self.exit_reason = self.limit_hit.words()
            self.state = "exited"
            self.log.note(f"engine ended: {self.exit_reason}")
        return self.exit_reason
