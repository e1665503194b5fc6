"""Owns: what of a request the rules of the config are asked about, and who could do what this model cannot.

Decides nothing; `laya.routing.rules` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.errors import NotSupported
from laya.gateway.endpoint import KINDS_OF
from laya.gateway.heads import PRIORITY, priority_of
from laya.routing.rules import RequestFacts, Rules
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange
    from laya.gateway.fleet import Fleet


def names_by_rules(
    rules: Rules, exchange: Exchange, parsed: ParsedBody, name: str, session: str | None
) -> tuple[str, ...]:
    """The models or pools that the rules give this request to, best first."""
    facts = RequestFacts(
        model=name,
        kind=exchange.kind,
        priority=priority_of(exchange.rule_headers.get(PRIORITY)),
        headers=exchange.rule_headers,
        key=exchange.key_name,
        prompt_tokens=parsed.prompt_bound_tokens,
        session=session,
        identity=exchange.request_id.decode("latin-1"),
    )
    return rules.decide(facts).models


def wrong_task(fleet: Fleet, endpoint: Endpoint, kind: EndpointKind) -> NotSupported:
    """A request of this kind came to a model of another task."""
    task = next(task for task, kinds in KINDS_OF.items() if kind in kinds)
    able = [group[0].model_id for group in fleet.groups() if group[0].settings.task == task]
    hint = f"Models here that do: {', '.join(able)}." if able else f"No model here has `task: {task}`."
    return NotSupported(
        f"The model '{endpoint.model_id}' has the task '{endpoint.settings.task}', not '{task}'. {hint}",
        param="model",
    )
