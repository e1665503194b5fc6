"""Owns: how much RAM is worth keeping for prompts that left their sequence (`prompt_cache: auto`). Pure.

A conversation that comes back after another one took its sequence is read again from its first token, unless the
engine kept a copy. A copy is as large as its tokens' cache; it is of use only for what goes on, so only for chats.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from laya.memory.caches import sequence_bytes
from laya.memory.limits import Limits, totals
from laya.memory.placement import CPU
from laya.memory.planner import Choice, Model, decide, load_of, price
from laya.types import MIB, AskedSettings

SPARE_SHARE = 0.5  # of RAM: the rest is for other models


class PromptCache(NamedTuple):
    """What is asked with the cache decided, and why it has this size."""

    asked: AskedSettings
    reason: str


def with_prompt_cache(model: Model, asked: AskedSettings, choice: Choice, limits: Limits) -> PromptCache:
    """One idle conversation for each sequence, where half of the memory stays free with it; else none."""
    none = msgspec.structs.replace(asked, prompt_cache_bytes=0)
    if asked.task != "chat":
        return PromptCache(none, "only chats come back")
    n_bytes = choice.max_num_seqs * sequence_bytes(load_of(model, decide(model, none, choice)))
    wanted = msgspec.structs.replace(asked, prompt_cache_bytes=-(-n_bytes // MIB) * MIB)
    if totals(price(model, decide(model, wanted, choice)))[CPU] > SPARE_SHARE * limits[CPU]:
        return PromptCache(none, "more than half of the memory would be taken with it")
    return PromptCache(wanted, "a conversation for each sequence, so that those who take turns are not read again")
