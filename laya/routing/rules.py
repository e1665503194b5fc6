"""Owns: which model serves a request, by `routing.rules`. A pure function: facts of a request in, decision out.

Compiled once: the rules that may meet a name are known by that name (kept for the names that are asked for most), and
what a rule asks is ready to be compared. Knows no endpoint and no load: whether a model can serve now is asked of the
route table, in the order that a decision gives.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from laya.config.check_routing import AUTO, as_list
from laya.config.routing import RouteRule, RoutingConfig
from laya.errors import InvalidRequest
from laya.routing.table import hash_name
from laya.types import EndpointKind, Priority

_MOST_NAMES_KEPT = 1024
_LONGEST_NAME_KEPT = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What rules may ask about. headers: by their names in lower case. prompt_tokens: the bound known when routing.

    identity: what a percentage split is drawn from where there is no session, such as the request's id.
    """

    model: str
    kind: EndpointKind = EndpointKind.CHAT
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key: str | None = None
    prompt_tokens: int = 0
    priority: Priority = "default"
    session: str | None = None
    identity: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The models or pools to try, best first, and the rule that said so; None: the request's own model.

    spills: the first one that has room serves; else the first one that may be chosen does.
    """

    models: tuple[str, ...]
    rule: str | None = None
    spills: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One rule beside a request: what it misses, in words; empty where the request meets it."""

    rule: str
    misses: str


class Rules:
    """The compiled `routing` section.

    header_names: in lower case, all that a caller has to put into the facts. away: by pool, its models of other
    servers, which rules that spill over lead to after the pool.
    """

    def __init__(self, routing: RoutingConfig, away: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        self._rules = tuple(_Rule(rule, index, away) for index, rule in enumerate(routing.rules))
        self.header_names = frozenset(name.lower() for rule in routing.rules for name in rule.headers)
        self._rules_of_short = functools.lru_cache(maxsize=_MOST_NAMES_KEPT)(self._find_rules_of)

    def __bool__(self) -> bool:
        """False: every request goes to the model that it names, and `decide` need not be asked."""
        return bool(self._rules)

    def decide(self, facts: RequestFacts) -> Decision:
        """Raises InvalidRequest when the choice is left to the rules (`auto`) and none of them takes the request."""
        for rule in self._rules_of(facts.model):
            if not rule.misses(facts):
                return rule.decision(facts)
        if facts.model == AUTO and self._rules:
            raise InvalidRequest(
                "The model 'auto' leaves the choice to routing.rules, and none of them takes this request. "
                "A last rule without conditions takes what is left.",
                param="model",
            )
        return Decision((facts.model,))

    def verdicts(self, facts: RequestFacts) -> list[Verdict]:
        """Every rule in its order, up to and with the one that decides."""
        found = []
        for rule in self._rules:
            found.append(Verdict(rule.name, rule.misses_model(facts.model) or rule.misses(facts)))
            if not found[-1].misses:
                break
        return found

    def _rules_of(self, model: str) -> tuple[_Rule, ...]:
        return self._rules_of_short(model) if len(model) <= _LONGEST_NAME_KEPT else self._find_rules_of(model)

    def _find_rules_of(self, model: str) -> tuple[_Rule, ...]:
        return tuple(rule for rule in self._rules if not rule.misses_model(model))


class _Rule:
    def __init__(self, rule: RouteRule, index: int, away: Mapping[str, Sequence[str]]) -> None:
        self.name = rule.name or f"rule {index + 1}"
        self._models = _pattern(as_list(rule.model)) if rule.model else None
        self._headers = tuple(
            (name.lower(), _pattern([value]), f"header {name}: {value}") for name, value in rule.headers.items()
        )
        self._keys = frozenset(as_list(rule.key))
        self._kinds = frozenset(EndpointKind[kind.upper()] for kind in as_list(rule.kind))
        self._priorities = frozenset(as_list(rule.priority))
        self._min_tokens, self._max_tokens = rule.min_prompt_tokens or 0, rule.max_prompt_tokens
        self._words = {
            "model": f"model {' or '.join(as_list(rule.model))}",
            "key": f"key {' or '.join(as_list(rule.key))}",
            "kind": f"kind {' or '.join(as_list(rule.kind))}",
            "priority": f"priority {' or '.join(as_list(rule.priority))}",
            "least": f"a prompt of {self._min_tokens} tokens or more",
            "most": f"a prompt of {self._max_tokens} tokens or less",
        }
        self._shares = rule.split or {rule.to: 100}
        self._bounds = tuple(itertools.accumulate(self._shares.values()))
        self._decisions = tuple(
            Decision(_tried((target, *rule.fallbacks), away if rule.spillover else {}), self.name, rule.spillover)
            for target in self._shares
        )

    def misses_model(self, model: str) -> str:
        return "" if self._models is None or self._models.fullmatch(model) else self._words["model"]

    def misses(self, facts: RequestFacts) -> str:
        """What the rule asks and the request is not, beside its model's name; empty: nothing."""
        if self._keys and facts.key not in self._keys:
            return self._words["key"]
        if self._kinds and facts.kind not in self._kinds:
            return self._words["kind"]
        if self._priorities and facts.priority not in self._priorities:
            return self._words["priority"]
        if facts.prompt_tokens < self._min_tokens:
            return self._words["least"]
        if self._max_tokens is not None and facts.prompt_tokens > self._max_tokens:
            return self._words["most"]
        for name, pattern, words in self._headers:
            value = facts.headers.get(name)
            if value is None or not pattern.fullmatch(value):
                return words
        return ""

    def decision(self, facts: RequestFacts) -> Decision:
        if len(self._shares) == 1:
            return self._decisions[0]
        drawn = hash_name(f"{self.name}\0{facts.session or facts.identity}") % 100
        return next(decision for decision, bound in zip(self._decisions, self._bounds, strict=True) if drawn < bound)


def _tried(names: Sequence[str], away: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for name in names for each in (name, *away.get(name, ()))))


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(text) for text in texts))
