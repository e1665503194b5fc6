"""Owns: what a load would do, without doing it: the plan, who would leave for it, and what it could be varied by.

Planned as the load itself would be, and for the catalogue's models that are not here as `laya list` does. Reserves,
starts and stops nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from laya.config import ResolvedModel
from laya.errors import ModelNotFound, NotSupported
from laya.gateway.catalogued import model_shape, plan_entry
from laya.gateway.kind_llamacpp import budget_for
from laya.gateway.rates import kept_rates
from laya.gateway.tuning import is_tunable, together, tuned, tuned_entry
from laya.memory import Budget, ModelFacts, read_facts, size_text
from laya.memory.caches import head_widths
from laya.memory.facts import facts_before_download
from laya.memory.ggml import KV_CACHE_TYPES
from laya.models import CatalogueEntry, entries
from laya.types import Plan, Suggestion

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

SEQS = (1, 2, 3, 4, 6, 8, 12, 16)
SHORTEST_TOKENS = 256
KV_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # the better answers first
Planner = Callable[[Budget], Awaitable[Plan]]


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a person may try, each list in order; none where the engine decides for itself."""

    max_seq_len: list[int] = []
    max_num_seqs: list[int] = []
    kv_cache_dtype: list[str] = []


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a load would do now."""

    model: str
    verdict: str  # one sentence
    fits: bool  # now, or when `leaving` have left
    is_here: bool  # its file is on this disk
    leaving: list[str]  # models that are idle and would be unloaded for it
    waits_for: list[str]  # models that are at work and hold what it needs
    over_bytes: int  # what is missing on the device that lacks most
    plan: Plan
    suggestions: list[Suggestion]  # changes that do fit; `flags` are whole, for another trial or a load
    steps: Steps
    flags: str


async def try_load(fleet: Fleet, name: str, flags: str = "") -> Trial:
    """Raises ModelNotFound, NotSupported for what no engine here runs, and what is wrong with its file or the flags."""
    try:
        endpoint = fleet.find(name)
    except ModelNotFound:
        entry = next((each for each in entries() if name.casefold() in each.names), None)
        if entry is None:
            raise
        return await _try_entry(fleet, entry, flags)
    if endpoint.is_remote or fleet.placing.is_for(endpoint.settings):
        raise NotSupported(f"'{endpoint.model_id}' takes no memory of this machine.", param="model")
    file = fleet.files[endpoint.model_id]
    settings = tuned(fleet, endpoint, flags) if flags else endpoint.settings

    async def plan_in(budget: Budget) -> Plan:
        return await fleet.loading.plan(endpoint, file, budget, settings)

    facts = await asyncio.to_thread(read_facts, file.path) if endpoint.is_llamacpp and file.format == "gguf" else None
    return await _tried(fleet, plan_in, settings, endpoint, facts=facts, flags=flags)


async def _try_entry(fleet: Fleet, entry: CatalogueEntry, flags: str) -> Trial:
    settings = tuned_entry(fleet, entry.id, flags)
    asked = settings.asked()
    if "task" not in settings.fixed:
        asked = msgspec.structs.replace(asked, task=entry.task)
    rates = kept_rates(fleet.loading.corrections.path)

    async def plan_in(budget: Budget) -> Plan:
        return await asyncio.to_thread(plan_entry, entry, asked, budget_for(settings, budget), rates)

    facts = facts_before_download(model_shape(entry.shape), entry.file_bytes, entry.weights_type)
    return await _tried(fleet, plan_in, settings, None, facts=facts, flags=flags)


async def _tried(
    fleet: Fleet,
    plan_in: Planner,
    settings: ResolvedModel,
    endpoint: Endpoint | None,
    *,
    facts: ModelFacts | None,
    flags: str,
) -> Trial:
    loading, own = fleet.loading, list(fleet.replicas(endpoint)) if endpoint is not None else []
    free = loading.free_budget()
    leaving: list[Endpoint] = []
    plan = await plan_in(loading.with_room_of(free, own))
    idle = fleet.leaving_order(endpoint, at_once=True)
    while not plan.fits and len(leaving) < len(idle):
        leaving.append(idle[len(leaving)])
        plan = await plan_in(loading.with_room_of(free, [*own, *leaving]))
    waits_for: list[Endpoint] = []
    if not plan.fits:
        kept = [each for each in fleet.endpoints.values() if each.settings.pinned and each not in own]
        if (await plan_in(loading.without(free, kept))).fits:
            waits_for = [each for each in fleet.endpoints.values() if each.is_busy and each not in own]
        leaving = []
    short = plan.shortest
    over_bytes = 0 if plan.fits else max(0, short.total_bytes - short.budget_bytes)
    return Trial(
        model=plan.model,
        verdict=_verdict(plan, _ids(leaving), _ids(waits_for), over_bytes),
        fits=plan.fits,
        is_here=endpoint is not None,
        leaving=_ids(leaving),
        waits_for=_ids(waits_for),
        over_bytes=over_bytes,
        plan=plan,
        suggestions=whole_suggestions(plan, flags),
        steps=_steps(facts, plan),
        flags=flags,
    )


def whole_suggestions(plan: Plan, flags: str) -> list[Suggestion]:
    """Those of a plan that need nothing but this model changed, each with the flags that it was planned with."""
    found = [each for each in plan.suggestions if is_tunable(each.flags)]
    return [msgspec.structs.replace(each, flags=together(flags, each.flags)) for each in found]


def _ids(endpoints: list[Endpoint]) -> list[str]:
    return list(dict.fromkeys(each.model_id for each in endpoints))


def _verdict(plan: Plan, leaving: list[str], waits_for: list[str], over_bytes: int) -> str:
    device = plan.shortest
    where = "" if len(plan.devices) == 1 else " of RAM" if device.device == "cpu" else f" on {device.device}"
    bound = "" if plan.exact else "at most "
    needs = f"needs {bound}{size_text(device.total_bytes)}{where}, {size_text(device.budget_bytes)} can be had"
    if plan.fits:
        return f"Fits: {needs}." + (f" {_and(leaving)} would be unloaded." if leaving else "")
    if waits_for:
        return f"Fits once {_and(waits_for)} {'is' if len(waits_for) == 1 else 'are'} done: {needs}."
    return f"Too big by {size_text(over_bytes)}: {needs}."


def _and(names: list[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


def _steps(facts: ModelFacts | None, plan: Plan) -> Steps:
    if facts is None or not plan.settings.is_computed:
        return Steps()
    trained, now = facts.shape.n_ctx_train, plan.settings
    lengths = {1 << power for power in range(SHORTEST_TOKENS.bit_length() - 1, trained.bit_length())} | {trained}
    types = [name for name in KV_TYPES if not any(width % KV_CACHE_TYPES[name].block for width in head_widths(facts))]
    return Steps(
        max_seq_len=sorted({each for each in lengths if each <= trained} | {now.max_seq_len}),
        max_num_seqs=sorted({*SEQS, now.max_num_seqs}),
        kv_cache_dtype=types if now.kv_cache_dtype in types else [now.kv_cache_dtype, *types],
    )
