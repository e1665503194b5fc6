"""Owns: `/admin/route/explain`: a request described in a query, and what this server would do with it now.

Reads the live route table; nothing is reserved, drawn or remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from laya.config.pools import away_of
from laya.errors import InvalidRequest
from laya.gateway.fields import whole_number
from laya.gateway.heads import PRIORITY, priority_of
from laya.gateway.queueing import granted
from laya.routing import Explanation, prefix_blocks
from laya.routing.explain import Candidate
from laya.routing.rules import RequestFacts, Rules
from laya.routing.told import Told, tell, with_costs
from laya.types import EndpointKind, KeyGrant

if TYPE_CHECKING:
    from laya.gateway.fleet import Fleet

PROMPT_TOKENS_MOST = 2**32 - 1
BYTES_PER_TOKEN = 4  # of English text; a request is bounded by what is counted of it


def explain_live(
    fleet: Fleet, query: Mapping[str, str], headers: Sequence[str], grants: Mapping[str, KeyGrant]
) -> Told:
    """query: by the names of `openapi.py`; headers: `x-team: research`, each; grants: by the names of keys.

    Raises InvalidRequest, ModelNotFound.
    """
    if not query.get("model"):
        raise InvalidRequest(f"'model' is missing. This server has: {fleet.names_text()}.", param="model")
    prompt = query.get("prompt", "")
    said = dict(_header(text) for text in headers)
    priority = query.get("priority", said.get(PRIORITY))
    facts = RequestFacts(
        model=query["model"],
        kind=_kind(query.get("kind", "chat")),
        headers=said,
        key=query.get("key"),
        prompt_tokens=_count(query.get("prompt_tokens", str(len(prompt) // BYTES_PER_TOKEN))),
        priority=granted(priority_of(priority) if priority is not None else None, grants.get(query.get("key", ""))),
        session=query.get("session"),
    )
    return explain_facts(fleet, facts, prefix_blocks(prompt))


def explain_facts(fleet: Fleet, facts: RequestFacts, blocks: bytes) -> Told:
    """blocks: of its prompt's beginning. Raises InvalidRequest, ModelNotFound."""
    rules = Rules(fleet.config.routing, away_of(fleet.config))
    for name in rules.decide(facts).models:
        if fleet.router.resolve(name) is None:
            fleet.find(name)

    def cost_of(candidate: Candidate) -> str | None:
        cost = fleet.endpoints[candidate.endpoint].settings.cost
        return cost.words if cost is not None else None

    told = tell(fleet.router, rules, facts, prefix_blocks=blocks, is_live=True)
    told = with_costs(told, cost_of)
    return msgspec.structs.replace(told, tried=tuple(_with_failures(fleet, each) for each in told.tried))


def _with_failures(fleet: Fleet, tried: Explanation) -> Explanation:
    """Candidates whose load failed say why, where the table only knows that they may not be chosen."""
    candidates = []
    for candidate in tried.candidates:
        error = fleet.endpoints[candidate.endpoint].load_error
        if error is not None:
            candidate = msgspec.structs.replace(candidate, why_not=f"its load failed: {error.message}")
        candidates.append(candidate)
    return msgspec.structs.replace(tried, candidates=tuple(candidates))


def _kind(name: str) -> EndpointKind:
    known = [kind.name.lower() for kind in EndpointKind]
    if name not in known:
        raise InvalidRequest(f"'kind' is '{name}': expected {' or '.join(known)}.", param="kind")
    return EndpointKind[name.upper()]


def _count(text: str) -> int:
    count = whole_number(text)
    if count is None or count > PROMPT_TOKENS_MOST:
        raise InvalidRequest(f"'prompt_tokens' is '{text}': expected a whole number.", param="prompt_tokens")
    return count


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition(":")
    if not separator or not name.strip():
        raise InvalidRequest(f"'header' is '{text}': expected a name and a value, x-team: research.", param="header")
    return name.strip().lower(), value.strip()
