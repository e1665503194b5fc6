"""Owns: what one engine can count on of a node: bytes, GPUs that are free and alike, cores that no other there has."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from laya.engines.cluster_words import Node, NodeSurvey
from laya.memory import Ledger


class Spot(msgspec.Struct, frozen=True):
    """A node that could take the engine."""

    node: Node
    survey: NodeSurvey
    total_bytes: int  # that engines of this gateway may have there
    free_bytes: int
    limit: str  # what bounds the total


class Spots(NamedTuple):
    """Nodes that could take it, the one with the most room first; why others cannot, by their names."""

    spots: list[Spot]
    missing: dict[str, str]  # of its files
    faults: dict[str, str]


def gpus_for_one(gpu_bytes: list[int], n_free: int) -> tuple[int, ...]:
    """What an engine can count on, which Ray gives whole GPUs, and says which ones only then: as much of each as the
    fullest of the emptiest has.

    >>> gpus_for_one([500, 23000, 22000], 2)
    (22000, 22000)
    """
    emptiest = sorted(gpu_bytes, reverse=True)[:n_free]
    return (min(emptiest),) * len(emptiest) if emptiest else ()


def account(node: str) -> str:
    """The node's name in the ledger."""
    return f"node/{node}"


def cores_account(node: str) -> str:
    """The node's cores in the ledger."""
    return f"threads/{node}"


def gpus_account(node: str) -> str:
    """The node's GPUs in the ledger, which are given whole."""
    return f"gpus/{node}"


def free_cores(ledger: Ledger, owner: str, node: str, n_cores: int) -> int:
    """Threads for an engine there, which keeps them as long as it lives: the cores that no other was given, at least
    one. Its node computes for other gateways, too, and of those nothing is known."""
    name = cores_account(node)
    ledger.set_total(name, n_cores)
    return max(1, ledger.free(name) + ledger.held_by(owner, name))
