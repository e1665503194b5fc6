"""Owns: the GPUs of this machine as commands plan with them: what a server that starts now could use."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from laya.config import Config
from laya.engines.builds import packages_for
from laya.engines.gpu_build import why_no_gpu
from laya.gateway.cards import usable_bytes, why_hidden
from laya.memory import Budget, GpuMeter
from laya.models import home_path


@lru_cache(maxsize=1)
def _meter() -> GpuMeter:
    return GpuMeter()


def gpus_here(config: Config, engine_path: Path | None) -> tuple[tuple[int, ...], str]:
    """What an engine may use of each card, by its number, and why it may use none."""
    cards = _meter().read()
    packages = packages_for(engine_path, home_path())
    why_not = why_no_gpu(engine_path, packages, len(cards)) if cards else _meter().why_none
    if why_not is not None:
        return (), why_not
    free = {card.index: usable_bytes(card, 0, config.memory.gpu) for card in cards}
    why_no = why_hidden({card.index: card.uuid for card in cards}) or _meter().why_none
    return tuple(free.get(number, 0) for number in range(max(free) + 1)), why_no


def with_gpus(budget: Budget, config: Config, engine_path: Path | None) -> Budget:
    """The budget with them."""
    gpu_bytes, why_no = gpus_here(config, engine_path)
    return msgspec.structs.replace(budget, gpu_bytes=gpu_bytes, why_no_gpu=why_no)
