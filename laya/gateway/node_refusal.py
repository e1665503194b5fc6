"""Owns: what is told where no node of the cluster can ever have a model: by node, its bytes or what is wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from laya.engines.cluster import Cluster
from laya.errors import BadModelFile, ConfigError, EngineFailed, InsufficientMemory
from laya.gateway.endpoint import Endpoint
from laya.gateway.node_accounts import Spot, Spots
from laya.memory import Budget, plan_bytes_within, refusal, size_text
from laya.types import Plan

NODES_S = 5.0  # to come back after, where no node is there
PlanIn = Callable[[Spot, int], Awaitable[Plan]]  # the model's plan inside so many bytes of ceiling there


async def refusal_of(
    cluster: Cluster, endpoint: Endpoint, found: Spots, plan_in: PlanIn
) -> InsufficientMemory | BadModelFile | EngineFailed:
    """Why no node can ever have it: every node with its bytes, or what else is wrong with it."""
    spots, told = found.spots, [f"{name}: {why}" for name, why in (found.missing | found.faults).items()]
    if not cluster.nodes:
        words = f"The Ray cluster at {cluster.address} has no node with memory to promise."
        return EngineFailed(words, param="model", retry_after_s=NODES_S)
    if not spots:
        words = f"No node of the cluster can load '{endpoint.model_id}': {'; '.join(told)}."
        if found.faults:  # which may pass
            return EngineFailed(words, param="model", retry_after_s=1.0)
        return BadModelFile(f"{words} Copy or pull it there, or share the folder.", param="model")
    widest, plan = await _widest(spots, plan_in)
    if plan.fits:  # what is pinned, or of its own model, stays in the way
        plan = await plan_in(widest, widest.free_bytes)
    error = refusal(plan, Budget(bytes=plan_bytes_within(widest.total_bytes), limit=widest.limit))
    told += [f"{s.node.name}: {size_text(s.free_bytes)} of {size_text(s.total_bytes)} free" for s in spots]
    error.message += f" Nodes: {'; '.join(told)}. An engine takes a tenth and 32 MiB more than its plan."
    error.details["nodes"] = {
        spot.node.name: {"free_bytes": spot.free_bytes, "total_bytes": spot.total_bytes} for spot in spots
    }
    return error


async def _widest(spots: list[Spot], plan_in: PlanIn) -> tuple[Spot, Plan]:
    """The spot that holds most, were nothing else there, and its plan. Raises ConfigError where it must have a GPU,
    and none has."""
    fault: ConfigError | None = None
    for spot in sorted(spots, key=lambda spot: -spot.total_bytes):
        try:
            return spot, await plan_in(spot, spot.total_bytes)
        except ConfigError as error:
            fault = fault or error
    assert fault is not None, "there are spots"
    raise fault
