"""Owns: what the start of an engine asks of its kind: what the child becomes, where it listens, what proves it works.

A kind of engine that is a child process is one module with a `Launcher`; what all children have in common (limits,
signals, the log, the end) is `process.py`'s and knows none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from laya.engines.held_memory import MemoryReading
from laya.engines.log import EngineLog
from laya.types import EngineAddress, GpuLayers, PlannedSettings


class StartSettings(Protocol):
    """What every kind is told about one start."""

    @property
    def model_id(self) -> str: ...
    @property
    def engine_name(self) -> str: ...  # what logs and limits call this engine
    @property
    def planned(self) -> PlannedSettings: ...
    @property
    def ceiling_bytes(self) -> int | None: ...  # the most it may hold; None: not limited
    @property
    def load_timeout_s(self) -> float: ...  # from spawn to the first answer


class Launcher(Protocol):
    """How one child is started and spoken to; made anew for each start. What has a body here is so for most."""

    module: str  # of the child program
    files: tuple[Path, ...]  # what a load reads; none: not known
    needs_cpu: bool  # whether this machine's CPU must have what the built-in engine was compiled for

    def check(self) -> None:
        """Raise what can be seen without starting anything."""

    def environment(self) -> dict[str, str]:
        """Of the child program."""

    def document(self, api_key: str) -> dict[str, Any]:
        """What the child program is told."""

    def listens_at(self, log: EngineLog) -> str | None:
        """`host:port`, as soon as it is known; the child may also report it by itself."""

    async def prove(self, host: str, port: int, api_key: str) -> EngineAddress:
        """Return once it has really answered. Waits without a deadline; raises EngineFailed in the engine's words."""

    async def gpu_layers(self, log: EngineLog) -> GpuLayers | None:
        """What became of the layers that were planned for GPUs, once it has answered; None: none were, or not known."""
        return None

    def waits_for(self) -> str | None:
        """What `prove` waits for now, for who has waited too long."""

    def last_words(self, log: EngineLog) -> str | None:
        """What the engine itself said of a start that failed."""

    def about(self) -> str:
        """Which file or program a failure is about."""

    def may_try_again(self, log: EngineLog) -> bool:
        """Whether a start that failed with this log is worth another one."""

    def measure(self, pid: int) -> MemoryReading | None:
        """What the engine holds now."""

    def end_words(self, log: EngineLog, *, was_ready: bool) -> str | None:
        """What the engine itself said of its end."""
        return log.error_words(first=not was_ready)

    def ran_out(self, log: EngineLog) -> bool:
        """Whether a start failed for memory that no ceiling watches: that of a GPU."""
        return False

    def load_fault(self, log: EngineLog) -> str | None:
        """What was wrong with a load that the engine itself took for a good one."""
        return None

    def load_percent(self, log: EngineLog) -> int | None:
        """How far a load has come, where only the engine's own words tell."""
        return None
