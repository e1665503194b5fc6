"""Owns: which messages of a conversation that is too long go, where its model says `overflow: trim`.

The system prompt and the last user message with what follows it stay; the oldest turns go first, whole, so that no
answer is left without its question and no tool result without its call. Only when no turn is left do steps after the
last user message go (a call with its results at once), never the last one. Knows no socket; counting is given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from laya.gateway.body import MessageHead

TYPICAL_BYTES_A_TOKEN = 4  # with which the search begins; the first count tells more
ANSWER_SHARE = 0.25  # of the window, the most that is kept free for the answer
_KEPT_ROLES = ("system", "developer")
_RESULT_ROLES = ("tool", "function")

Count = Callable[[Sequence[int]], Awaitable[int]]


def answer_tokens(max_tokens: int | None, default_max_tokens: int, max_seq_len: int) -> int:
    """Tokens that trimming leaves for the answer."""
    return min(max_tokens or default_max_tokens, int(max_seq_len * ANSWER_SHARE))


def droppable(messages: Sequence[MessageHead]) -> list[list[int]]:
    """Indices of messages that may go, in the order in which they go; those of one list go together."""
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    turns: list[list[int]] = []
    for index in range(last_user):
        role = messages[index].role
        if role in _KEPT_ROLES:
            continue
        if role == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    return turns + _steps(messages, last_user + 1)[:-1]


def _steps(messages: Sequence[MessageHead], start: int) -> list[list[int]]:
    """Messages from `start` on, results with the call before them."""
    steps: list[list[int]] = []
    for index in range(start, len(messages)):
        role = messages[index].role
        if role in _KEPT_ROLES:
            continue
        if role not in _RESULT_ROLES or not steps:
            steps.append([])
        steps[-1].append(index)
    return steps


async def fewest_dropped(
    messages: Sequence[MessageHead], sizes: Sequence[int], *, limit_bytes: int, limit_tokens: int, count: Count
) -> tuple[list[int], int]:
    """Indices to drop, as few as bring the rest within both limits, and the tokens of the rest.

    sizes: bytes of each message. count: tokens of the conversation without these indices. Where all that may go does
    not suffice, all of it is dropped: the tokens then say by how much. Nothing above `limit_bytes` is ever counted,
    unless nothing is left to drop; what is counted is about as long as the limit, however long the conversation.
    """
    groups = droppable(messages)
    left = _bytes_left(groups, sizes)  # by how many groups are dropped
    low, high = _first_within(left, limit_bytes), len(groups)
    tokens: dict[int, int] = {}

    async def fits(n_groups: int) -> bool:
        tokens[n_groups] = await count(_first(groups, n_groups))
        return tokens[n_groups] <= limit_tokens

    n_dropped, step = _first_within(left, limit_tokens * TYPICAL_BYTES_A_TOKEN), 1
    while low < high:
        at = min(max(n_dropped, low), high - 1)
        is_enough = await fits(at)
        low, high = (low, at) if is_enough else (at + 1, high)
        if len(tokens) == 1:  # by what its bytes came to, the limit is there
            n_dropped = _first_within(left, limit_tokens * left[at] / max(tokens[at], 1))
        else:  # away from what was tried in growing steps, until halving what is left is shorter
            n_dropped = max((low + high) // 2, at - step) if is_enough else min((low + high) // 2, at + step)
            step *= 2
    if low not in tokens:
        await fits(low)
    return _first(groups, low), tokens[low]


def _first(groups: Sequence[Sequence[int]], n_groups: int) -> list[int]:
    return [index for group in groups[:n_groups] for index in group]


def _bytes_left(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    left = [sum(sizes)]
    for group in groups:
        left.append(left[-1] - sum(sizes[index] for index in group))
    return left


def _first_within(left: Sequence[int], limit_bytes: float) -> int:
    """How many groups to drop so that no more bytes are left, or all of them."""
    return next((n_groups for n_groups, n_bytes in enumerate(left) if n_bytes <= limit_bytes), len(left) - 1)
