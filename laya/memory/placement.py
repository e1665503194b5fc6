"""Owns: which device each layer, and each group of weights, lies on, by the rules of llama.cpp's loader.

The last layers and the output go to the GPUs, the embedding stays in host memory, and several GPUs take layers in
order, in proportion to their free memory. Knows no bytes of a term. Sources: docs/memory.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from laya.memory.weights import INPUT_LAYER, WeightGroup

CPU = "cpu"


def gpu_name(number: int) -> str:
    return f"gpu{number}"


@lru_cache(maxsize=256)
def layer_devices(n_layer: int, gpu_layers: int, shares: tuple[float, ...]) -> tuple[str, ...]:
    """The device of each layer and, last, of the output, which counts as one more layer.

    gpu_layers: how many of these n_layer + 1 go to the GPUs, from the end. shares: of each GPU, by number; its layers
    are exact, free memory will do.
    """
    whole = sum(shares)
    n_gpu = min(gpu_layers, n_layer + 1) if whole else 0
    ends = [end / whole for end in accumulate(shares)] if n_gpu else []
    last = len(shares) - 1
    on_gpus = [gpu_name(min(bisect_right(ends, place / n_gpu), last)) for place in range(n_gpu)]
    return (*[CPU] * (n_layer + 1 - n_gpu), *on_gpus)


def group_device(group: WeightGroup, devices: Sequence[str], experts_on_cpu: int) -> str:
    """Where these weights lie. experts_on_cpu: the first so many layers keep their experts in host memory."""
    if group.layer == INPUT_LAYER or (group.is_expert and group.layer < experts_on_cpu):
        return CPU
    return devices[min(group.layer, len(devices) - 1)]
