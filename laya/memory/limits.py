"""Owns: whether a priced plan stays within what each device may hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from laya.memory.machine import Budget
from laya.memory.placement import CPU, gpu_name
from laya.memory.planner import Choice, Model, decide, price
from laya.types import AskedSettings

MEMORY_LIMIT = "memory_limit"  # how a plan's limit is called where the model's own binds
Limits = Mapping[str, int]  # device -> bytes
Priced = Mapping[str, Mapping[str, int]]  # device -> term -> bytes


def limits_of(model: Model, asked: AskedSettings, budget: Budget) -> Limits:
    """What may be planned with on each device: the budget, lowered by the model's own limit, and each GPU's share."""
    return {CPU: model_budget(asked, budget).bytes} | {
        gpu_name(number): n_bytes for number, n_bytes in enumerate(model.gpu_free_bytes)
    }


def model_budget(asked: AskedSettings, budget: Budget) -> Budget:
    """What this one model may use of RAM and what bounds it: the model's own limit where that is the lower one."""
    limit = asked.memory_limit_bytes
    if limit is None or limit >= budget.bytes:
        return budget
    memory_bytes = min(budget.memory_bytes, limit)
    return msgspec.structs.replace(budget, bytes=limit, limit=MEMORY_LIMIT, memory_bytes=memory_bytes, is_users=True)


def totals(priced: Priced) -> dict[str, int]:
    """Device -> bytes."""
    return {device: sum(terms.values()) for device, terms in priced.items()}


def tightest(priced: Priced, limits: Limits) -> tuple[str, int, int]:
    """The device that is nearest to its limit or furthest above it: its name, what it needs, its limit."""
    used = totals(priced)
    device = max(used, key=lambda name: used[name] - limits.get(name, 0))
    return device, used[device], limits.get(device, 0)


def is_within(priced: Priced, limits: Limits) -> bool:
    _, need, limit = tightest(priced, limits)
    return need <= limit


def does_fit(model: Model, asked: AskedSettings, choice: Choice, budget: Budget) -> bool:
    """Whether every device holds its part of this choice."""
    return is_within(price(model, decide(model, asked, choice)), limits_of(model, asked, budget))
