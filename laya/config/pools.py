"""Owns: whose engines a request that names a pool gets: those of this machine, and others where a rule says so.

A model of another server may cost money, and what is asked of it leaves this machine. So beside models that are here it
is in a pool for the rules with `spillover` alone; a pool of such models only is chosen from like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from laya.config.document import Document, KeyPath, dotted

if TYPE_CHECKING:
    from laya.config.schema import Config


class Members(NamedTuple):
    """The models of a pool."""

    first: tuple[str, ...]
    away: tuple[str, ...] = ()  # of other servers, beside such that are here


def pools_of(config: Config) -> dict[str, Members]:
    """Every pool of the configuration."""
    found = {}
    for pool, names in config.routing.pools.items():
        away = tuple(name for name in names if config.for_model(name).remote is not None)
        here = tuple(name for name in names if name not in away)
        found[pool] = Members(here, away) if here else Members(away)
    return found


def first_of(config: Config) -> dict[str, tuple[str, ...]]:
    """Of each pool, whom a request that names it gets."""
    return {pool: members.first for pool, members in pools_of(config).items()}


def away_of(config: Config) -> dict[str, tuple[str, ...]]:
    """Of each pool that has both, those that rules with `spillover` lead to."""
    return {pool: members.away for pool, members in pools_of(config).items() if members.away}


def check_spillover(config: Config, document: Document) -> None:
    """Raises ConfigError for a member of a pool that nothing leads to, and for a rule that has nowhere to spill to."""
    away, reached = away_of(config), set()
    for index, rule in enumerate(config.routing.rules):
        if not rule.spillover:
            continue
        targets = {*([rule.to] if rule.to else rule.split), *rule.fallbacks}
        reached |= targets
        if not rule.fallbacks and not targets & away.keys():
            path: KeyPath = ("routing", "rules", index, "spillover")
            hint = "name `fallbacks`, or lead to a pool that has models of other servers too"
            raise document.error(path, f"{dotted(path)}: there is nowhere to spill over to: {hint}")
    for pool, names in away.items():
        if pool not in reached:
            path = ("routing", "pools", pool)
            told = f"{dotted(path)}: beside models that are here, {names[0]} of another server serves by rules alone"
            raise document.error(path, f"{told}: one with `to: {pool}` and `spillover: true`")
