"""Owns: `laya bench rates`: what this machine computes and reads in a second, by the engine's own kernels.

About twenty seconds. One thread is timed by its CPU time, which other programs hardly lengthen; all threads by the
best of several short runs; everything in rounds, so that a disturbance of a second spoils none of it. No model is
needed. Layer: ggml's kernels; the last line printed is JSON, a `MachineRates`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from laya.bench.ggml import Graph, Tensors, backend, repack_buffer_type
from laya.memory import Machine
from laya.memory.engine_facts import built_in_engine
from laya.memory.ggml import GGML_TYPES
from laya.memory.rates import BATCHES, MachineRates, hardware_key
from laya.types import MIB

WEIGHT_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
ROW, ROWS, STREAM_ROWS = 1024, 256, 1024  # a matrix that stays in the cache of any core
PROBE = "Q8_0"  # the type with which threads are compared
READ_MIB = (1, 8, 32, 128, 384)  # what is read over and over
HEADS, HEAD_DIM, KEPT, BATCH = 4, 64, 1024, 128
DEEP, DEEP_LAYERS = 4096, 8  # caches that come from memory: 32 MiB at f16
ROUNDS = 4  # the best of each is kept
ENOUGH_S = 20.0  # on a busy machine one round has to do
REPEATS = 1
WORTH_S, MOST_REPEATS = 0.01, 10  # short runs are repeated for so long: what disturbs comes in pieces
REPEATS_ALL = 4  # the best of more, since all threads must be undisturbed at once
STREAM_MIB = 64  # more than the core's own cache; what is left in a shared one is seen in `reads`
TINY_OPS = 200
DISTURBED_S = 0.3  # none takes so long by itself: threads wait for one that another program holds back
BARRIER_MOST_S = 5e-6  # what an operation by all threads takes at most, for the same reason
BUDGET_SHARE = 0.25  # of the free budget, for the largest set that is read
_KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
_IDS = {name: kind.id for name, kind in _KINDS.items()}


def main(argv: list[str] | None = None) -> None:
    """`laya bench rates`. Takes no options."""
    print(msgspec.json.encode(measure()).decode())


def measure() -> MachineRates:
    """Time the kernels now. Raises EngineFailed where this build of the engine cannot be timed."""
    machine = Machine()
    n_threads, load = machine.cores(), os.getloadavg()[0]
    sizes = [size for size in READ_MIB if size * MIB < BUDGET_SHARE * machine.budget().bytes] or [READ_MIB[0]]
    best = _best_of_rounds(sizes, n_threads)
    return MachineRates(
        hardware=hardware_key(machine),
        measured_at=time.time(),
        n_threads=n_threads,
        load=load,
        matrix_s={name: tuple(best["weight", name, n] for n in BATCHES) for name in WEIGHT_TYPES},
        streamed_s={name: max(best["stream", name], best["weight", name, 1]) for name in WEIGHT_TYPES},
        attention_s={name: (best["position", name, 1], best["position", name, BATCH]) for name in KV_TYPES},
        deep_s={name: max(best["deep", name], best["position", name, 1]) for name in KV_TYPES},
        reads=_reads(best, sizes, 1),
        reads_all=_reads(best, sizes, n_threads),
        op_s=best["op", 1],
        op_all_s=min(best["op", n_threads], best["op", 1] + BARRIER_MOST_S),
        speedup=min(float(n_threads), max(1.0, best["weight", PROBE, 8] / best["all", n_threads])),
    )


def _best_of_rounds(sizes: list[int], n_threads: int) -> dict[tuple[Any, ...], float]:
    """What is timed -> the least seconds it took in any round."""
    jobs: dict[tuple[Any, ...], Callable[[], float]] = {}
    jobs |= {("weight", name, n): partial(_weight_s, name, n) for name in WEIGHT_TYPES for n in BATCHES}
    jobs |= {("stream", name): partial(_streamed_s, name, sizes[-1]) for name in WEIGHT_TYPES}
    jobs |= {("position", name, n): partial(_position_s, name, n) for name in KV_TYPES for n in (1, BATCH)}
    jobs |= {("deep", name): partial(_position_s, name, 1, DEEP, DEEP_LAYERS) for name in KV_TYPES}
    jobs |= {("read", size, n): partial(_read_s, size, n) for size in sizes for n in (1, n_threads)}
    jobs |= {("op", n): partial(_tiny_op_s, n) for n in (1, n_threads)}
    jobs["all", n_threads] = partial(_weight_s, PROBE, 8, n_threads)
    best: dict[tuple[Any, ...], float] = {}
    start_s = time.monotonic()
    for _ in range(ROUNDS):
        for key, job in jobs.items():
            if key not in best or time.monotonic() - start_s < ENOUGH_S:
                best[key] = min(job(), best.get(key, math.inf))
    return best


def _reads(best: dict[tuple[Any, ...], float], sizes: list[int], n_threads: int) -> tuple[tuple[int, float], ...]:
    """Bytes read over and over -> bytes a second; what is smaller is never slower, whatever disturbed it."""
    speeds = [size * MIB / best["read", size, n_threads] for size in sizes]
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


def _streamed_s(type_name: str, most_mib: int) -> float:
    """Seconds per weight of a product with one token, when the matrices come from memory."""
    is_repacked = type_name in built_in_engine().repack_types and repack_buffer_type() is not None
    kind = _KINDS[type_name]
    n_matrices = max(2, min(STREAM_MIB, most_mib) * MIB // (STREAM_ROWS * kind.row_bytes(ROW)))
    with Tensors(n_matrices + 1, is_repacked=is_repacked) as weights, Tensors(n_matrices + 4) as rest:
        matrices = [weights.new(kind.id, ROW, STREAM_ROWS) for _ in range(n_matrices)]
        weights.allocate(matrices)
        token = rest.new(_IDS["F32"], ROW, 1)
        graph = Graph(rest)
        for matrix in matrices:
            graph.add("mul_mat", matrix, token)
        rest.allocate()
        return _best_s(graph, 1) / (n_matrices * STREAM_ROWS * ROW)


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
        return _best_s(graph, n_threads) / n_passes


def _position_s(kv_type: str, n_tokens: int, kept: int = KEPT, n_layers: int = 1) -> float:
    """Seconds of attention per head, token kept, element of width and new token, in caches laid out as the engine's."""
    type_id = _IDS[kv_type.upper()]
    n_products = n_layers if n_layers > 1 else max(1, 8 // n_tokens)
    with Tensors(6 * n_products + 4) as tensors:
        query = tensors.new(_IDS["F32"], HEAD_DIM, n_tokens, HEADS)
        caches = [tensors.heads_of(tensors.new(type_id, HEAD_DIM, HEADS, kept)) for _ in range(2 * n_layers)]
        mask = tensors.new(_IDS["F16"], kept, max(64, n_tokens))
        graph = Graph(tensors)
        for product in range(n_products):
            keys, values = caches[2 * (product % n_layers) : 2 * (product % n_layers) + 2]
            graph.add("flash_attn_ext", query, keys, values, mask, HEAD_DIM**-0.5, 0.0, 0.0)
        tensors.allocate()
        return _best_s(graph, 1) / (n_products * HEADS * kept * HEAD_DIM * n_tokens)


def _tiny_op_s(n_threads: int) -> float:
    with Tensors(TINY_OPS + 4) as tensors:
        first, other = (tensors.new(_IDS["F32"], 64, 1) for _ in range(2))
        graph = Graph(tensors)
        result = first
        for _ in range(TINY_OPS):
            result = graph.add("add", result, other)
        tensors.allocate()
        return _best_s(graph, n_threads) / TINY_OPS


if __name__ == "__main__":
    main()
