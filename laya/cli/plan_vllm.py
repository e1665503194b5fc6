"""Owns: `laya plan MODEL --vllm`: the plan in vLLM's terms, on the cards of this machine or those one asks about.

It says what `vllm serve` would take, before anybody downloads or starts anything; no vLLM need be here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from laya.cli.output import print_json
from laya.cli.plan_line import Alternative, Line
from laya.cli.plan_model import Asking
from laya.cli.plan_show import show_alternatives, show_choices, show_devices, show_verdict
from laya.cli.plan_speed import ON_GPU, PlanSpeed, show_speed, speed_fields
from laya.config import parse_engine_flags
from laya.config.vllm import Vllm
from laya.engines.vllm_build import find_build
from laya.errors import ConfigError
from laya.gateway.kind_vllm import check_checkpoint
from laya.memory import Budget, Machine, VllmSettings, plan_vllm
from laya.memory.gpu import GpuMemory, GpuMeter
from laya.memory.hf import HfFacts
from laya.memory.placement import CPU
from laya.memory.plan_source import facts_anywhere
from laya.memory.vllm_place import chosen_cards, usable_bytes
from laya.models import home_path, is_remote, open_remote, resolve
from laya.types import GIB, Plan

SOLD_GIB = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192, 288)  # cards as they are sold
SIDE_BY_SIDE = (1, 2, 4, 8)
ENOUGH = 3
_SIDES = ("tensor_parallel_size", "pipeline_parallel_size")


def is_vllm_here() -> bool:
    """Whether one is installed that would run a model, so that the plan is of that one."""
    try:
        find_build(None, home_path())
    except ConfigError:
        return False
    return True


def show_vllm_plan(name: str | None, line: Line, budget: Budget, *, as_json: bool) -> bool:
    """Print the plan of a model for vLLM. Returns whether it fits. Raises as `plan_vllm`, and for a GGUF model."""
    if name is None:
        raise ConfigError("--vllm is of one model: laya plan MODEL --vllm", param="vllm")
    asking = line.asking
    found = _found(name, asking)
    plan, settings = _planned(name, found, asking, budget)
    others = [] if plan.fits else _alternatives(name, found, line, plan, budget)
    speed = PlanSpeed(why_not=ON_GPU)
    if as_json:
        fields = {"engine": "vllm", "vllm": msgspec.to_builtins(settings), "limit": budget.limit}
        fields["speed"] = speed_fields(speed, plan)
        print_json(msgspec.to_builtins(plan) | fields | {"alternatives": msgspec.to_builtins(others)})
        return plan.fits
    console = Console(highlight=False)
    show_devices(console, plan, budget)
    show_choices(console, plan, asking.settings)
    show_speed(console, speed, plan)
    if others:
        show_alternatives(console, others)
    show_verdict(console, plan, found.weights.total_bytes)
    return plan.fits


def _planned(name: str, found: HfFacts, asking: Asking, budget: Budget) -> tuple[Plan, VllmSettings]:
    """The plan as this line asks for it, and what vLLM would be started with. Raises ConfigError."""
    asked, resolved = asking.of(name)
    cards = chosen_cards(_cards(asking), resolved.gpus)
    if resolved.vllm is not None and resolved.vllm.gpu_memory_utilization is not None:
        share = resolved.vllm.gpu_memory_utilization
        cards = [_limited(card, int(share * card.total_bytes)) for card in cards]
    check_checkpoint(resolved, found)
    settings = _settings(found, asking.settings, resolved.vllm or Vllm(), len(cards))
    plan = plan_vllm(found, asked, budget, cards, model_id=name, settings=settings, n_cores=Machine().cores())
    return plan, settings


def _found(name: str, asking: Asking) -> HfFacts:
    """The facts of the model of a name, path or address."""
    source = asking.config.for_model(name).source or name
    path = Path(source).expanduser()
    if is_remote(source):
        with open_remote(source) as remote:
            found = facts_anywhere(remote)
    elif path.suffix.lower() == ".json":
        found = facts_anywhere(path)
    else:
        found = facts_anywhere(resolve(source, models_dir=Path(asking.config.models_dir), home=home_path()).path)
    if not isinstance(found, HfFacts):
        raise ConfigError(
            f"'{name}' is a GGUF file; vLLM is planned for Hugging Face models: a folder, a config.json or "
            f"hf://org/repo:safetensors.",
            param="model",
        )
    return found


def _cards(asking: Asking) -> list[GpuMemory]:
    if asking.card_bytes:
        return _free_cards(asking.card_bytes)
    cards = GpuMeter().read()
    if not cards:
        raise ConfigError("vLLM runs on GPUs and none was found here: say which, as --gpu-memory 24GiB", param="vllm")
    limits = asking.config.memory.gpu
    return [_limited(card, limits[str(card.index)]) if str(card.index) in limits else card for card in cards]


def _limited(card: GpuMemory, limit: int) -> GpuMemory:
    """The card as if no more than this could be used of it."""
    reserve = card.free_bytes - usable_bytes(card)
    return msgspec.structs.replace(card, free_bytes=min(card.free_bytes, limit + reserve))


def _free_cards(sizes: Sequence[int]) -> list[GpuMemory]:
    return [
        GpuMemory(index=index, name="", total_bytes=size, free_bytes=size, own_bytes=0)
        for index, size in enumerate(sizes)
    ]


def _settings(found: HfFacts, flags: Mapping[str, Any], entry: Vllm, n_cards: int) -> VllmSettings:
    """vLLM's settings: what was given, and all cards side by side where the heads divide among them."""
    of_entry = {name: value for name, value in msgspec.structs.asdict(entry).items() if value != getattr(Vllm(), name)}
    said = of_entry | dict(flags)
    given = {name: said[name] for name in VllmSettings.__struct_fields__ if name in said}
    if "tensor_parallel_size" not in given:
        share = n_cards // int(given.get("pipeline_parallel_size", 1))
        heads = max(found.shape.n_head, default=0)
        given["tensor_parallel_size"] = share if share and heads and heads % share == 0 else 1
    return msgspec.convert(given, VllmSettings)


