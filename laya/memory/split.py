"""Owns: the search for where a model's layers and experts lie: on how many GPUs, how many on each, which stay in RAM.

As few GPUs as hold all layers, since each one more costs buffers of its own; several are filled by the same share of
their memory. What does not fit stays in RAM: experts of the first layers before whole layers, for a token uses few of
them. What the user fixed is kept, whether it fits or not. Knows no RAM limit; formulas are in terms.py. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from laya.errors import ConfigError
from laya.memory.caches import kv_by_layer, state_by_layer
from laya.memory.load import Load
from laya.memory.placement import CPU, gpu_name, group_device, layer_devices
from laya.memory.terms import terms_by_device
from laya.types import ALL_LAYERS, AskedSettings, PlannedSettings

HALVINGS = 24  # of the share that GPUs are filled by


def with_split(load: Load, asked: AskedSettings, *, offloads: bool) -> PlannedSettings:
    """The load's settings with every layer placed.

    offloads: what the user left open may stay in RAM, as little as makes the GPUs hold the rest; else all lies on GPUs.
    """
    n_layer, every = load.facts.shape.n_layer, load.facts.shape.n_layer + 1
    kept = min(asked.experts_on_cpu or 0, n_layer)
    if not any(load.gpu_free_bytes):
        return msgspec.structs.replace(load.settings, tensor_split=(0,) * len(load.gpu_free_bytes))
    wanted = every if asked.gpu_layers is None else min(asked.gpu_layers, every)
    placed = _placed(load, asked, wanted, kept)
    if not offloads or is_on_gpus(load, placed):
        return placed
    if load.facts.shape.n_expert and asked.experts_on_cpu is None:
        counts = range(1, n_layer + 1)
        kept = bisect_left(counts, True, key=lambda n: is_on_gpus(load, _placed(load, asked, wanted, n))) + 1
        placed = msgspec.structs.replace(_placed(load, asked, wanted, min(kept, n_layer)), spills=True)
        if kept <= n_layer:
            return placed
    if asked.gpu_layers is not None:
        return placed
    fewer = range(every - 1, -1, -1)
    kept = placed.experts_on_cpu
    at = bisect_left(fewer, True, key=lambda n: is_on_gpus(load, _placed(load, asked, n, kept)))
    return msgspec.structs.replace(_placed(load, asked, fewer[min(at, len(fewer) - 1)], kept), spills=True)


def is_on_gpus(load: Load, settings: PlannedSettings) -> bool:
    """Whether each GPU holds its part."""
    priced = terms_by_device(msgspec.structs.replace(load, settings=settings))
    return all(sum(priced[name].values()) <= load.gpu_free_bytes[number] for number, name in _named(settings))


def _named(settings: PlannedSettings) -> list[tuple[int, str]]:
    return [(number, gpu_name(number)) for number in settings.gpus]


def _placed(load: Load, asked: AskedSettings, n_layers: int, kept: int) -> PlannedSettings:
    """So many layers on GPUs, the first `kept` of all without their experts."""
    free = load.gpu_free_bytes
    if not n_layers:
        return _with_counts(load, [0] * len(free), 0, 0)
    if asked.tensor_split:
        numbers = asked.gpus or range(len(asked.tensor_split))
        shares = [0.0] * len(free)
        for number, share in zip(numbers, asked.tensor_split, strict=True):
            shares[number] = share
        devices = layer_devices(load.facts.shape.n_layer, n_layers, tuple(shares))
        return _with_counts(load, [devices.count(gpu_name(number)) for number in range(len(free))], n_layers, kept)
    if asked.gpus:
        return _balanced(load, sorted(asked.gpus), n_layers, kept, least=1)
    roomiest = sorted((number for number, n_bytes in enumerate(free) if n_bytes), key=lambda number: -free[number])
    single = _with_counts(load, _by_number(load, roomiest[:1], [n_layers]), n_layers, kept)
    least_bytes = sum(_layer_bytes(msgspec.structs.replace(load, settings=single))[-n_layers:])
    enough = [n_gpus for n_gpus in range(1, len(roomiest)) if sum(free[at] for at in roomiest[:n_gpus]) > least_bytes]
    tried = (_balanced(load, sorted(roomiest[:n_gpus]), n_layers, kept) for n_gpus in enough)
    fitting = next((settings for settings in tried if is_on_gpus(load, settings)), None)
    return fitting or _balanced(load, sorted(roomiest), n_layers, kept)


def _with_counts(load: Load, counts: Sequence[int], n_layers: int, kept: int) -> PlannedSettings:
    drafted = load.draft.shape.n_layer + 1 if load.draft is not None and n_layers else 0
    shape = load.facts.shape
    return msgspec.structs.replace(
        load.settings,
        gpu_layers=n_layers,
        tensor_split=tuple(counts),
        experts_on_cpu=kept,
        draft_gpu_layers=drafted,
        mtp_layers=shape.n_layer_nextn if n_layers > shape.n_layer else 0,
    )


def _balanced(load: Load, numbers: Sequence[int], n_layers: int, kept: int, least: int = 0) -> PlannedSettings:
    """The layers in order over these GPUs, each filled by about the same share of what may be used of it.

    least: layers of each, where there are as many.
    """
    free = [load.gpu_free_bytes[number] for number in numbers]
    if len(numbers) == 1 or not sum(free):
        return _with_counts(load, _by_number(load, numbers[:1], [n_layers]), n_layers, kept)
    devices = layer_devices(n_layers - 1, n_layers, tuple(free))
    first = [devices.count(gpu_name(at)) for at in range(len(free))]
    guess = _with_counts(load, _by_number(load, numbers, first), n_layers, kept)
    sizes = _layer_bytes(msgspec.structs.replace(load, settings=guess))[-n_layers:]
    priced = terms_by_device(msgspec.structs.replace(load, settings=guess))
    fixed, start = [], 0
    for number, count in zip(numbers, first, strict=True):
        total = sum(priced.get(gpu_name(number), {}).values())
        fixed.append(max(0, total - sum(sizes[start : start + count])))
        start += count
    fixed = [n_bytes or max(fixed) for n_bytes in fixed]  # of one that the guess left empty
    return _with_counts(load, _by_number(load, numbers, _filled(sizes, free, fixed, least)), n_layers, kept)


def _by_number(load: Load, numbers: Sequence[int], counts: Sequence[int]) -> list[int]:
    by_number = [0] * len(load.gpu_free_bytes)
    for number, count in zip(numbers, counts, strict=True):
        by_number[number] = count
    return by_number


def _layer_bytes(load: Load) -> list[int]:
    """What each layer and, last, the output takes of the GPU it lies on."""
    facts, devices = load.facts, load.layer_devices
    sizes = [0] * len(devices)
    for group in facts.groups:
        if group_device(group, devices, load.settings.experts_on_cpu) != CPU:
            sizes[min(group.layer, len(sizes) - 1)] += group.n_bytes
    if facts.tied_output is not None:
        sizes[-1] += facts.tied_output[1]
    for at, (cache, state) in enumerate(zip(kv_by_layer(load), state_by_layer(load), strict=True)):
        sizes[at] += cache + state
    return sizes


def _filled(sizes: Sequence[int], free: Sequence[int], fixed: Sequence[int], least: int) -> list[int]:
    """Layers for each GPU: the least share of all of them that holds every layer, filled in order."""
    low, high = 0.0, 1.0
    least = least if least * len(free) <= len(sizes) else 0
    while _poured(sizes, free, fixed, least, high) is None:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _poured(sizes, free, fixed, least, middle) else (middle, high)
    counts = _poured(sizes, free, fixed, least, high)
    assert counts is not None, "the share that held all layers holds them"
    return counts


def _poured(
    sizes: Sequence[int], free: Sequence[int], fixed: Sequence[int], least: int, share: float
) -> list[int] | None:
    counts: list[int] = []
    at = 0
    for n_bytes, taken in zip(free, fixed, strict=True):
        left, start = share * n_bytes - taken, at
        end = len(sizes) - least * (len(free) - len(counts) - 1)
        while at < end and sizes[at] <= left:
            left -= sizes[at]
            at += 1
        counts.append(at - start)
        if counts[-1] < least:
            return None
    return counts if at == len(sizes) else None


def check_split(asked: AskedSettings, gpu_free_bytes: Sequence[int], why_none: str) -> None:
    """Raise ConfigError for GPUs that are not there or can't be used, naming those that are."""
    usable = [number for number, n_bytes in enumerate(gpu_free_bytes) if n_bytes]
    if asked.gpu_layers and not usable:
        said = "all" if asked.gpu_layers == ALL_LAYERS else asked.gpu_layers
        raise ConfigError(
            f"gpu_layers is {said}, and no layer can lie on a GPU: {why_none}. Leave it out, and the CPU computes.",
            param="gpu_layers",
        )
    numbers = asked.gpus or tuple(range(len(asked.tensor_split)))
    for number in numbers:
        if number not in usable:
            key = "gpus" if asked.gpus else "tensor_split"
            there = f"there {'is' if len(usable) == 1 else 'are'} {', '.join(map(str, usable))}" if usable else why_none
            raise ConfigError(f"{key} names GPU {number}, which can't be used: {there}.", param=key)
    if asked.tensor_split and len(asked.tensor_split) != len(numbers):
        raise ConfigError(
            f"tensor_split has {len(asked.tensor_split)} shares for {len(numbers)} GPUs; give each of gpus one.",
            param="tensor_split",
        )
