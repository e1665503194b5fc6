"""Owns: what one engine can count on of a node: GPUs that are free and alike, and cores that no other there has."""

from __future__ import annotations

from laya.memory import Ledger


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


def free_cores(ledger: Ledger, owner: str, node: str, n_cores: int) -> int:
    """Threads for an engine there, which keeps them as long as it lives: the cores that no other was given, at least
    one. Its node computes for other gateways, too, and of those nothing is known."""
    name = cores_account(node)
    ledger.set_total(name, n_cores)
    return max(1, ledger.free(name) + ledger.held_by(owner, name))
