"""Owns: what an owner of a model needs from others: an engine, the gateway's say, and what all owners share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from laya.engines.ceiling import LimitHit
from laya.engines.held_memory import MemoryReading
from laya.engines.launcher import StartSettings
from laya.engines.load_turns import LoadTurns
from laya.engines.log import EngineLog
from laya.types import EngineAddress, ModelState, Task

SettingsFactory = Callable[[], Awaitable[StartSettings]]
StateListener = Callable[[str, ModelState, EngineAddress | None], None]
EngineMaker = Callable[[StartSettings, EngineLog], "Engine"]


class Engine(Protocol):
    """One engine to start once; EngineProcess is one."""

    pid: int | None
    limit_hit: LimitHit | None  # set once it has ended, where its memory limit was the cause

    @property
    def load_percent(self) -> int | None: ...  # None: not known

    async def start(self) -> EngineAddress: ...
    async def stop(self) -> bool: ...
    async def wait_exit(self) -> str: ...
    def kill(self) -> None: ...
    def measure(self) -> MemoryReading | None: ...


@dataclass(frozen=True)
class Ending:
    """What an engine held before it went."""

    peak_bytes: int  # 0: it was never measured
    limit_hit: LimitHit | None  # where its memory limit was the cause


@dataclass(frozen=True)
class ModelHooks:
    """What the gateway does for a model. Only `settings` may raise, and only a LayaError."""

    settings: SettingsFactory  # plans, reserves the memory, and says how to start
    release: Callable[[], None]  # the child is gone, or never came: its memory is free; once per `settings`
    drained: Callable[[], Awaitable[None]] | None = None  # returns when no request is in flight any more
    task: Task = "chat"
    ended: Callable[[Ending], None] | None = None  # an engine is gone; called before `release`
    takes_turns: bool = True  # False: its loads read nothing of this disk, and wait for no other one


@dataclass(frozen=True)
class Surroundings:
    """What all owners of a supervisor share."""

    load_lock: LoadTurns
    make_engine: EngineMaker
    announce: StateListener
    clock: Callable[[], float] = time.monotonic
