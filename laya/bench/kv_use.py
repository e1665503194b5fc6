"""Owns: how full an engine's KV cache is over time, in shares of it: held by the engine, and promised by Laya.

What is held is the engine's own account: llama.cpp's tokens of each sequence that is computed on, vLLM's gauge. It is
read while chats run through Laya, in a round of its own: reading takes time that a measured one must not lose.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import msgspec

from laya.bench.both_ways import BothWays, samples
from laya.bench.token_streams import ask

LOOK_EVERY_S = 0.1
MOST_POINTS = 60
VLLM_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_BARS = " ▁▂▃▄▅▆▇█"


class Point(NamedTuple):
    """Shares of the cache; None: nobody says."""

    at_s: float
    held: float | None
    promised: float | None


async def watched(ways: BothWays, chats: list[dict[str, Any]]) -> list[Point]:
    """The points of one round through Laya, thinned out to MOST_POINTS."""
    points: list[Point] = []
    running = asyncio.create_task(ways.turn("laya", chats))
    start_s = time.monotonic()
    while not running.done():
        points.append(Point(round(time.monotonic() - start_s, 2), await _held(ways), await _promised(ways)))
        await asyncio.wait([running], timeout=LOOK_EVERY_S)
    await running
    step = -(-len(points) // MOST_POINTS)
    return points[::step]


def bars(points: list[Point], width: int = 24) -> str:
    """The held shares as a line of bars, with the most of them."""
    shares = [point.held for point in points if point.held is not None]
    if not shares:
        return "not told"
    step = -(-len(shares) // width)
    tops = [max(shares[at : at + step]) for at in range(0, len(shares), step)]
    return "".join(_BARS[min(8, round(8 * share))] for share in tops) + f" {max(shares):.0%}"


async def _held(ways: BothWays) -> float | None:
    text = await ways.metrics("bare")
    for name in VLLM_USE:
        if found := samples(text, name):
            return max(value for _, value in found)
    status, body, _ = await ask(ways.sides["bare"], "/slots")
    slots = msgspec.json.decode(body) if status == 200 else None
    if not isinstance(slots, list) or not slots:
        return None
    held = sum(slot.get("n_prompt_tokens", 0) for slot in slots if slot.get("is_processing"))
    whole: int = ways.settings["kv_pool_tokens"]
    return held / whole if whole else None


async def _promised(ways: BothWays) -> float | None:
    text = await ways.metrics("laya")
    label = f'model="{ways.model}"'
    shares = [
        [value for labels, value in samples(text, f"laya_kv_tokens_{name}") if label in labels]
        for name in ("promised", "capacity")
    ]
    return shares[0][0] / shares[1][0] if all(shares) and shares[1][0] else None
