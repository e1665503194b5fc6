"""Owns: the whole explanation of a request: what the rules say of it, then what the router does with each model named.

Changes nothing; the same words for a server that runs and for a configuration that is only read.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from laya.routing.explain import Candidate, Explanation
from laya.routing.router import RequestRouter
from laya.routing.rules import RequestFacts, Rules, Verdict


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """`laya route explain --json` is this, and so is what `/admin/route/explain` answers."""

    rule: str | None  # that takes it; None: none, so the model that it names serves
    verdicts: tuple[Verdict, ...]
    models: tuple[str, ...]  # or pools, best first
    tried: tuple[Explanation, ...]  # one for each of them that there is
    is_live: bool  # of a running server as it is now
    spills: bool = False  # the first of them that has room serves


def with_costs(told: Told, words_of: Callable[[Candidate], str | None]) -> Told:
    """The same, with what each candidate costs."""
    tried = []
    for each in told.tried:
        candidates = (msgspec.structs.replace(candidate, cost=words_of(candidate)) for candidate in each.candidates)
        tried.append(msgspec.structs.replace(each, candidates=tuple(candidates)))
    return msgspec.structs.replace(told, tried=tuple(tried))


def tell(
    router: RequestRouter, rules: Rules, facts: RequestFacts, *, prefix_blocks: bytes = b"", is_live: bool = False
) -> Told:
    """What becomes of a request with these facts. Raises InvalidRequest where the rules leave `auto` undecided."""
    decision = rules.decide(facts)
    found = [
        router.explain(name, session=facts.session, tokens=facts.prompt_tokens, prefix_blocks=prefix_blocks)
        for name in decision.models
    ]
    return Told(
        rule=decision.rule,
        verdicts=tuple(rules.verdicts(facts)),
        models=decision.models,
        tried=tuple(explanation for explanation in found if explanation is not None),
        is_live=is_live,
        spills=decision.spills,
    )
