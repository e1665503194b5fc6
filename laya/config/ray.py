"""Owns: the `ray` section of config.yaml: the cluster that engines are placed on. Imports nothing of Ray."""

from __future__ import annotations

import importlib.util
import re
from typing import Annotated

import msgspec
from msgspec import Meta


class RayConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Engines on the nodes of a Ray cluster, by the extra laya-llm[ray]."""

    address: Annotated[
        str | None,
        Meta(description="Head of the Ray cluster whose nodes run llama.cpp models, HOST:6379 or auto; null = none."),
    ] = None


def address_fault(address: str) -> str | None:
    """Why this is no address of a cluster that can be joined from here, in words; None: it may be."""
    if address.startswith("ray://"):
        return "a Ray client places nothing by node: start Ray here (`ray start --address ...`) and give its HOST:6379"
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/]+):(\d{1,5})", address)
    if address != "auto" and (found is None or not 0 < int(found[2]) < 65536):
        return f"expected HOST:PORT of the cluster's head, such as 10.0.0.1:6379, or auto, got {address!r}"
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed here: pip install 'laya-llm[ray]'"
    return None
