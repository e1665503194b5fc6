"""Owns: `laya bench rates`: what this machine computes and reads in a second, by the engine's own kernels.

About twenty seconds. One thread is timed by its CPU time, which other programs hardly lengthen; all threads by the
best of several short runs; everything in rounds, so that a disturbance of a second spoils none of it. What computes is
the best of its runs. What waits for memory is their median, over so much that a pass finds as little of the last one
in cache as a step of a model does. No model is needed. Layer: ggml's kernels; the last line printed is JSON, a
`MachineRates`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from laya.bench.ggml import Graph, Tensors, backend, repack_buffer_type
from laya.bench.help import description
from laya.memory import Machine
from laya.memory.engine_facts import built_in_engine
from laya.memory.ggml import GGML_TYPES
from laya.memory.rates import ATTENDING, BATCHES, STREAM_BATCHES, TILE_TOKENS, MachineRates, hardware_key
from laya.types import MIB

WEIGHT_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
ROW, ROWS, STREAM_ROWS = 1024, 256, 1024  # a matrix that stays in the cache of any core
PROBE = "Q8_0"  # the type with which threads are compared
READ_MIB = (1, 8, 24, 48, 128, 384)  # what is read over and over
NARROW, WIDE, KEPT = 64, 256, 512  # widths of a head, and rows that any core's cache holds
KEPT_HEADS, KEPT_MIB, KEPT_DIM, KEPT_LAYERS = (1, 4, 8), (2, 16, 64, 192), 128, 4  # caches that outgrow it
BATCH_MIB = (2, 16, 64)  # the same, for a batch of tokens, which takes longer
ROUNDS = 4
ENOUGH_S = 18.0  # on a busy machine one round has to do
REPEATS = 1
WORTH_S, MOST_REPEATS = 0.01, 10  # short runs are repeated for so long: what disturbs comes in pieces
REPEATS_ALL = 4  # the best of more, since all threads must be undisturbed at once
PASSES = (
    6  # over what is read again and again; many more, and a cache keeps what it would not between steps of an engine
)
STREAM_MIB = 72  # more than caches keep of what is read once a pass
TINY_OPS, TINY_ROW, FLUSH_MIB = 1000, 512, 16  # after a pass over as much as pushes them out of the core's own cache
DISTURBED_S = 0.3  # none takes so long by itself: threads wait for one that another program holds back
BARRIER_MOST_S = 5e-6  # what an operation by all threads takes at most, for the same reason
BUDGET_SHARE = 0.25  # of the free budget, for the largest set that is read
Timer = Callable[[Graph, int], float]  # and the number of threads -> seconds
_KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
_TILE_AT = ATTENDING.index(TILE_TOKENS)
_IDS = {name: kind.id for name, kind in _KINDS.items()}


def main(argv: list[str] | None = None) -> None:
    """`laya bench rates`. Takes no options."""
    words = description(__doc__.partition("\n")[0])
    argparse.ArgumentParser(prog="laya bench rates", description=words).parse_args(argv)
    print(msgspec.json.encode(measure()).decode())


def measure() -> MachineRates:
    """Time the kernels now. Raises EngineFailed where this build of the engine cannot be timed."""
    machine = Machine()
    n_threads, load = machine.cores(), os.getloadavg()[0]
    sizes = [size for size in READ_MIB if size * MIB < BUDGET_SHARE * machine.budget().bytes] or [READ_MIB[0]]
    timed = _rounds(sizes, n_threads)
    best = {key: min(runs) for key, runs in timed.items()}
    usual = {key: statistics.median(runs) for key, runs in timed.items()}
    attention_s = {name: _attention_s(best, name) for name in KV_TYPES}
    return MachineRates(
        hardware=hardware_key(machine),
        measured_at=time.time(),
        n_threads=n_threads,
        load=load,
        matrix_s={name: tuple(best["weight", name, n] for n in BATCHES) for name in WEIGHT_TYPES},
        streamed_s={name: tuple(usual["stream", name, n] for n in STREAM_BATCHES) for name in WEIGHT_TYPES},
        attention_s=attention_s,
        kept_wait_s=_wait_s(usual, "kept", _of_size(KEPT_MIB, sizes[-1]), attention_s["f16"][0], 1),
        batch_wait_s=_wait_s(usual, "batch", _of_size(BATCH_MIB, sizes[-1]), attention_s["f16"][_TILE_AT], TILE_TOKENS),
        reads=_reads(usual, sizes, 1),
        reads_all=_reads(best, sizes, n_threads),
        op_s=usual["op", 1],
        op_all_s=min(best["op", n_threads], usual["op", 1] + BARRIER_MOST_S),
        speedup=min(float(n_threads), max(1.0, best["weight", PROBE, 8] / best["all", n_threads])),
    )


def _rounds(sizes: list[int], n_threads: int) -> dict[tuple[Any, ...], list[float]]:
    """What is timed -> the seconds it took in each round."""
    jobs: dict[tuple[Any, ...], Callable[[], float]] = {}
    jobs |= {("weight", name, n): partial(_weight_s, name, n) for name in WEIGHT_TYPES for n in BATCHES}
    jobs |= {
        ("stream", name, n): partial(_streamed_s, name, n, sizes[-1]) for name in WEIGHT_TYPES for n in STREAM_BATCHES
    }
    jobs |= {
        ("row", name, width, n): partial(_row_s, name, width, n)
        for name in KV_TYPES
        for width in (NARROW, WIDE)
        for n in ATTENDING
    }
    for kind, all_mib, n_tokens in (("kept", KEPT_MIB, 1), ("batch", BATCH_MIB, TILE_TOKENS)):
        for n_heads in KEPT_HEADS:
            for mib in _of_size(all_mib, sizes[-1]):
                jobs[kind, n_heads, mib] = partial(_kept_s, n_heads, mib, n_tokens)
    jobs |= {("read", size, n): partial(_read_s, size, n) for size in sizes for n in (1, n_threads)}
    jobs |= {("op", n): partial(_cold_op_s, n) for n in (1, n_threads)}
    jobs["all", n_threads] = partial(_weight_s, PROBE, 8, n_threads)
    timed: dict[tuple[Any, ...], list[float]] = {key: [] for key in jobs}
    start_s = time.monotonic()
    for _ in range(ROUNDS):
        for key, job in jobs.items():
            if not timed[key] or time.monotonic() - start_s < ENOUGH_S:
                timed[key].append(job())
    return timed


def _of_size(sizes: tuple[int, ...], most_mib: int) -> list[int]:
    return [mib for mib in sizes if mib <= max(most_mib, sizes[0])]


def _attention_s(best: dict[tuple[Any, ...], float], kv_type: str) -> tuple[tuple[float, float], ...]:
    """What MachineRates.attention_s holds of a type: the line through two widths, for each number of tokens."""
    lines = []
    for n in ATTENDING:
        narrow, wide = best["row", kv_type, NARROW, n], best["row", kv_type, WIDE, n]
        element_s = min(narrow / NARROW, max(0.0, wide - narrow) / (WIDE - NARROW))
        lines.append((narrow - NARROW * element_s, element_s))
    return tuple(lines)


def _wait_s(
    usual: dict[tuple[Any, ...], float], kind: str, sizes: list[int], attention_s: tuple[float, ...], n_tokens: int
) -> tuple[tuple[int, tuple[tuple[int, float], ...]], ...]:
    """What a position took beyond computing with it for so many tokens, for each byte of its keys and values."""
    row_s, row_bytes = attention_s[0] + KEPT_DIM * attention_s[1], 2 * _KINDS["F16"].row_bytes(KEPT_DIM)
    return tuple(
        (n, tuple((mib * MIB, max(0.0, usual[kind, n, mib] - row_s) * n_tokens / row_bytes) for mib in sizes))
        for n in KEPT_HEADS
    )


def _reads(seconds: dict[tuple[Any, ...], float], sizes: list[int], n_threads: int) -> tuple[tuple[int, float], ...]:
    """Bytes read over and over -> bytes a second; what is smaller is never slower, whatever disturbed it."""
    speeds = [size * MIB / seconds["read", size, n_threads] for size in sizes]
    return tuple((size * MIB, max(speeds[index:])) for index, size in enumerate(sizes))


def _best_s(graph: Graph, n_threads: int) -> float:
    """Seconds of one run, undisturbed: the least of several, and of more where a run is short."""
    clock = time.process_time if n_threads == 1 else time.perf_counter
    cpu = backend(n_threads)
    graph.compute(cpu)
    first_s = _timed(graph, cpu, clock)
    if first_s > DISTURBED_S:
        return first_s
    repeats = REPEATS if n_threads == 1 else REPEATS_ALL
    more = min(MOST_REPEATS, round(WORTH_S / max(first_s, 1e-6)))
    return min(first_s, *(_timed(graph, cpu, clock) for _ in range(max(repeats, more))))


def _usual_s(graph: Graph, n_threads: int) -> float:
    """Seconds of one run over memory: the median of all but the first."""
    clock = time.process_time if n_threads == 1 else time.perf_counter
    cpu = backend(n_threads)
    graph.compute(cpu)
    return statistics.median(_timed(graph, cpu, clock) for _ in range(PASSES))


def _timed(graph: Graph, cpu: int, clock: Callable[[], float]) -> float:
    start_s = clock()
    graph.compute(cpu)
    return clock() - start_s


def _weight_s(type_name: str, n_tokens: int, n_threads: int = 1) -> float:
    """Seconds per weight of a product of a matrix in cache with so many tokens."""
    is_repacked = type_name in built_in_engine().repack_types and repack_buffer_type() is not None
    n_products = max(2, 64 // n_tokens)
    with Tensors(2, is_repacked=is_repacked) as weights, Tensors(2 * n_products + 4) as rest:
        matrix = weights.new(_IDS[type_name], ROW, ROWS)
        weights.allocate([matrix])
        tokens = rest.new(_IDS["F32"], ROW, n_tokens)
        graph = Graph(rest)
        for _ in range(n_products):
            graph.add("mul_mat", matrix, tokens)
        rest.allocate()
        return _best_s(graph, n_threads) / (n_products * ROW * ROWS)


def _streamed_s(type_name: str, n_tokens: int, most_mib: int) -> float:
    """Seconds per weight of a product with so many tokens, when the matrices come from memory."""
    is_repacked = type_name in built_in_engine().repack_types and repack_buffer_type() is not None
    kind = _KINDS[type_name]
    n_matrices = max(2, min(STREAM_MIB, most_mib) * MIB // (STREAM_ROWS * kind.row_bytes(ROW)))
    with Tensors(n_matrices + 1, is_repacked=is_repacked) as weights, Tensors(n_matrices + 4) as rest:
        matrices = [weights.new(kind.id, ROW, STREAM_ROWS) for _ in range(n_matrices)]
        weights.allocate(matrices)
        tokens = rest.new(_IDS["F32"], ROW, n_tokens)
        graph = Graph(rest)
        for matrix in matrices:
            graph.add("mul_mat", matrix, tokens)
        rest.allocate()
        return _usual_s(graph, 1) / (n_matrices * STREAM_ROWS * ROW)


def _read_s(n_mib: int, n_threads: int) -> float:
    """Seconds to read matrices of this size in all, one after the other, again and again."""
    rows = MIB // (2 * ROW)
    with Tensors(n_mib + 1) as weights, Tensors(n_mib + 4) as rest:
        matrices = [weights.new(_IDS["F16"], ROW, rows) for _ in range(n_mib)]
        weights.allocate()
        token = rest.new(_IDS["F32"], ROW, 1)
        graph = Graph(rest)
        n_passes = max(1, 16 // n_mib)
        for matrix in matrices * n_passes:
            graph.add("mul_mat", matrix, token)
        rest.allocate()
        return _usual_s(graph, n_threads) / n_passes


def _row_s(kv_type: str, width: int, n_tokens: int) -> float:
    """Seconds of attention per head, token kept and new token, keys and values in cache."""
    n_passes = 16 if n_tokens == 1 else 1
    return _attended_s(kv_type, n_tokens, 1, width, KEPT, 1, n_passes, _best_s) / n_tokens


def _kept_s(n_heads: int, n_mib: int, n_tokens: int) -> float:
    """Seconds of attention per head, token kept and new token, in caches of this size in all, read again and again."""
    row_bytes = 2 * n_heads * _KINDS["F16"].row_bytes(KEPT_DIM)
    kept = n_mib * MIB // (row_bytes * KEPT_LAYERS)
    return _attended_s("f16", n_tokens, n_heads, KEPT_DIM, kept, KEPT_LAYERS, 1, _usual_s) / n_tokens


def _attended_s(
    kv_type: str, n_tokens: int, n_heads: int, width: int, kept: int, n_layers: int, n_passes: int, timer: Timer
) -> float:
    """Seconds of attention per head and token kept, one thread, in caches laid out as the engine's."""
    type_id = _IDS[kv_type.upper()]
    with Tensors((n_passes + 4) * n_layers + 8) as tensors:
        query = tensors.new(_IDS["F32"], width, n_tokens, n_heads)
        caches = [
            tuple(tensors.heads_of(tensors.new(type_id, width, n_heads, kept)) for _ in range(2))
            for _ in range(n_layers)
        ]
        mask = tensors.new(_IDS["F16"], kept, max(64, n_tokens))
        graph = Graph(tensors)
        for keys, values in caches * n_passes:
            graph.add("flash_attn_ext", query, keys, values, mask, width**-0.5, 0.0, 0.0)
        tensors.allocate()
        return timer(graph, 1) / (n_passes * n_layers * n_heads * kept)


def _cold_op_s(n_threads: int) -> float:
    """Seconds of an operation on a narrow row, as after a pass over weights: itself and its row out of cache."""
    clock = time.process_time if n_threads == 1 else time.perf_counter
    with Tensors(TINY_OPS + FLUSH_MIB + 8) as tensors, Tensors(FLUSH_MIB + 4) as others:
        first, other = (tensors.new(_IDS["F32"], TINY_ROW, 1) for _ in range(2))
        graph, flush = Graph(tensors), Graph(others)
        result = first
        for _ in range(TINY_OPS):
            result = graph.add("add", result, other)
        matrix, token = others.new(_IDS["F16"], ROW, FLUSH_MIB * MIB // (2 * ROW)), others.new(_IDS["F32"], ROW, 1)
        flush.add("mul_mat", matrix, token)
        tensors.allocate()
        others.allocate()
        cpu, runs = backend(n_threads), []
        for _ in range(PASSES):
            flush.compute(cpu)
            runs.append(_timed(graph, cpu, clock))
        return (statistics.median(runs) if n_threads == 1 else min(runs)) / TINY_OPS


if __name__ == "__main__":
    main()
