"""What each policy chooses by, said of both tables: prompts, weights, turns, hashes, and two of many."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from laya.routing import NO_ENDPOINT, RequestRouter, prefix_blocks
from laya.types import RoutePolicy


def new_router(table_type: Any, n_endpoints: int, policy: RoutePolicy = "auto", **options: int) -> RequestRouter:
    router = RequestRouter(table_type(**options))
    for i in range(n_endpoints):
        router.add_endpoint(name=f"m#{i}")
    router.set_model("m", range(n_endpoints), policy=policy)
    return router


SYSTEM = "You answer in one sentence. " * 10


def conversation(name: str, n_turns: int) -> bytes:
    return prefix_blocks(SYSTEM + "".join(f"{name} says turn {turn}, " * 8 for turn in range(n_turns)))


def test_a_conversation_stays_where_its_beginning_is_cached(table_type: Any) -> None:
    router = new_router(table_type, 3, window_tokens=10_000)
    names = [f"conversation {i}" for i in range(9)]
    homes = {name: router.choose("m", prefix_blocks=conversation(name, 1), tokens=1000) for name in names}
    assert len(set(homes.values())) > 1, "the shared system prompt does not send all to one"
    for n_turns in range(2, 7):
        asked = {name: router.choose("m", prefix_blocks=conversation(name, n_turns), tokens=0) for name in names}
        assert asked == homes


def test_new_conversations_of_an_idle_server_are_spread(table_type: Any) -> None:
    router = new_router(table_type, 2)
    homes = {name: router.choose("m", prefix_blocks=conversation(name, 1)) for name in map(str, range(10))}
    assert Counter(homes.values()) == {0: 5, 1: 5}
    assert {name: router.choose("m", prefix_blocks=conversation(name, 2)) for name in homes} == homes


def test_a_prompt_leaves_a_busy_endpoint_for_the_least_loaded(table_type: Any) -> None:
    router = new_router(table_type, 3, window_tokens=500)
    home = router.choose("m", prefix_blocks=conversation("a", 1), tokens=600)
    moved = router.choose("m", prefix_blocks=conversation("a", 2), tokens=10)
    assert moved != home
    router.settle(home, 600)
    assert router.choose("m", prefix_blocks=conversation("a", 3), tokens=10) == moved, "its history is there now"


def test_a_prompt_that_only_begins_alike_is_a_newcomer(table_type: Any) -> None:
    router = new_router(table_type, 2, window_tokens=10_000)
    home = router.choose("m", prefix_blocks=conversation("a", 1), tokens=100)
    stranger = prefix_blocks(SYSTEM + "another story altogether")
    assert router.choose("m", prefix_blocks=stranger) == 1 - home, "a miss goes to the least loaded"


def test_an_ineligible_endpoint_does_not_end_affinity(table_type: Any) -> None:
    router = new_router(table_type, 3, window_tokens=500)
    home = router.choose("m", session="s", tokens=400)
    router.set_eligible((home + 1) % 3, False)
    assert router.choose("m", session="s", tokens=1) == home, "the window is counted from eligible endpoints"


def test_two_of_many_are_compared(table_type: Any) -> None:
    router = new_router(table_type, 100)
    loads = Counter(router.choose("m", tokens=10) for _ in range(1000))
    assert len(loads) == 100, "the average is 10, and none was left out"
    assert max(loads.values()) <= 14


def test_two_of_many_skip_dead_and_full_endpoints(table_type: Any) -> None:
    router = new_router(table_type, 40)
    for endpoint in range(40):
        router.set_eligible(endpoint, endpoint == 33 or endpoint == 34)
        router.set_capacity(endpoint, 1, 0)
    assert {router.choose("m"), router.choose("m")} == {33, 34}
    assert router.choose("m") in (33, 34), "full ones are taken when there is nothing else"
    router.set_eligible(33, False)
    router.set_eligible(34, False)
    assert router.choose("m") == NO_ENDPOINT


def test_sessions_of_many_endpoints_stay(table_type: Any) -> None:
    router = new_router(table_type, 50)
    homes = {f"s{i}": router.choose("m", session=f"s{i}", tokens=1) for i in range(200)}
    assert len(set(homes.values())) > 30
    assert {session: router.choose("m", session=session, tokens=1) for session in homes} == homes


def test_weighted_gives_shares_by_weight(table_type: Any) -> None:
    router = RequestRouter(table_type())
    for weight in (1, 3, 0):
        router.add_endpoint(weight=weight)
    router.set_model("m", range(3), policy="weighted")
    shares = Counter(router.choose("m", tokens=1) for _ in range(2000))
    assert set(shares) == {0, 1}
    assert 400 < shares[0] < 600
    router.set_capacity(1, 1, 0)
    assert router.choose("m") == 0, "only what has room"


def test_round_robin_takes_turns_among_those_with_room(table_type: Any) -> None:
    router = new_router(table_type, 3, "round_robin")
    assert [router.choose("m", session="s") for _ in range(4)] == [0, 1, 2, 0]
    router.set_eligible(1, False)
    assert [router.choose("m") for _ in range(3)] == [2, 2, 0]


def test_hash_keeps_a_session_whatever_the_load(table_type: Any) -> None:
    router = new_router(table_type, 3, "hash")
    homes = {f"s{i}": router.choose("m", session=f"s{i}", tokens=10**6) for i in range(60)}
    assert set(homes.values()) == {0, 1, 2}
    router.set_eligible(1, False)
    moved = {session: router.choose("m", session=session) for session in homes}
    assert all(moved[session] == home for session, home in homes.items() if home != 1), "only its own sessions move"


def test_least_tokens_knows_no_session(table_type: Any) -> None:
    router = new_router(table_type, 3, "least_tokens")
    assert [router.choose("m", session="s", tokens=1) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("policy", "keeps"), [("session", True), ("prefix", False)])
def test_session_and_prefix_policies_look_at_their_own_key(table_type: Any, policy: RoutePolicy, keeps: bool) -> None:
    router = new_router(table_type, 3, policy, window_tokens=10_000)
    first = router.choose("m", session="s", prefix_blocks=conversation("a", 2), tokens=100)
    home = router.table.homes("m", "s", conversation("a", 2))
    assert home == ((first, -1, 0) if keeps else (-1, first, home[2]))


def test_a_policy_stays_until_another_is_said(table_type: Any) -> None:
    router = new_router(table_type, 2, "round_robin")
    router.set_model("m", [0, 1], ["alias"])
    assert [router.choose("alias") for _ in range(3)] == [0, 1, 0]
    router.set_model("m", [0, 1], policy="least_tokens")
    router.settle(0, 0, 2)
    assert [router.choose("m") for _ in range(2)] == [0, 0] or router.load(0)[0] <= router.load(1)[0]


def test_a_chats_turns_are_found_in_its_messages_as_they_came(table_type: Any) -> None:
    router = new_router(table_type, 3)
    chats = {f"question {i} of many": [{"role": "system", "content": SYSTEM}] for i in range(40)}
    homes: dict[str, int] = {}
    for turn in range(4):
        for question, messages in chats.items():
            messages.append({"role": "user", "content": f"{question}, turn {turn}"})
            text = json.dumps(messages).removesuffix("]")
            endpoint = router.choose("m", prefix_blocks=prefix_blocks(text))
            assert homes.setdefault(question, endpoint) == endpoint
            messages.append({"role": "assistant", "content": f"answer {turn}" * (turn + 1)})
    assert sorted(Counter(homes.values()).values()) == [13, 13, 14]