def _alternatives(name: str, found: HfFacts, line: Line, plan: Plan, budget: Budget) -> list[Alternative]:
    """Changed settings on these cards, then the smallest cards that hold what was asked for; each is planned as it is
    printed."""
    others = []
    for each in plan.suggestions:
        changed = parse_engine_flags(["--engine", "vllm", *each.flags.split()])
        tried = _tried(name, found, line.set(line.asking.settings | changed), budget, each.note)
        others += [tried] if tried is not None else []
    for count in SIDE_BY_SIDE:
        if len(others) > ENOUGH + 1:
            break
        sized = _smallest_cards(name, found, line, budget, count)
        others += [sized] if sized is not None else []
    return others


def _smallest_cards(name: str, found: HfFacts, line: Line, budget: Budget, count: int) -> Alternative | None:
    """With `count` cards side by side, of the smallest size that holds what was asked for."""
    if max(found.shape.n_head, default=0) % count:
        return None
    settings = {key: value for key, value in line.asking.settings.items() if key not in ("gpus", *_SIDES)}
    _, resolved = line.asking.of(name)
    if resolved.vllm is not None and any(getattr(resolved.vllm, side) > 1 for side in _SIDES):
        settings |= {"tensor_parallel_size": count, "pipeline_parallel_size": 1}
    for size in SOLD_GIB:
        asking = msgspec.structs.replace(line.asking, settings=settings, card_bytes=(size * GIB,) * count)
        other = msgspec.structs.replace(line, asking=asking, gpu_memory=",".join([f"{size}GiB"] * count))
        note = f"{count} {'card' if count == 1 else 'cards'} of {size} GiB"
        tried = _tried(name, found, other, budget, note)
        if tried is not None:
            return tried
    return None


def _tried(name: str, found: HfFacts, line: Line, budget: Budget, note: str) -> Alternative | None:
    """This line, where it fits; its bytes are those on the cards."""
    try:
        plan, _ = _planned(name, found, line.asking, budget)
    except ConfigError:  # the config fixes what no other cards can give
        return None
    if not plan.fits:
        return None
    settings = {key: value for key, value in line.asking.settings.items() if key != "engine"}
    words = line.set(settings).command(f"{shlex.quote(name)} --vllm")
    n_bytes = sum(device.total_bytes for device in plan.devices if device.device != CPU)
    return Alternative(command=words, total_bytes=n_bytes, note=note)
