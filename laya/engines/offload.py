"""Owns: how many layers llama.cpp put on GPUs, as its own log tells.

The count that it prints is what it was asked for, as soon as there is any GPU at all; so the buffers of weights that
it names must confirm it. Knows no plan and no engine that runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from laya.types import GpuLayers

VERBOSITY = 4  # llama.cpp's own level for these lines; prompts and answers begin at 5
_COUNT = re.compile(r"load_tensors: offloaded (\d+)/(\d+) layers to GPU")
_WEIGHTS = re.compile(r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB")
_RAM = re.compile(r"CPU|AMX|\w+_Host$")  # CPU, CPU_Mapped, CPU_REPACK, pinned memory of a GPU's driver


def has_told(lines: Iterable[str]) -> bool:
    """Whether the model's weights have their places by now."""
    return any(_WEIGHTS.search(line) for line in lines)


def gpu_layers(lines: Iterable[str], planned: int) -> GpuLayers:
    """What became of `planned` layers; lines: of this start. A draft model comes after the model, and is not looked at.

    A build without a GPU, or one that finds none, prints no count: then none is there.
    """
    loaded, total, is_begun, is_on_gpu = 0, None, False, False
    for line in lines:
        if (count := _COUNT.search(line)) is not None:
            if is_begun:
                break
            is_begun, loaded, total = True, int(count[1]), int(count[2])
        elif (weights := _WEIGHTS.search(line)) is not None:
            is_begun = True
            is_on_gpu |= _RAM.match(weights[1]) is None and float(weights[2]) > 0
    most = planned if total is None else min(planned, total)
    return GpuLayers(planned=most, loaded=loaded if is_on_gpu else 0, total=total)
