"""Owns: what driving a real engine to a certain depth takes: its client, prompts of known length, proofs of a load."""

from __future__ import annotations

from typing import Any

import httpx

from laya.engines.process import EngineProcess
from laya.errors import EngineFailed
from laya.types import EngineAddress


def client_of(address: EngineAddress) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://{address.host}:{address.port}",
        headers={"authorization": f"Bearer {address.api_key}"},
        timeout=None,
        trust_env=False,
        limits=httpx.Limits(max_keepalive_connections=0),  # the engine closes them after a stream without saying so
    )


def peak_of(engine: EngineProcess) -> int:
    reading = engine.measure()
    if reading is None:
        raise EngineFailed(f"The engine ended while it was measured: {engine.exit_reason}")
    return reading.peak_bytes


def same(what: str, found: Any, planned: Any) -> None:
    """Raise EngineFailed where what is measured is not what was planned."""
    if found != planned:
        raise EngineFailed(f"The engine runs with {what} {found}, the plan says {planned}: it measures something else.")


def token_ids(number: int, n_tokens: int, n_vocab: int) -> list[int]:
    """Token ids, so that the length is exact; `number` makes a prompt share no prefix with another."""
    first = min(100, n_vocab // 4)  # those before are bytes and the like
    n_used = min(3000, n_vocab // 2)
    return [first + (index * 7919 + number * 104729) % n_used for index in range(n_tokens)]
