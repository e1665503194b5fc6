"""Owns: two clocks for engines on a machine that others use too: the engine's own CPU time, and what others took."""

from __future__ import annotations

import time

import psutil

from laya.engines.process import EngineProcess


class EngineClock:
    """The CPU time of an engine with one thread, else the time of the day."""

    def __init__(self, engine: EngineProcess, n_threads: int) -> None:
        assert engine.pid is not None
        # Linux: the clock of another process, to the nanosecond; see clock_getcpuclockid(3).
        self._clock_id = (~engine.pid << 3) | 2 if n_threads == 1 else time.CLOCK_MONOTONIC

    def now_s(self) -> float:
        return time.clock_gettime(self._clock_id)


class OtherPrograms:
    """What other programs take of the CPU while an engine is timed."""

    def __init__(self, engine: EngineProcess) -> None:
        self._processes = (psutil.Process(engine.pid), psutil.Process())
        self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        own = sum(sum(process.cpu_times()[:2]) for process in self._processes)
        return sum(times[:8]), times.idle + times.iowait, own  # the first eight do not contain each other

    def share(self) -> float:
        total, idle, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return round(max(0.0, total - idle - own) / max(total, 0.01), 3)
