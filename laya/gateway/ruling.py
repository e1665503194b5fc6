"""Owns: what of a request the rules of the config are asked about, the endpoint that then serves it, and who could do
what this model cannot.

Decides nothing; `laya.routing.rules` and the route table do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.errors import NotSupported
from laya.gateway.endpoint import KINDS_OF
from laya.gateway.queueing import priority_for
from laya.routing.rules import Decision, RequestFacts, Rules
from laya.routing.table import FLAG_STREAMING
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange
    from laya.gateway.fleet import Fleet


def facts_of(exchange: Exchange, parsed: ParsedBody, name: str, session: str | None) -> RequestFacts:
    """What rules are asked about."""
    return RequestFacts(
        model=name,
        kind=exchange.kind,
        priority=priority_for(exchange),
        headers=exchange.kept_headers,
        key=exchange.key_name,
        prompt_tokens=parsed.prompt_bound_tokens,
        session=session,
        identity=exchange.request_id.decode("latin-1"),
    )


def by_rules(rules: Rules, exchange: Exchange, parsed: ParsedBody, name: str, session: str | None) -> Decision:
    """Where the rules lead this request."""
    return rules.decide(facts_of(exchange, parsed, name, session))


def choose(dispatcher: Dispatcher, exchange: Exchange, parsed: ParsedBody, name: str, tokens: int) -> tuple[int, str]:
    """The endpoint that serves it, with the request on it, or below 0; and the model or pool that was asked last."""
    session, flags = exchange.header_session or parsed.session, FLAG_STREAMING if parsed.wants_stream else 0
    rules, router = dispatcher.rules, dispatcher.router
    if not rules:
        blocks = parsed.prefix_blocks() if name in router.names_by_prompt else b""
        return router.route(name, session, exchange.kind, flags, 0, tokens, parsed.n_seqs, blocks), name
    decision = by_rules(rules, exchange, parsed, name, session)
    full: tuple[int, str] | None = None  # the first one that may be chosen and has no room, with the request on it
    for candidate in decision.models:
        blocks = parsed.prefix_blocks() if candidate in router.names_by_prompt else b""
        index = router.route(candidate, session, exchange.kind, flags, 0, tokens, parsed.n_seqs, blocks)
        if index < 0:
            continue
        endpoint = dispatcher.fleet.endpoints[index]
        if not decision.spills or has_room(endpoint, parsed.n_seqs):
            if full is not None:
                _give_back(dispatcher, full[0], tokens, parsed.n_seqs)
            return index, candidate
        if full is None:
            full = index, candidate
        else:
            _give_back(dispatcher, index, tokens, parsed.n_seqs)
    return full or (index, candidate)


def has_room(endpoint: Endpoint, n_seqs: int) -> bool:
    """Whether it would be served at once; where it has to be loaded, whether nobody waits for that yet."""
    if endpoint.queue or endpoint.held_back is not None:
        return False
    admission = endpoint.admission
    return admission is None or admission.free_seqs - endpoint.n_counting >= n_seqs


def _give_back(dispatcher: Dispatcher, index: int, tokens: int, n_seqs: int) -> None:
    fleet = dispatcher.fleet
    fleet.health.give_back(fleet.endpoints[index], n_seqs, tokens)


def wrong_task(fleet: Fleet, endpoint: Endpoint, kind: EndpointKind) -> NotSupported:
    """A request of this kind came to a model of another task."""
    task = next(task for task, kinds in KINDS_OF.items() if kind in kinds)
    able = [group[0].model_id for group in fleet.groups() if group[0].settings.task == task]
    hint = f"Models here that do: {', '.join(able)}." if able else f"No model here has `task: {task}`."
    return NotSupported(
        f"The model '{endpoint.model_id}' has the task '{endpoint.settings.task}', not '{task}'. {hint}",
        param="model",
    )
