"""Owns: which models of a config are loaded at once within a budget, and what makes way for what.

As the gateway does it: a model is planned in what is free beside those that are loaded, smaller where its settings
leave that open; where it does not fit at all, idle models that are not pinned are unloaded. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Literal

import msgspec

from laya.types import Plan

MOST_MODELS = 12  # of which every set is looked at
PlanIn = Callable[[str, int], Plan]  # model and bytes -> its plan in so many


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to `loaded` when `asked` is asked for."""

    asked: str
    loaded: str
    outcome: Literal["beside", "smaller", "unloads", "refused"]
    max_num_seqs: int | None = None  # of the asked model, where it has to be smaller
    max_seq_len: int | None = None
    kv_cache_dtype: str | None = None


def coexisting(needs: Mapping[str, int], budget_bytes: int) -> list[tuple[str, ...]]:
    """The sets of models that fit together as each is planned alone, none of them part of a larger one; biggest first.

    Beyond MOST_MODELS only the smallest ones are combined.
    """
    names = sorted(needs, key=lambda name: needs[name])[:MOST_MODELS]
    found: list[tuple[str, ...]] = []
    for size in range(len(names), 0, -1):
        for chosen in combinations(names, size):
            if sum(needs[name] for name in chosen) > budget_bytes:
                continue
            if not any(set(chosen) <= set(larger) for larger in found):
                found.append(chosen)
    return found


def meetings(plans: Mapping[str, Plan], pinned: Sequence[str], budget_bytes: int, plan_in: PlanIn) -> list[Meeting]:
    """For each model that fits alone: what asking for it does to each other one that is loaded."""
    able = [name for name, plan in plans.items() if plan.fits]
    return [
        _meeting(asked, loaded, plans, loaded in pinned, budget_bytes, plan_in)
        for asked in able
        for loaded in able
        if asked != loaded
    ]


def _meeting(
    asked: str, loaded: str, plans: Mapping[str, Plan], is_pinned: bool, budget_bytes: int, plan_in: PlanIn
) -> Meeting:
    plan = plan_in(asked, max(0, budget_bytes - plans[loaded].need_bytes))
    if not plan.fits:
        return Meeting(asked=asked, loaded=loaded, outcome="refused" if is_pinned else "unloads")
    settings, alone = plan.settings, plans[asked].settings
    if settings == alone:
        return Meeting(asked=asked, loaded=loaded, outcome="beside")
    return Meeting(
        asked=asked,
        loaded=loaded,
        outcome="smaller",
        max_num_seqs=settings.max_num_seqs,
        max_seq_len=settings.max_seq_len,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
