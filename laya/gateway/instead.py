"""Owns: which models at hand fit where one that was asked for does not: its own in fewer bits first, then the largest.

Plans are made by whoever asks, as a load would make them; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from laya.config.quantization import split_kind
from laya.errors import LayaError
from laya.types import ModelFile, Plan

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint

ENOUGH = 3
MOST_TRIED = 16  # each is a header that is read


async def models_that_fit(
    wanted: Endpoint,
    file: ModelFile,
    others: Iterable[tuple[Endpoint, ModelFile]],
    plan: Callable[[Endpoint, ModelFile], Awaitable[Plan]],
) -> list[str]:
    """Ids of other models for the same task, up to ENOUGH, that fit as they would be loaded; those that are loaded do.

    Those with smaller files come before the rest, of which one may fit by its settings.
    """
    base, by_id, loaded = split_kind(wanted.model_id)[0], {}, set()
    for other, own in others:
        if other.settings.task == wanted.settings.task and other.model_id != wanted.model_id:
            by_id[other.model_id] = other, own
            if other.pool is not None:
                loaded.add(other.model_id)
    at_hand = [each for each in by_id.values() if each[0].model_id in loaded or each[1].format == "gguf"]

    def order(each: tuple[Endpoint, ModelFile]) -> tuple[bool, bool, int]:
        n_bytes = each[1].file_bytes
        return n_bytes >= file.file_bytes, split_kind(each[0].model_id)[0] != base, -n_bytes

    found: list[str] = []
    for other, own in sorted(at_hand, key=order)[:MOST_TRIED]:
        try:
            does_fit = other.model_id in loaded or (await plan(other, own)).fits
        except LayaError:  # a broken file is nothing to suggest
            continue
        if does_fit:
            found.append(other.model_id)
        if len(found) == ENOUGH:
            break
    return found
