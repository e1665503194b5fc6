"""Owns: what people are told of one request: who asked, what it waits for in words, and where its time went.

Only reads exchanges and their endpoints. Who may see a request is `own.py`'s to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from laya.gateway.ruling import facts_of
from laya.routing.rules import RequestFacts

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange
    from laya.gateway.fleet import Fleet

PartName = Literal["read", "route", "load", "queue", "prefill", "decode", "answer"]
MaySee = Callable[[str], bool]  # whether the reader may know of the model with this id


class Asked(NamedTuple):
    """What routing was asked, kept for who wants it explained later."""

    facts: RequestFacts
    prefix_blocks: bytes


def listed(exchange: Exchange, fleet: Fleet, now_s: float, may_see: MaySee) -> dict[str, Any]:
    """A live request in a list. `waits_for` is there while it waits."""
    endpoint = exchange.endpoint
    address = getattr(exchange.protocol, "client", None)  # none where another API's handler asks
    shown = {
        "model": endpoint.model_id if endpoint is not None else None,
        "client": address[0] if address else None,
        "since": round(time.time() - (now_s - exchange.arrived_s), 3),
        **exchange.as_state(now_s),
    }
    waits_for = _waits_for(exchange, fleet, may_see)
    return shown | ({"waits_for": waits_for} if waits_for is not None else {})


def parts_of(exchange: Exchange, now_s: float) -> list[dict[str, Any]]:
    """Where its time went until `now_s`, in the order of the parts; together they are all of it.

    `queue` is also what Laya itself did before the engine had it; `answer` is the engine's time where it does not tell
    when the first token came.
    """
    read_s = exchange.read_s or exchange.arrived_s
    sent_s, first_s = exchange.sent_s or now_s, exchange.first_token_s
    route_s = min(exchange.route_s, sent_s - read_s)
    waited_s, load_s = sent_s - read_s - route_s, 0.0
    endpoint = exchange.endpoint
    if exchange.deadline_s and endpoint is not None:  # it stood in line, perhaps for an engine to come
        if endpoint.pool is None and not exchange.sent_s:
            load_s = waited_s
        elif endpoint.opened_s > read_s:
            load_s = max(0.0, min(endpoint.opened_s, sent_s) - read_s - route_s)
    parts: list[tuple[PartName, float]] = [
        ("read", read_s - exchange.arrived_s), ("route", route_s), ("load", load_s), ("queue", waited_s - load_s),
    ]  # fmt: skip
    if exchange.sent_s and first_s:
        parts += [("prefill", first_s - sent_s), ("decode", now_s - first_s)]
    elif exchange.sent_s:
        parts.append(("answer" if exchange.outcome is not None else "prefill", now_s - sent_s))
    return [{"part": name, "ms": round(1e3 * seconds, 4)} for name, seconds in parts]


def asked_of(exchange: Exchange) -> Asked | None:
    """What a route was asked for; None for a request that never came so far."""
    if exchange.taken:
        exchange.read_taken()
    parsed, endpoint = exchange.parsed, exchange.endpoint
    if parsed is None:
        return None
    name = exchange.header_model or parsed.model or (endpoint.model_id if endpoint is not None else None)
    if name is None:
        return None
    facts = facts_of(exchange, parsed, name, exchange.header_session or parsed.session)
    return Asked(facts, parsed.prefix_blocks() if parsed.data else b"")


def _waits_for(exchange: Exchange, fleet: Fleet, may_see: MaySee) -> str | None:
    """`qwen to unload`, `a place at smollm2: 2 of 2 are taken, 1 request is before it`; None: it does not wait."""
    endpoint = exchange.endpoint
    if exchange.sent_s or endpoint is None or exchange.outcome is not None:
        return None
    if endpoint.pool is None:
        return _for_engine(endpoint, fleet, may_see)
    if endpoint.yields_to is not None:
        return f"{_named(fleet, endpoint.yields_to, may_see)}, which has the memory next"
    if endpoint.held_back is not None:
        return f"its turn: {endpoint.held_back}"
    if exchange not in endpoint.queue:
        return "its prompt to be counted"
    n_seqs = endpoint.planned.max_num_seqs if endpoint.planned is not None else 1
    n_others = len(endpoint.queue) - 1
    others = "" if not n_others else f", {n_others} other{'s wait' if n_others > 1 else ' waits'} too"
    return f"a place at {endpoint.model_id}: {len(endpoint.live)} of {n_seqs} taken{others}"


def _for_engine(endpoint: Endpoint, fleet: Fleet, may_see: MaySee) -> str:
    """What an engine that is not there waits for itself."""
    leaving = [each.id for each in fleet.supervisor.status() if each.state == "draining" and each.id != endpoint.name]
    if endpoint.no_room is not None:
        holders = endpoint.no_room.details.get("held_bytes", {})
        names = {_named(fleet, name, may_see) for name in holders} or {"memory"}
        does_yield = any(each.yields_to == endpoint.name for each in fleet.endpoints.values())
        return f"{' and '.join(sorted(names))} to {'unload' if does_yield else 'be done'}"
    if leaving:
        return f"{_named(fleet, leaving[0], may_see)} to unload"
    percent = fleet.supervisor.load_percent(endpoint.name)
    if percent is None:
        loading = next((each.id for each in fleet.supervisor.status() if each.state == "loading"), endpoint.name)
        if loading != endpoint.name:
            return f"{_named(fleet, loading, may_see)} to load first"
    return f"{endpoint.model_id} to load" + ("" if percent is None else f", {percent} %")


def _named(fleet: Fleet, engine: str, may_see: MaySee) -> str:
    model_id = fleet.model_of(engine)
    return model_id if may_see(model_id) else "another model"
