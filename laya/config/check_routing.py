"""Owns: rules and pools that are well-formed and still decide nothing, or not what was meant. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from laya.config.document import Document, KeyPath, dotted
from laya.config.routing import RouteRule, RoutingConfig
from laya.config.schema import Config
from laya.errors import nearest

AUTO = "auto"  # the name that requests use to leave the choice of a model to the rules


def check_routing(config: Config, document: Document) -> None:
    """Raises ConfigError for the first pool or rule that cannot do what it says."""
    _check_pools(config, document)
    _check_weights(config, document)
    names: set[str] = set()
    catch_all = ""
    for index, rule in enumerate(config.routing.rules):
        path: KeyPath = ("routing", "rules", index)
        name = rule.name or f"rule {index + 1}"
        if name in names:
            raise document.error((*path, "name"), f"{dotted(path)}: two rules are named {name}")
        names.add(name)
        if catch_all:
            raise document.error(path, f"{dotted(path)}: never reached, since {catch_all} takes every request")
        _check_target(rule, document, path)
        _check_conditions(rule, config, document, path)
        if not any((rule.model, rule.headers, rule.key, rule.kind, rule.priority)) and _is_any_length(rule):
            catch_all = name


def _check_pools(config: Config, document: Document) -> None:
    taken = dict.fromkeys(config.models, "a model")
    taken |= {alias: "an alias" for entry in config.models.values() for alias in entry.aliases}
    if AUTO in taken and config.routing.rules:
        raise document.error(("models",), f"models: {AUTO} leaves the choice to routing.rules; rename that model")
    for pool, members in config.routing.pools.items():
        path: KeyPath = ("routing", "pools", pool)
        if pool in taken or pool == AUTO:
            raise document.error(path, f"{dotted(path)}: {pool} is the name of {taken.get(pool, 'the rules')} already")
        if not members:
            raise document.error(path, f"{dotted(path)}: a pool needs a model")
        inner = next((member for member in members if member in config.routing.pools or member == AUTO), None)
        if inner is not None:
            raise document.error(path, f"{dotted(path)}: {inner} is no model; a pool holds models only")


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


def _is_any_length(rule: RouteRule) -> bool:
    return not rule.min_prompt_tokens and rule.max_prompt_tokens is None


def as_list(value: str | Sequence[str]) -> list[str]:
    """One name or a list of them, as a list."""
    return [value] if isinstance(value, str) else list(value)


def targets(routing: RoutingConfig) -> set[str]:
    """Every model that rules and pools lead to, pools replaced by their models."""
    named = {name for rule in routing.rules for name in (rule.to, *rule.split, *rule.fallbacks) if name}
    members = {member for pool in routing.pools.values() for member in pool}
    return (named - set(routing.pools)) | members
