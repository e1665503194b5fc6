"""Finished turns on disk: whose they are, what they go on from, when they are forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept_turns import MOST, turn

from laya.errors import NotFound, PayloadTooLarge, PreviousResponseNotFound
from laya.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "laya.db")


def test_a_turn_comes_back_as_it_was_kept(store: Store, tmp_path: Path) -> None:
    store.keep_response(turn("a"))
    with Store(tmp_path / "laya.db") as again:
        assert again.response("a", "ann") == turn("a")


def test_another_owner_finds_nothing(store: Store) -> None:
    store.keep_response(turn("a"))
    for act in (store.response, store.drop_response):
        with pytest.raises(NotFound, match="Response with id 'a' not found"):
            act("a", "bob")
    with pytest.raises(PreviousResponseNotFound):
        store.turns_until("a", "bob", MOST)
    assert store.response("a", "ann").id == "a"


def test_turns_come_oldest_first_and_branches_stay_apart(store: Store) -> None:
    for each in (turn("a"), turn("b", "a"), turn("c", "b"), turn("other", "a"), turn("z", root="z")):
        store.keep_response(each)
    assert [each.id for each in store.turns_until("c", "ann", MOST)] == ["a", "b", "c"]
    assert [each.id for each in store.turns_until("other", "ann", MOST)] == ["a", "other"]


def test_conversation_with_a_turn_deleted_says_which(store: Store) -> None:
    for each in (turn("a"), turn("b", "a"), turn("c", "b")):
        store.keep_response(each)
    store.drop_response("b", "ann")
    with pytest.raises(PreviousResponseNotFound, match="'b' not found, which 'c' goes on from"):
        store.turns_until("c", "ann", MOST)
    with pytest.raises(PreviousResponseNotFound, match=r"'b' not found\.$"):
        store.turns_until("b", "ann", MOST)


def test_conversation_that_is_too_large_is_refused_before_it_is_read(store: Store) -> None:
    store.keep_response(turn("a"))
    store.keep_response(turn("b", "a"))
    n_bytes = 2 * turn("a").n_bytes
    assert len(store.turns_until("b", "ann", n_bytes)) == 2
    with pytest.raises(PayloadTooLarge, match=f"{n_bytes} bytes; the limit is {n_bytes - 1}"):
        store.turns_until("b", "ann", n_bytes - 1)


def test_old_conversations_go_whole_and_those_still_used_stay(store: Store) -> None:
    for each in (turn("a", at_s=1), turn("b", "a", at_s=9), turn("y", root="y", at_s=2), turn("z", "y", "y", at_s=3)):
        store.keep_response(each)
    assert store.prune_responses(before_s=4, most_bytes=None) == 1
    assert [each.id for each in store.turns_until("b", "ann", MOST)] == ["a", "b"]
    with pytest.raises(NotFound):
        store.response("z", "ann")


def test_bytes_above_the_limit_go_with_what_is_unused_longest(store: Store) -> None:
    for index in range(5):
        store.keep_response(turn(str(index), root=str(index), at_s=index))
    assert store.prune_responses(before_s=None, most_bytes=3 * turn("0").n_bytes) == 2
    assert [name for name in "01234" if _is_there(store, name)] == ["2", "3", "4"]
    assert store.prune_responses(before_s=None, most_bytes=0) == 3


def _is_there(store: Store, name: str) -> bool:
    try:
        return store.response(name, "ann").id == name
    except NotFound:
        return False
