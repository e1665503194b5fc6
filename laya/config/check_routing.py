"""Owns: rules and pools that are well-formed and still decide nothing, or not what was meant. Knows no request."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from msgspec import UNSET

from laya.config.document import Document, KeyPath, dotted
from laya.config.routing import RouteRule, RoutingConfig
from laya.config.schema import Config
from laya.errors import nearest

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
AUTO = "auto"  # the name that requests use to leave the choice of a model to the rules


def check_routing(config: Config, document: Document) -> None:
    """Raises ConfigError for the first pool or rule that cannot do what it says."""
    _check_pools(config, document)
    _check_weights(config, document)
    names: set[str] = set()
    ids = {alias: model_id for model_id, entry in config.models.items() for alias in entry.aliases}
    for index, rule in enumerate(config.routing.rules):
        path: KeyPath = ("routing", "rules", index)
        name = rule.name or f"rule {index + 1}"
        if name in names:
            raise document.error((*path, "name"), f"{dotted(path)}: two rules are named {name}")
        names.add(name)
        _check_target(rule, document, path)
        _check_fallbacks(rule, rule.name or "the rule", ids, document, path)
        _check_conditions(rule, config, document, path)
        _check_reached(config.routing, index, document, path)


def _check_pools(config: Config, document: Document) -> None:
    taken = dict.fromkeys(config.models, "a model")
    taken |= {alias: "an alias" for entry in config.models.values() for alias in entry.aliases}
    if AUTO in taken:
        where = ("models", AUTO) if AUTO in config.models else ("models",)
        raise document.error(where, f"{dotted(where)}: {AUTO} leaves the choice to routing.rules; rename that model")
    ids = {alias: model_id for model_id, entry in config.models.items() for alias in entry.aliases}
    for pool, members in config.routing.pools.items():
        path: KeyPath = ("routing", "pools", pool)
        if pool in taken or pool == AUTO:
            raise document.error(path, f"{dotted(path)}: {pool} is the name of {taken.get(pool, 'the rules')} already")
        if not members:
            raise document.error(path, f"{dotted(path)}: a pool needs a model")
        inner = next((member for member in members if member in config.routing.pools or member == AUTO), None)
        if inner is not None:
            raise document.error(path, f"{dotted(path)}: {inner} is no model; a pool holds models only")
        _check_once(members, ids, document, path)


def _check_weights(config: Config, document: Document) -> None:
    """A weight decides among the models of a pool, and only where the policy of pools is `weighted`."""
    pooled = {member for members in config.routing.pools.values() for member in members}
    if config.weight not in (UNSET, 1):
        raise document.error(("weight",), "weight: the same for every model decides nothing; set it under models.<id>")
    for model_id, entry in config.models.items():
        path: KeyPath = ("models", model_id, "weight")
        if entry.weight is UNSET:
            continue
        if pooled.isdisjoint((model_id, *entry.aliases)):
            raise document.error(
                path, f"{dotted(path)}: counts in a pool only, and {model_id} is in none of routing.pools"
            )
        if config.policy != "weighted":
            raise document.error(path, f"{dotted(path)}: counts only with `policy: weighted` at the top level")
    for pool, members in config.routing.pools.items():
        if config.policy == "weighted" and not any(config.for_model(member).weight for member in members):
            raise document.error(("routing", "pools", pool), f"routing.pools.{pool}: each of its models has weight 0")


def _check_target(rule: RouteRule, document: Document, path: KeyPath) -> None:
    if bool(rule.to) == bool(rule.split):
        said = "both are here" if rule.to else "neither is here"
        raise document.error(path, f"{dotted(path)}: a rule needs `to` or `split`; {said}")
    if rule.split and sum(rule.split.values()) != 100:
        raise document.error(
            (*path, "split"), f"{dotted(path)}.split: the percentages are {sum(rule.split.values())} together, not 100"
        )
    if AUTO in (rule.to, *rule.split, *rule.fallbacks):
        raise document.error(path, f"{dotted(path)}: {AUTO} is what the rules decide, so no rule can lead to it")


def _check_conditions(rule: RouteRule, config: Config, document: Document, path: KeyPath) -> None:
    keys = [key.name for key in config.server.api_keys]
    for name in as_list(rule.key):
        close = nearest(name, keys)
        if name not in keys and close:  # any other name may be of a key that `laya key` made
            raise document.error(
                (*path, "key"), f"{dotted(path)}.key: no key is named {name} here; did you mean {close}?"
            )
    least, most = rule.min_prompt_tokens or 0, rule.max_prompt_tokens
    if most is not None and most < least:
        raise document.error(path, f"{dotted(path)}: no prompt has {least} tokens at least and {most} at most")
    for name, value in rule.headers.items():
        if not name or not value:
            raise document.error(path, f"{dotted(path)}.headers: expected a name and a value, such as x-team: a*")
        if not _HEADER_NAME.fullmatch(name):
            where = (*path, "headers", name)
            raise document.error(where, f"{dotted(path)}.headers: no header can be named '{name}'; such as x-team can")


def _check_fallbacks(rule: RouteRule, name: str, ids: Mapping[str, str], document: Document, path: KeyPath) -> None:
    own = (*path, "fallbacks")
    for index, fallback in enumerate(rule.fallbacks):
        if rule.to and ids.get(fallback, fallback) == ids.get(rule.to, rule.to):
            raise document.error(
                (*own, index), f"{dotted(own)}: {fallback} is what {name} leads to already; name another model"
            )
    _check_once(rule.fallbacks, ids, document, own)


def _check_once(names: Sequence[str], ids: Mapping[str, str], document: Document, path: KeyPath) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        model_id = ids.get(name, name)
        if model_id in seen:
            raise document.error((*path, index), f"{dotted(path)}: {model_id} is in it twice")
        seen.add(model_id)


def _check_reached(routing: RoutingConfig, index: int, document: Document, path: KeyPath) -> None:
    rule = routing.rules[index]
    for number, earlier in enumerate(routing.rules[:index]):
        if _takes_all_of(earlier, rule):
            name, first = rule.name or "it", earlier.name or dotted((*path[:-1], number))
            raise document.error(
                path, f"{dotted(path)}: {name} is never reached, since {first} takes every request that it would"
            )


def _takes_all_of(earlier: RouteRule, later: RouteRule) -> bool:
    """Whether each request that meets the later rule meets the earlier one; where that is not plain, False."""
    asked = {name.lower(): value for name, value in later.headers.items()}
    most, later_most = earlier.max_prompt_tokens, later.max_prompt_tokens
    models, later_models = as_list(earlier.model) or ["*"], as_list(later.model) or ["*"]
    return (
        all(any(_is_wider(model, other) for model in models) for other in later_models)
        and all(
            name.lower() in asked and _is_wider(value, asked[name.lower()]) for name, value in earlier.headers.items()
        )
        and _allows(earlier.key, later.key)
        and _allows(earlier.kind, later.kind)
        and _allows(earlier.priority, later.priority)
        and (earlier.min_prompt_tokens or 0) <= (later.min_prompt_tokens or 0)
        and (most is None or (later_most is not None and later_most <= most))
    )


def _allows(earlier: str | Sequence[str], later: str | Sequence[str]) -> bool:
    return not earlier or (bool(later) and set(as_list(later)) <= set(as_list(earlier)))


def _is_wider(pattern: str, other: str) -> bool:
    """Whether what matches the other pattern matches this one. Only a `*` can hold another pattern's `*`."""
    if pattern in ("*", other):
        return True
    is_plain = "[" not in other and not ("*" in other and ("?" in pattern or "[" in pattern))
    is_plain &= not ("?" in other and "[" in pattern)
    return is_plain and fnmatch.fnmatchcase(other, pattern)


def as_list(value: str | Sequence[str]) -> list[str]:
    """One name or a list of them, as a list."""
    return [value] if isinstance(value, str) else list(value)


def targets(routing: RoutingConfig) -> dict[str, KeyPath]:
    """Every model that rules and pools lead to, pools replaced by their models, and where it is named first."""
    found: dict[str, KeyPath] = {}
    for pool, members in routing.pools.items():
        for index, member in enumerate(members):
            found.setdefault(member, ("routing", "pools", pool, index))
    for number, rule in enumerate(routing.rules):
        path: KeyPath = ("routing", "rules", number)
        named: list[tuple[str, KeyPath]] = [(rule.to, (*path, "to"))] if rule.to else []
        named += [(name, (*path, "split", name)) for name in rule.split]
        named += [(name, (*path, "fallbacks", index)) for index, name in enumerate(rule.fallbacks)]
        for name, where in named:
            if name not in routing.pools:
                found.setdefault(name, where)
    return found
