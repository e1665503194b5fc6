"""Owns: the table of memory terms: one row each, with its formula in words and the function that computes it.

A term reads one `Load` (a model, decided settings, an engine) and nothing else, so a plan is this table summed. A new
device, architecture or cost is a row or a branch here. Knows no machine and no budget. Sources: docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from laya.memory import graph
from laya.memory.buffers import compute, grammar, model_overhead, output, overhead
from laya.memory.caches import draft_layers_kv, kv_by_layer, sequence_bytes, state_by_layer
from laya.memory.load import Load
from laya.memory.placement import CPU, group_device
from laya.memory.weights import INPUT_LAYER

DRAFT_KV_TYPE = "f16"  # llama.cpp keeps a draft model's cache at f16
GPU_PROCESS_BYTES = 460 << 20  # context and libraries of a process on one GPU: 150-460 MiB are reported
# In RAM: the driver's and the libraries' own, a bound from sightings of 0.3-0.5 GiB and not measured here.
HOST_PROCESS_BYTES, HOST_GPU_BYTES = 384 << 20, 128 << 20
ByDevice = Mapping[str, int]


class Term(NamedTuple):
    """A row of the table."""

    name: str
    device: str  # "cpu", "gpu" (each), or "by layer": where the layer lies
    formula: str
    bytes_of: Callable[[Load], ByDevice]


def on_cpu(bytes_of: Callable[[Load], int]) -> Callable[[Load], ByDevice]:
    return lambda load: {CPU: bytes_of(load)}


def by_layer(bytes_of: Callable[[Load], Iterable[int]]) -> Callable[[Load], ByDevice]:
    return lambda load: _summed(zip(load.layer_devices, bytes_of(load), strict=False))


def _summed(parts: Iterable[tuple[str, int]]) -> ByDevice:
    total: dict[str, int] = {}
    for device, n_bytes in parts:
        total[device] = total.get(device, 0) + n_bytes
    return total


def weights(load: Load) -> ByDevice:
    facts, devices = load.facts, load.layer_devices
    if not load.gpus:
        return {CPU: facts.weights_bytes}
    groups = [(group_device(group, devices, load.settings.experts_on_cpu), group.n_bytes) for group in facts.groups]
    if facts.tied_output is not None and devices[-1] != CPU:
        groups.append((devices[-1], facts.tied_output[1]))  # looked up in host memory, multiplied on the GPU
    return _summed(groups)


def repack(load: Load) -> int:
    facts, types = load.facts, load.engine.repack_types
    if load.gpus:
        return 0  # beside a GPU, what stays in host memory is kept in the GPU's own host buffers
    if load.settings.mmap:
        return sum(n_bytes for name, n_bytes in facts.matrix_bytes.items() if name in types or name.startswith("type "))
    # Read into memory, a repacked matrix exists once; only an embedding that is the output too exists twice.
    return facts.tied_output[1] if facts.tied_output and facts.tied_output[0] in types else 0


def graph_buffers(load: Load) -> ByDevice:
    """The graph on each device that has layers; a batch takes weights that stay in host memory to the GPU with it."""
    if not load.gpus:
        return {CPU: compute(load)}
    devices, kept = load.layer_devices, load.settings.experts_on_cpu
    layers = [group for group in load.facts.groups if group.layer != INPUT_LAYER]
    on_host = [group.largest_bytes for group in layers if group_device(group, devices, kept) == CPU]
    on_gpu = graph.gpu_compute(load) + max(on_host, default=0)
    host = max(graph.host_compute(load), compute(load) if on_host else 0)
    return {CPU: host, **dict.fromkeys(load.gpus, on_gpu)}


def checkpoints(load: Load) -> int:
    """Copies of the windows and states of a sequence, from which an earlier point of it is resumed."""
    kept = zip(load.facts.shape.layers, kv_by_layer(load), state_by_layer(load), strict=True)
    each = sum((cache if layer.window else 0) + held for layer, cache, held in kept)
    return load.n_checkpoints * each


def prompt_cache(load: Load) -> int:
    """What was asked; and one sequence more where the engine looks at its limit after it saved one."""
    if not load.prompt_cache_bytes or load.engine.makes_room_first:
        return load.prompt_cache_bytes
    return load.prompt_cache_bytes + sequence_bytes(load)


def draft(load: Load) -> ByDevice:
    """The draft model, or the layers of the model itself that predict further tokens."""
    if load.mtp:
        return by_layer(lambda _: [0] * load.facts.shape.n_layer + [draft_layers_kv(load, DRAFT_KV_TYPE)])(load)
    if load.draft is None:
        return {}
    settings = msgspec.structs.replace(
        load.settings,
        kv_cache_dtype=DRAFT_KV_TYPE,
        task="chat",
        gpu_layers=load.settings.draft_gpu_layers,
        experts_on_cpu=0,
    )
    own = msgspec.structs.replace(load, facts=load.draft, settings=settings, draft=None, projector_bytes=0)
    vocabulary = own.engine.token_bytes * own.facts.n_tokens + own.engine.merge_bytes * own.facts.n_merges
    parts = [part for term in _DRAFTED for part in term(own).items()]
    return _summed([*parts, (CPU, model_overhead(own) + vocabulary)])


def projector(load: Load) -> ByDevice:
    first = load.gpus[0] if load.gpus else CPU
    return {first: round(load.engine.projector_factor * load.projector_bytes)}


def gpu_process(load: Load) -> ByDevice:
    if not load.gpus:
        return {}
    host = HOST_PROCESS_BYTES + HOST_GPU_BYTES * len(load.gpus)
    return {CPU: host, **dict.fromkeys(load.gpus, GPU_PROCESS_BYTES)}


_DRAFTED: tuple[Callable[[Load], ByDevice], ...] = (
    weights,
    on_cpu(repack),
    by_layer(kv_by_layer),
    by_layer(state_by_layer),
    graph_buffers,
    on_cpu(output),
)

TERMS = (
    Term("weights", "by layer", "bytes of the tensors in the file; mapped pages are resident once used", weights),
    Term("repack", CPU, "a second copy of the matrices whose type the engine lays out anew", on_cpu(repack)),
    Term("kv_cache", "by layer", "over layers: tokens kept x (K row + V row + indexer row)", by_layer(kv_by_layer)),
    Term("state", "by layer", "over layers, f32: sequences x (convolution + state)", by_layer(state_by_layer)),
    Term("compute", "by layer", "4 x n_ubatch x widest point of the graph + 2 x n_ubatch x context", graph_buffers),
    Term("output", CPU, "logits of the rows computed at once, and the sampler's candidates", on_cpu(output)),
    Term("grammar", CPU, "tables for answers held to a schema or grammar, made at the first one", on_cpu(grammar)),
    Term("overhead", CPU, "process, vocabulary, graph, cells, sequences, threads", on_cpu(overhead)),
    Term("gpu_process", "gpu", "context and libraries of the process on each GPU, and in RAM for them", gpu_process),
    Term("prompt_cache", CPU, "copies of conversations that wait, as much as was asked", on_cpu(prompt_cache)),
    Term("checkpoints", CPU, "checkpoints x (windows + states) of all sequences", on_cpu(checkpoints)),
    Term("draft", "by layer", "the draft model: all of the above but the process", draft),
    Term("projector", "by layer", "1.4 x the projector's file, on the first GPU", projector),
)


def terms_by_device(load: Load) -> dict[str, dict[str, int]]:
    """Device -> term -> bytes, the CPU first; terms that are nothing are left out."""
    devices: dict[str, dict[str, int]] = {device: {} for device in (CPU, *load.gpus)}
    for term in TERMS:
        for device, n_bytes in term.bytes_of(load).items():
            if n_bytes:
                devices[device][term.name] = n_bytes
    return devices
