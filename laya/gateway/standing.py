"""Owns: how a model stands, out of how its engines stand: one state, one sum of bytes, and what each engine does.

Pure; knows no endpoint. A model with one engine stands as that engine does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.types import ALL_LAYERS, DevicePlan, GpuLayers, ModelState, ModelStatus, Plan

_BEST_FIRST: tuple[ModelState, ...] = ("ready", "degraded", "loading", "draining", "failed", "unloaded")


def standing(model_id: str, engines: list[ModelStatus]) -> ModelStatus:
    """The model's own status; of several engines, `extra["replicas"]` tells each.

    `degraded`: it is served, and an engine of it has failed, is stuck, or has layers on the CPU that a GPU was to have.
    One that is merely not loaded leaves it ready, with the reason in `error`.
    """
    if len(engines) == 1:
        return msgspec.structs.replace(engines[0], id=model_id)
    best = min(engines, key=lambda engine: _BEST_FIRST.index(engine.state))
    serves = best.state in ("ready", "degraded")
    is_hurt = serves and any(engine.state in ("failed", "degraded") for engine in engines)
    measured = [engine.measured_bytes for engine in engines if engine.measured_bytes is not None and engine.plan]
    return ModelStatus(
        id=model_id,
        state="degraded" if is_hurt else best.state,
        task=best.task,
        since_s=best.since_s,
        plan=_together([engine.plan for engine in engines if engine.plan is not None]),
        measured_bytes=sum(measured) if measured else best.measured_bytes,
        anonymous_bytes=sum(engine.anonymous_bytes for engine in engines),
        pid=best.pid,
        node=best.node,
        error=next((f"{engine.id}: {engine.error}" for engine in engines if engine.error), None),
        restarts=sum(engine.restarts for engine in engines),
        gpu_layers=min((engine.gpu_layers for engine in engines if engine.gpu_layers), key=_spare, default=None),
        extra=best.extra | {"replicas": [_told(engine) for engine in engines]},
    )


def fallen_words(layers: GpuLayers) -> str:
    """What is wrong with an engine whose layers are not where they were planned."""
    if layers.why_none is not None:
        why = layers.why_none
        return f"No layer is on a GPU, though the engine is built for one: {why}. The CPU computes everything."
    if not layers.loaded:
        n_planned = f"{layers.planned} " if layers.planned < ALL_LAYERS else ""
        return (
            f"None of the {n_planned}layers planned for a GPU is on one: the CPU computes everything. "
            "`laya doctor` tells what is wrong with the GPU or the engine's build."
        )
    return f"{layers.loaded} of the {layers.planned} layers planned for a GPU are on one, the CPU has the rest."


def _spare(layers: GpuLayers) -> int:
    return layers.loaded - layers.planned


def _told(engine: ModelStatus) -> dict[str, Any]:
    return {
        "name": engine.id,
        "state": engine.state,
        "since_s": engine.since_s,
        "pid": engine.pid,
        "node": engine.node,
        "planned_bytes": engine.plan.need_bytes if engine.plan is not None else 0,
        "measured_bytes": engine.measured_bytes,
        "error": engine.error,
        "restarts": engine.restarts,
        "gpu_layers": msgspec.to_builtins(engine.gpu_layers),
    }


def _together(plans: list[Plan]) -> Plan | None:
    """One plan with the bytes of all; what is chosen is the first one's."""
    if len(plans) < 2:
        return plans[0] if plans else None
    devices = [_device([device for plan in plans for device in plan.devices if device.device == first.device])
               for first in plans[0].devices]  # fmt: skip
    return msgspec.structs.replace(plans[0], devices=devices)


def _device(parts: list[DevicePlan]) -> DevicePlan:
    terms: dict[str, int] = {}
    for part in parts:
        for name, n_bytes in part.terms.items():
            terms[name] = terms.get(name, 0) + n_bytes
    total_bytes = sum(part.total_bytes for part in parts)
    return msgspec.structs.replace(
        parts[0], budget_bytes=max(part.budget_bytes for part in parts), terms=terms, total_bytes=total_bytes
    )
