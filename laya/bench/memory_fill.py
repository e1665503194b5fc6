"""Owns: filling an engine's cache of old prompts, and the proof that it is full: the engine let some of them go.

Layer: the engine's process, asked directly, at the verbosity at which it says what its cache does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import httpx

from laya.errors import EngineFailed
from laya.types import PlannedSettings

LET_GO = "removing oldest entry"  # the engine's words
ENOUGH_TIMES = 6  # so that entries of all lengths have taken the places of others
MOST_PROMPTS = 400


async def fill_prompt_cache(
    client: httpx.AsyncClient, settings: PlannedSettings, lines: Callable[[], list[str]]
) -> None:
    """One conversation after another, from an eighth of the full length to half of it, each forgotten for the next.

    lines: what the engine has said so far. Raises EngineFailed when its cache never gets full.
    """
    dice = random.Random(settings.prompt_cache_bytes)
    for _ in range(MOST_PROMPTS):
        n_tokens = dice.randrange(settings.max_seq_len // 8, settings.max_seq_len // 2)
        body = {"prompt": _tokens(dice, n_tokens), "n_predict": 1, "ignore_eos": True}
        (await client.post("/completion", json=body)).raise_for_status()
        if sum(LET_GO in line for line in lines()) >= ENOUGH_TIMES:
            return
    raise EngineFailed(f"The engine's prompt cache of {settings.prompt_cache_bytes} bytes did not get full.")


def _tokens(dice: random.Random, n_tokens: int) -> Sequence[int]:
    return [dice.randrange(100, 3100) for _ in range(n_tokens)]
