"""Owns: `python -m laya.bench.rates`: what this machine computes and reads in a second, by the engine's own kernels.

About ten seconds. One thread is timed by its CPU time, which other programs do not lengthen; all threads by the best
of several short runs. No model is needed. Layer: ggml's kernels; the last line printed is JSON, a `MachineRates`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec

from laya.bench.ggml import Graph, Tensors, backend, repack_buffer_type
from laya.memory import Machine
from laya.memory.engine_facts import built_in_engine
from laya.memory.ggml import GGML_TYPES
from laya.memory.rates import BATCHES, MachineRates
from laya.types import MIB

WEIGHT_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
ROW, ROWS = 1024, 256  # a matrix that stays in the cache of any core
READ_MIB = (1, 8, 32, 128, 384)  # what is read over and over
HEADS, HEAD_DIM, KEPT, BATCH = 8, 64, 1024, 128
REPEATS = 3
REPEATS_ALL = 9  # the best of more, since all threads must be undisturbed at once
TINY_OPS = 500
BUDGET_SHARE = 0.25  # of the free budget, for the largest set that is read
_IDS = {kind.name: kind.id for kind in GGML_TYPES.values()}


def main(argv: list[str] | None = None) -> None:
    """`laya bench rates`. Takes no options."""
    print(msgspec.json.encode(measure()).decode())


def measure() -> MachineRates:
    """Time the kernels now. Raises EngineFailed where this build of the engine cannot be timed."""
    machine = Machine()
    n_threads, load = machine.cores(), os.getloadavg()[0]
    n_mib = [size for size in READ_MIB if size * MIB < BUDGET_SHARE * machine.budget().bytes] or [READ_MIB[0]]
    one = _tiny_op_s(1, time.process_time)
    return MachineRates(
        hardware=hardware_key(machine),
        measured_at=time.time(),
        n_threads=n_threads,
        load=load,
        matrix_s={name: tuple(_weight_s(name, n_tokens) for n_tokens in BATCHES) for name in WEIGHT_TYPES},
        attention_s={name: (_position_s(name, 1), _position_s(name, BATCH)) for name in KV_TYPES},
        reads=tuple((size * MIB, _read_bytes_per_s(size, 1)) for size in n_mib),
        reads_all=tuple((size * MIB, _read_bytes_per_s(size, n_threads)) for size in n_mib),
        op_s=one,
        op_all_s=one if n_threads == 1 else _tiny_op_s(n_threads, time.perf_counter),
        speedup=_speedup(n_threads),
    )


def _best_s(graph: Graph, n_threads: int) -> float:
    """Seconds of one run, undisturbed."""
    clock = time.process_time if n_threads == 1 else time.perf_counter
    cpu = backend(n_threads)
    graph.compute(cpu)
    return min(_timed(graph, cpu, clock) for _ in range(REPEATS if n_threads == 1 else REPEATS_ALL))


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


def _speedup(n_threads: int) -> float:
    """How many times faster all threads are than one, at work that stays in their caches."""
    if n_threads == 1:
        return 1.0
    return min(float(n_threads), max(1.0, _weight_s("Q8_0", 8) / _weight_s("Q8_0", 8, n_threads)))


def _read_bytes_per_s(n_mib: int, n_threads: int) -> float:
    """Bytes a second when matrices of this size in all are read one after the other, again and again."""
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
        return n_mib * n_passes * MIB / _best_s(graph, n_threads)


def _position_s(kv_type: str, n_tokens: int) -> float:
    """Seconds of attention per head, token kept, element of width and new token."""
    type_id = _IDS[kv_type.upper()]
    with Tensors(40) as tensors:
        query = tensors.new(_IDS["F32"], HEAD_DIM, n_tokens, HEADS)
        keys, values = (tensors.new(type_id, HEAD_DIM, KEPT, HEADS) for _ in range(2))
        mask = tensors.new(_IDS["F16"], KEPT, max(64, n_tokens))
        graph = Graph(tensors)
        n_products = max(1, 8 // n_tokens)
        for _ in range(n_products):
            graph.add("flash_attn_ext", query, keys, values, mask, HEAD_DIM**-0.5, 0.0, 0.0)
        tensors.allocate()
        return _best_s(graph, 1) / (n_products * HEADS * KEPT * HEAD_DIM * n_tokens)


def _tiny_op_s(n_threads: int, clock: Callable[[], float]) -> float:
    with Tensors(TINY_OPS + 4) as tensors:
        first, other = (tensors.new(_IDS["F32"], 64, 1) for _ in range(2))
        graph = Graph(tensors)
        result = first
        for _ in range(TINY_OPS):
            result = graph.add("add", result, other)
        tensors.allocate()
        return _best_s(graph, n_threads) / TINY_OPS


def hardware_key(machine: Machine) -> str:
    """What the figures hold for: processor, cores, engine build."""
    from importlib.metadata import version

    return f"{machine.facts().cpu_model}, {machine.cores()} cores, xllamacpp {version('xllamacpp')}"


if __name__ == "__main__":
    main()
