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
ATTENDING = (1, 32, 64, 128)  # the same for attention, whose kernel is another one for many
TILE_TOKENS = 64  # of a batch for which a kernel of many tokens goes over the cache once
LINE_BYTES = 64
STREAM_BATCHES = (1, 2)  # the same for weights from memory; more wait as long as the last


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes a second; those of one thread unless the name says otherwise."""

    hardware: str  # processor, cores and engine build: the key they are kept under
    measured_at: float  # Unix time
    n_threads: int  # of the figures for all threads: the cores engines may use
    load: float  # the machine's load average before: above half a core the figures are too low
    matrix_s: dict[str, tuple[float, ...]]  # weight type -> seconds per weight at each of BATCHES, weights in cache
    streamed_s: dict[str, tuple[float, ...]]  # weight type -> the same at each of STREAM_BATCHES, weights from memory
    # KV type -> seconds of attention per head and token kept, and per element of its width, for each new token: at each
    # of ATTENDING, the cache near
    attention_s: dict[str, tuple[tuple[float, float], ...]]
    # heads whose rows lie side by side -> bytes attended to over and over -> seconds waited for each byte of a head
    kept_wait_s: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
    batch_wait_s: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]  # the same, once for each tile of a batch
    reads: tuple[tuple[int, float], ...]  # bytes read over and over -> bytes a second
    reads_all: tuple[tuple[int, float], ...]  # the same by all threads
    op_s: float  # an operation on a narrow row, after a pass over weights
    op_all_s: float  # the same by all threads, who wait for each other after it
    speedup: float  # how many times faster all threads compute than one

    def threads_gain(self, n_threads: int) -> float:
        """How many times faster this many threads compute than one; beyond those measured nothing is gained."""
        share = (min(n_threads, self.n_threads) - 1) / max(1, self.n_threads - 1)
        return 1 + share * (self.speedup - 1)

    def read_bytes_per_s(self, n_bytes: float, n_threads: int) -> float:
        """Bytes a second when so many are read over and over: caches hold what is small."""
        return 1 / _at(self._byte_s(n_threads), n_bytes)

    def missed(self, n_bytes: float, n_threads: int) -> float:
        """How far a working set of this size is from lying in cache (0) to coming from memory (1)."""
        seconds = self._byte_s(n_threads)
        fast, slow = seconds[0][1], seconds[-1][1]
        if slow <= fast:
            return 0.0
        return min(1.0, max(0.0, (_at(seconds, n_bytes) - fast) / (slow - fast)))

    def _byte_s(self, n_threads: int) -> list[tuple[int, float]]:
        """Bytes read over and over -> seconds a byte.

        Between two sizes it is these, not their inverse, that grow with the share of the set that is not in cache.
        """
        share = (min(n_threads, self.n_threads) - 1) / max(1, self.n_threads - 1)
        pairs = zip(self.reads, self.reads_all, strict=True)
        return [(n_bytes, 1 / (one + share * (max(one, every) - one))) for (n_bytes, one), (_, every) in pairs]

    def weight_s(self, type_name: str, n_tokens: float) -> float:
        """Seconds per weight in cache for a product with so many tokens; a type not timed is the slowest one."""
        timed = self.matrix_s.get(type_name) or max(self.matrix_s.values(), key=lambda seconds: seconds[0])
        if n_tokens >= BATCHES[-1]:
            return timed[-1] * n_tokens / BATCHES[-1]
        return _at(tuple(zip(BATCHES, timed, strict=True)), n_tokens)

    def waiting_s(self, type_name: str, n_tokens: float, n_threads: int) -> float:
        """Seconds per weight from memory that so many threads wait at once, as far as memory serves them all."""
        if type_name not in self.streamed_s:
            return max(self.waiting_s(name, n_tokens, n_threads) for name in self.streamed_s)
        one, every = (self._byte_s(n)[-1][1] for n in (1, n_threads))
        streamed_s = _at(tuple(zip(STREAM_BATCHES, self.streamed_s[type_name], strict=True)), n_tokens)
        in_cache_s = self.weight_s(type_name, min(n_tokens, STREAM_BATCHES[-1]))
        return max(0.0, streamed_s - in_cache_s) * every / one

    def attended_s(self, kv_type: str, width: float, n_tokens: float = 1) -> float:
        """Seconds of attention per head and token kept, with heads so wide, for each of so many new tokens at once."""
        timed = self.attention_s.get(kv_type) or max(self.attention_s.values())
        return _at([(n, one + width * element) for n, (one, element) in zip(ATTENDING, timed, strict=True)], n_tokens)

    def kept_wait_of_row_s(self, n_heads: int, row_bytes: float, n_bytes: float, *, tile: bool = False) -> float:
        """Seconds waited for a row of a head's keys or values where so many bytes are read over and over.

        n_heads: of a layer's cache. Their rows lie side by side, so each head skips those of the others: what memory
        gives at once is the less of use the more there are, and a row takes whole lines of the cache, on average three
        quarters of a line more than it fills. tile: for a kernel of many tokens, TILE_TOKENS of them together.
        """
        timed = self.batch_wait_s if tile else self.kept_wait_s
        byte_s = _at([(n, _at(waits, n_bytes)) for n, waits in timed], n_heads)
        is_whole = n_heads == 1 or row_bytes % LINE_BYTES == 0
        return byte_s * (row_bytes if is_whole else row_bytes + 0.75 * LINE_BYTES)


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
