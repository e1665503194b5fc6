"""Owns: the end of models that nobody uses: unloaded when none of their engines had a request for their `ttl`.

Knows nothing of memory: who leaves to make room for others is the fleet's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.gateway.fleet import Fleet


def unload_idle(fleet: Fleet, now_s: float) -> None:
    """Called a few times a second."""
    for group in fleet.groups():
        ttl_s = group[0].ttl_s
        if ttl_s is None or not any(each.pool for each in group) or any(each.is_busy for each in group):
            continue
        if now_s - max(each.last_used_s for each in group) > ttl_s:
            fleet.spawn(fleet.unload_model(group[0], "idle"))
