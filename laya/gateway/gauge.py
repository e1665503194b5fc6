"""Owns: each device as the page's bar shows it: what there is, what others and our engines hold, what may be promised.

Only reads; the figures are of one moment. Knows no endpoint and no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from laya.memory import Budget, Ledger, Machine
from laya.memory.gpu import GpuMemory
from laya.memory.vllm_place import usable_bytes
from laya.types import ModelStatus


class DeviceGauge(msgspec.Struct, frozen=True, kw_only=True):
    """One device in bytes. `others_bytes + budget_bytes` is where the ceiling of all engines stands."""

    device: str  # as in plans: "cpu", "gpu0", ...
    name: str
    total_bytes: int  # of the machine, or of the group that bounds us
    available_bytes: int  # what can be had without swapping
    others_bytes: int  # what is taken and not by our engines
    measured_bytes: int  # what our engines were measured to hold, mapped weights included
    reserved_bytes: int
    budget_bytes: int
    limit: str


def ram(machine: Machine, budget: Budget, reserved_bytes: int, statuses: Iterable[ModelStatus]) -> DeviceGauge:
    """Main memory now. Mapped weights are in `measured_bytes`, though the kernel counts them as available."""
    memory, group = machine.memory(), machine.tightest_cgroup()
    total, available = memory.total_bytes, memory.available_bytes
    if group is not None and group.available_bytes < available:
        total, available = group.limit_bytes, group.available_bytes
    running = [status for status in statuses if status.pid is not None]
    own_anonymous = sum(status.anonymous_bytes for status in running)
    return DeviceGauge(
        device="cpu",
        name="RAM",
        total_bytes=total,
        available_bytes=available,
        others_bytes=max(0, total - available - own_anonymous),
        measured_bytes=sum(status.measured_bytes or 0 for status in running),
        reserved_bytes=reserved_bytes,
        budget_bytes=budget.bytes,
        limit=budget.limit,
    )


def cards(
    readings: Iterable[tuple[str, Mapping[str, int]]], ledger: Ledger, limits: Mapping[str, int]
) -> list[DeviceGauge]:
    """Each card as it was last read: number -> free, own and others' bytes. limits: memory.gpu of the config."""
    gauges = []
    for number, held in readings:
        card = GpuMemory(
            index=int(number),
            name=f"GPU {number}",
            total_bytes=sum(held.values()),
            free_bytes=held["free"],
            own_bytes=held["own"],
        )
        budget_bytes = usable_bytes(card) + card.own_bytes
        is_limited = limits.get(number, budget_bytes) < budget_bytes
        gauges.append(
            DeviceGauge(
                device=f"gpu{number}",
                name=card.name,
                total_bytes=card.total_bytes,
                available_bytes=card.free_bytes,
                others_bytes=card.others_bytes,
                measured_bytes=card.own_bytes,
                reserved_bytes=ledger.held(f"gpu{number}"),
                budget_bytes=limits[number] if is_limited else budget_bytes,
                limit=f"memory.gpu.{number}" if is_limited else "memory free on the card",
            )
        )
    return gauges
