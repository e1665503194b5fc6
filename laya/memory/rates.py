"""Owns: what this machine computes and reads in a second, as `laya doctor` measured it once, and reading it off.

The figures are those of the engine's own kernels (`laya.bench.rates` times them), so that a prediction needs no table
of processors. Knows no model, no file and no database.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from importlib.metadata import version

import msgspec

from laya.memory.machine import Machine

BATCHES = (1, 2, 4, 8, 32, 128)  # tokens computed at once, at which kernels are timed


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes a second; those of one thread unless the name says otherwise."""

    hardware: str  # processor, cores and engine build: the key they are kept under
    measured_at: float  # Unix time
    n_threads: int  # of the figures for all threads: the cores engines may use
    load: float  # the machine's load average before: above half a core the figures are too low
    matrix_s: dict[str, tuple[float, ...]]  # weight type -> seconds per weight at each of BATCHES, weights in cache
    streamed_s: dict[str, float]  # weight type -> the same with one token, weights from memory
    attention_s: dict[str, tuple[float, float]]  # KV type -> seconds per head, token kept and width: 1 token, a batch
    deep_s: dict[str, float]  # KV type -> the same with one token, the cache from memory
    reads: tuple[tuple[int, float], ...]  # bytes read over and over -> bytes a second
    reads_all: tuple[tuple[int, float], ...]  # the same by all threads
    op_s: float  # an operation on next to nothing
    op_all_s: float  # the same by all threads, who wait for each other after it
    speedup: float  # how many times faster all threads compute than one

    def threads_gain(self, n_threads: int) -> float:
        """How many times faster this many threads compute than one; beyond those measured nothing is gained."""
        share = (min(n_threads, self.n_threads) - 1) / max(1, self.n_threads - 1)
        return 1 + share * (self.speedup - 1)

    def read_bytes_per_s(self, n_bytes: float, n_threads: int) -> float:
        """Bytes a second when so many are read over and over: caches hold what is small."""
        one, every = _at(self.reads, n_bytes), _at(self.reads_all, n_bytes)
        share = (min(n_threads, self.n_threads) - 1) / max(1, self.n_threads - 1)
        return one + share * (max(one, every) - one)

    def missed(self, n_bytes: float) -> float:
        """How far a working set of this size is from lying in cache (0) to coming from memory (1)."""
        fast, slow = self.reads[0][1], self.reads[-1][1]
        if slow >= fast:
            return 0.0
        share = (1 / _at(self.reads, n_bytes) - 1 / fast) / (1 / slow - 1 / fast)
        return min(1.0, max(0.0, share))

    def weight_s(self, type_name: str, n_tokens: float) -> float:
        """Seconds per weight in cache for a product with so many tokens; a type not timed is the slowest one."""
        timed = self.matrix_s.get(type_name) or max(self.matrix_s.values(), key=lambda seconds: seconds[0])
        if n_tokens >= BATCHES[-1]:
            return timed[-1] * n_tokens / BATCHES[-1]
        return _at(tuple(zip(BATCHES, timed, strict=True)), n_tokens)

    def waiting_s(self, type_name: str) -> float:
        """Seconds per weight that one thread waits for weights from memory, once a pass."""
        if type_name not in self.streamed_s:
            return max(self.waiting_s(name) for name in self.streamed_s)
        return self.streamed_s[type_name] - self.matrix_s[type_name][0]

    def position_s(self, kv_type: str, *, missed: float | None) -> float:
        """Seconds of attention per head, token kept and element of a head's width, for each new token.

        missed: how much of the cache comes from memory, for a step of one token a sequence; None: a batch of a prompt.
        """
        one, batch = self.attention_s.get(kv_type) or max(self.attention_s.values())
        if missed is None:
            return batch
        return one + missed * max(0.0, self.deep_s.get(kv_type, one) - one)


def hardware_key(machine: Machine) -> str:
    """What rates hold for: processor, cores engines may use, engine build."""
    return f"{machine.facts().cpu_model}, {machine.cores()} cores, xllamacpp {version('xllamacpp')}"


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between two points on a line, outside them the nearest."""
    xs = [point[0] for point in points]
    index = bisect_left(xs, x)
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
