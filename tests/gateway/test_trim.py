"""`overflow: trim`: the oldest turns go until a chat fits, the rest stays as it was, and the answer says so."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from laya.gateway.body import MessageHead
from laya.gateway.trim import answer_tokens, droppable, fewest_dropped

from .front import chat, front

pytestmark = pytest.mark.anyio
TOKENS_A_WORD = 10


def heads(roles: str) -> list[MessageHead]:
    """s: system, u: user, a: assistant, c: assistant with a call, t: tool."""
    names: dict[str, Any] = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    return [MessageHead(role=names[role], content="x") for role in roles]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("su", []),
        ("suaua" + "u", [[1, 2], [3, 4]]),
        ("s" + "uctta" + "u", [[1, 2, 3, 4, 5]]),
        ("au", [[0]]),
        ("suas" + "u", [[1, 2]]),
        ("su" + "ct" + "ctt" + "ct", [[2, 3], [4, 5, 6]]),
        ("suau" + "ct" + "a", [[1, 2], [4, 5]]),
        ("sa", []),
    ],
)
def test_what_may_go_is_whole_turns_oldest_first(roles: str, expected: list[list[int]]) -> None:
    assert droppable(heads(roles)) == expected


async def test_no_more_goes_than_must(anyio_backend: Any) -> None:
    rng = random.Random(7)
    for _ in range(200):
        roles = "s" + "".join(rng.choice(("ua", "ucta", "uctcta")) for _ in range(rng.randint(0, 12))) + "u"
        messages = heads(roles)
        tokens = [rng.randint(1, 30) for _ in messages]
        limit = rng.randint(1, 300)

        async def count(dropped: Any, tokens: list[int] = tokens) -> int:
            return sum(tokens) - sum(tokens[index] for index in dropped)

        sizes = [4 * n for n in tokens]
        dropped, left = await fewest_dropped(messages, sizes, limit_bytes=4 * limit, limit_tokens=limit, count=count)
        groups = droppable(messages)
        n_groups = next(n for n in range(len(groups) + 1) if [i for g in groups[:n] for i in g] == dropped)
        assert left == await count(dropped)
        assert left <= limit or n_groups == len(groups)
        if n_groups:
            assert await count([i for g in groups[: n_groups - 1] for i in g]) > limit
        kept = [role for index, role in enumerate(roles) if index not in dropped]
        assert kept[0] == "s" and kept[-1] == "u"
        assert all(kept[index - 1] in "ct" for index, role in enumerate(kept) if role == "t")


@pytest.mark.parametrize("bytes_a_token", [1, 4, 30])
async def test_what_is_counted_is_about_as_long_as_the_window(anyio_backend: Any, bytes_a_token: int) -> None:
    messages = heads("ua" * 10_000 + "u")
    counted: list[int] = []

    async def count(dropped: Any) -> int:
        counted.append((len(messages) - len(dropped)) * 10)
        return counted[-1]

    sizes = [10 * bytes_a_token] * len(messages)
    _, left = await fewest_dropped(messages, sizes, limit_bytes=10**9, limit_tokens=4000, count=count)
    assert 3980 <= left <= 4000
    assert len(counted) <= 4 and max(counted[1:]) < 4100 and counted[0] <= 16_000


def test_room_for_the_answer_is_a_quarter_of_the_window_at_most() -> None:
    assert answer_tokens(None, 1024, 8192) == 1024
    assert answer_tokens(100, 1024, 8192) == 100
    assert answer_tokens(None, 1024, 400) == 100


def words(body: Any) -> int:
    """What an engine counts whose words are ten tokens each."""
    text = " ".join(str(message["content"]) for message in body["messages"])
    return TOKENS_A_WORD * len(text.split())


def talk(n_turns: int, n_words: int = 10) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}]
    for number in range(n_turns):
        turns += [
            {"role": "user", "content": " ".join([f"q{number}"] * n_words)},
            {"role": "assistant", "content": " ".join([f"a{number}"] * n_words)},
        ]
    return [*turns, {"role": "user", "content": "last"}]


async def test_long_chat_is_answered_without_its_oldest_turns(tmp_path: Path) -> None:
    planned = {"max_seq_len": 1024, "slot_tokens": 1024}
    async with front(tmp_path, model={"overflow": "trim"}, planned=planned) as gate:
        gate.engine.count_of = words
        messages = talk(20)
        answer = await gate.ask(chat(messages=messages, temperature=0.5))
        assert answer.status == 200
        sent = gate.engine.bodies[-1]
        # 768 tokens may be read: the system's 20, the last one's 10, and 3 turns of 200
        assert answer.headers["x-laya-trimmed"] == str(2 * 17)
        assert sent["messages"] == [messages[0], *messages[-7:]]
        assert sent["temperature"] == 0.5
        assert gate.engine.n_counts <= 6
        assert await gate.settled() == {"served": 1}


async def test_chat_that_fits_is_left_alone(tmp_path: Path) -> None:
    planned = {"max_seq_len": 2048, "slot_tokens": 2048}
    async with front(tmp_path, model={"overflow": "trim"}, planned=planned) as gate:
        gate.engine.count_of = words
        answer = await gate.ask(chat(messages=talk(1), max_tokens=64))
        assert answer.status == 200
        assert "x-laya-trimmed" not in answer.headers
        assert gate.engine.bodies[-1]["messages"] == talk(1)


async def test_what_must_stay_and_is_too_long_is_refused_with_both_numbers(tmp_path: Path) -> None:
    planned = {"max_seq_len": 256, "slot_tokens": 256}
    async with front(tmp_path, model={"overflow": "trim"}, planned=planned) as gate:
        gate.engine.count_of = words
        messages = [*talk(5), {"role": "user", "content": "word " * 100}]
        answer = await gate.ask(chat(messages=messages))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert (answer.error["max_seq_len"], answer.error["prompt_tokens"]) == (256, 1020)
        n_counts = gate.engine.n_counts
        hopeless = await gate.ask(chat(messages=[{"role": "user", "content": "x" * 20_000}]))
        assert hopeless.error["prompt_tokens"] >= 20_000 // 32
        assert gate.engine.n_counts == n_counts  # nothing that large is read by the engine
        assert await gate.settled() == {"refused": 2}


async def test_other_models_still_refuse(tmp_path: Path) -> None:
    planned = {"max_seq_len": 256, "slot_tokens": 256}
    async with front(tmp_path, planned=planned) as gate:
        gate.engine.count_of = words
        answer = await gate.ask(chat(messages=talk(20)))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
