"""What a route table decides, said of both: the native one and its twin."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.routing import feature_twin
from laya.routing.table import BAD_FEATURE, NO_ENDPOINT, UNKNOWN_MODEL, hash_name, pack_feature, unpack_feature

from .names import colliding_name


def ask(table: Any, model: str | bytes = "m", session: str | None = None, tokens: int = 100, n_seqs: int = 1) -> int:
    return table.route(model, session, 1, 0, 0, tokens, n_seqs)


def new_table(table_type: Any, n_endpoints: int = 3, **options: int) -> Any:
    """One model, `m` with alias `alias`, on endpoints that are all eligible."""
    table = table_type(max_endpoints=8, **options)
    table.publish([(("m", "alias"), range(n_endpoints), 0)])
    for endpoint in range(n_endpoints):
        table.set_eligible(endpoint, True)
    return table


# ---------------------------------------------------------------------------------------------- feature and hash


def test_feature_layout_is_the_documented_one() -> None:
    feature = pack_feature(kind=2, flags=1, tokens=70000, model_hash=3, session_hash=4, prefix_hash=5)
    assert feature == struct.pack("<BBHIQQQ", 1, 2, 1, 70000, 3, 4, 5)
    assert unpack_feature(feature) == (1, 2, 1, 70000, 3, 4, 5)


@given(
    kind=st.integers(0, 255),
    flags=st.integers(0, 65535),
    tokens=st.integers(0, 2**32 - 1),
    hashes=st.tuples(*[st.integers(0, 2**64 - 1)] * 3),
)
def test_feature_packs_the_same_in_both(kind: int, flags: int, tokens: int, hashes: tuple[int, int, int]) -> None:
    fields = {"model_hash": hashes[0], "session_hash": hashes[1], "prefix_hash": hashes[2]}
    feature = pack_feature(kind=kind, flags=flags, tokens=tokens, **fields)
    assert feature == feature_twin.pack_feature(kind=kind, flags=flags, tokens=tokens, **fields)
    assert unpack_feature(feature) == feature_twin.unpack_feature(feature) == (1, kind, flags, tokens, *hashes)


@given(st.one_of(st.binary(max_size=80), st.text(st.characters(codec=None), max_size=40)))
def test_hash_is_bit_equal_in_both(name: str | bytes) -> None:
    assert hash_name(name) == feature_twin.hash_name(name) != 0


def test_hash_stays_what_it_was() -> None:
    """The hash is part of the feature's layout: a process of another version must make the same one."""
    assert feature_twin.hash_name("") == 0xE220A8397B1DCDAF
    assert feature_twin.hash_name("smollm2") == 0x3E356E36CD5E5C2F
    assert feature_twin.hash_name("a name of more than eight bytes") == 0xDE5BBD3B92CBC547


@pytest.mark.parametrize("pack", [pack_feature, feature_twin.pack_feature])
def test_feature_refuses_what_does_not_fit(pack: Any) -> None:
    with pytest.raises(ValueError, match="tokens must be 0 to 4294967295, not -1"):
        pack(kind=1, flags=0, tokens=-1, model_hash=1)
    with pytest.raises(ValueError, match="kind must be 0 to 255"):
        pack(kind=256, flags=0, tokens=0, model_hash=1)


# ---------------------------------------------------------------------------------------------- which endpoint


def test_choose_takes_the_least_reserved_tokens(table_type: Any) -> None:
    table = new_table(table_type)
    assert [ask(table, tokens=tokens) for tokens in (300, 200, 100)] == [0, 1, 2]
    assert ask(table) == 2


def test_choose_breaks_ties_by_sequences_then_by_index(table_type: Any) -> None:
    table = new_table(table_type)
    assert [ask(table, n_seqs=n_seqs) for n_seqs in (2, 1, 1)] == [0, 1, 2]
    assert [ask(table, tokens=0), ask(table, tokens=0), ask(table, tokens=0)] == [1, 2, 0]


def test_choose_prefers_an_endpoint_with_room(table_type: Any) -> None:
    table = new_table(table_type, n_endpoints=2)
    table.set_capacity(0, 1, 0)
    table.set_capacity(1, 4, 1000)
    assert [ask(table, tokens=10), ask(table, tokens=500)] == [0, 1]
    assert ask(table, tokens=10) == 1, "endpoint 0 has fewer tokens but no sequence left"
    assert ask(table, tokens=600) == 0, "none has room, so the fewest tokens again"


def test_choose_skips_ineligible_endpoints(table_type: Any) -> None:
    table = new_table(table_type)
    table.set_eligible(0, False)
    assert ask(table) == 1
    table.set_eligible(1, False)
    table.set_eligible(2, False)
    assert ask(table) == NO_ENDPOINT
    assert table.load(0) == (0, 0)


def test_choose_by_feature_answers_like_route(table_type: Any) -> None:
    table = new_table(table_type)
    feature = pack_feature(kind=1, flags=0, tokens=7, model_hash=hash_name("alias"), session_hash=hash_name("s"))
    chosen = table.choose(feature, 2)
    assert table.load(chosen) == (2, 7)
    assert ask(table, session="s") == chosen
    assert table.choose(pack_feature(kind=1, flags=0, tokens=7, model_hash=1)) == UNKNOWN_MODEL
    assert table.choose(b"\2" + feature[1:]) == BAD_FEATURE
    with pytest.raises(ValueError, match="32 bytes"):
        table.choose(feature[1:])


def test_more_endpoints_than_a_slot_holds_are_all_used(table_type: Any) -> None:
    table = table_type(max_endpoints=32)
    table.publish([(["small"], [31], 0), (["big"], [*range(20), 3, 3], 0)])
    for endpoint in range(32):
        table.set_eligible(endpoint, True)
    assert {ask(table, "big") for _ in range(400)} == set(range(20))
    assert ask(table, "small") == 31


# ---------------------------------------------------------------------------------------------- counters


def test_counters_follow_the_life_of_requests(table_type: Any) -> None:
    table = new_table(table_type, n_endpoints=1)
    ask(table, tokens=100, n_seqs=2)
    ask(table, tokens=50)
    assert table.load(0) == (3, 150)
    table.settle(0, 2, 100)
    assert table.load(0) == (1, 50)
    table.settle(0, 1, 50)
    assert table.load(0) == (0, 0)


def test_settle_never_passes_zero(table_type: Any) -> None:
    table = new_table(table_type)
    ask(table)
    table.settle(0, 5, 10_000)
    assert table.load(0) == (0, 0)
    with pytest.raises(IndexError, match="endpoint must be 0 to 7, not -1"):
        table.settle(UNKNOWN_MODEL, 1, 1)


def test_counters_saturate(table_type: Any) -> None:
    table = new_table(table_type, n_endpoints=1)
    assert all(ask(table, tokens=2**32 - 1, n_seqs=65535) == 0 for _ in range(300))
    assert table.load(0) == (2**24 - 1, 2**39 - 1)
    table.settle(0, 65535, 2**39 - 1)
    assert table.load(0) == (2**24 - 1 - 65535, 0)


def test_route_refuses_numbers_out_of_range(table_type: Any) -> None:
    table = new_table(table_type)
    with pytest.raises(ValueError, match="tokens"):
        ask(table, tokens=2**32)
    with pytest.raises(ValueError, match="n_seqs must be 1 to 65535, not 0"):
        ask(table, n_seqs=0)
    with pytest.raises(TypeError, match="a name must be str or bytes"):
        ask(table, model=3)  # type: ignore[arg-type]
    assert table.load(0) == (0, 0)


# ---------------------------------------------------------------------------------------------- sessions


def test_session_stays_on_its_endpoint(table_type: Any) -> None:
    table = new_table(table_type)
    home = ask(table, session="s")
    assert [ask(table, session="s") for _ in range(5)] == [home] * 5
    assert ask(table, "alias", session="s") == home, "an alias is the same model"
    assert ask(table, session="other") != home, "a newcomer goes where there is no more than the average"


def test_session_leaves_an_endpoint_beyond_the_window(table_type: Any) -> None:
    table = new_table(table_type, window_tokens=250)
    home = ask(table, session="s")
    assert [ask(table, session="s") for _ in range(2)] == [home, home]
    moved = ask(table, session="s")
    assert moved == (0 if home else 1), "300 tokens ahead of the least loaded"
    assert ask(table, session="s") == moved, "and it stays where it went"


def test_session_window_is_half_of_the_pool(table_type: Any) -> None:
    table = new_table(table_type, window_tokens=0)
    for endpoint in range(3):
        table.set_capacity(endpoint, 0, 400)
    homes = [ask(table, session="s") for _ in range(4)]
    assert homes[:3] == [homes[0]] * 3
    assert homes[3] != homes[0]


def test_session_leaves_a_full_endpoint_only_for_one_with_room(table_type: Any) -> None:
    table = new_table(table_type, n_endpoints=2)
    table.set_capacity(0, 1, 0)
    table.set_capacity(1, 1, 0)
    first = ask(table, session="s")
    assert [ask(table, session="s"), ask(table, session="s")] == [1 - first, 1 - first]


def test_sessions_of_a_dead_endpoint_come_back_and_others_stay(table_type: Any) -> None:
    table = new_table(table_type)
    home = {f"s{i}": ask(table, session=f"s{i}", tokens=1) for i in range(30)}
    table.set_eligible(1, False)
    for _ in range(2):
        during = {session: ask(table, session=session, tokens=0) for session in home}
        assert all(during[session] == endpoint for session, endpoint in home.items() if endpoint != 1)
        assert all(endpoint != 1 for endpoint in during.values())
    table.set_eligible(1, True)
    assert {session: ask(table, session=session, tokens=0) for session in home} == home


def test_sessions_of_an_idle_table_are_where_they_were_before_a_restart(table_type: Any) -> None:
    before, after = new_table(table_type), new_table(table_type)
    sessions = [f"s{i}" for i in range(60)]
    homes = {session: ask(before, session=session, tokens=0) for session in sessions}
    assert set(homes.values()) == {0, 1, 2}
    assert {session: ask(after, session=session, tokens=0) for session in reversed(sessions)} == homes


def test_empty_session_is_no_session(table_type: Any) -> None:
    table = new_table(table_type)
    assert [ask(table, session="") for _ in range(3)] == [0, 1, 2]


def test_session_memory_is_fixed_and_gives_up_the_idle_one(table_type: Any) -> None:
    table = new_table(table_type, session_bytes=64, window_tokens=1 << 30)
    assert table.session_capacity == 8
    ask(table, session="idle", tokens=1)
    for i in range(7):
        ask(table, session=f"s{i}", tokens=1000)
    assert table.homes("m", "idle")[0] >= 0
    ask(table, session="one more", tokens=0)
    assert table.homes("m", "idle")[0] == -1, "forgotten, so it is placed like a newcomer"
    assert all(table.homes("m", f"s{i}")[0] >= 0 for i in range(7))


# ---------------------------------------------------------------------------------------------- names


def test_unknown_name_with_a_known_hash_is_unknown(table_type: Any) -> None:
    name = b"sixteen bytes of"
    other = colliding_name(name)
    assert other != name
    assert hash_name(other) == hash_name(name)
    table = table_type()
    table.publish([([name], [0], 0)])
    table.set_eligible(0, True)
    assert ask(table, name) == 0
    assert ask(table, other) == UNKNOWN_MODEL


def test_publish_refuses_two_names_with_one_hash(table_type: Any) -> None:
    name = b"sixteen bytes of"
    table = new_table(table_type)
    with pytest.raises(ValueError, match="have the same 64-bit hash; rename one of them"):
        table.publish([([name], [0], 0), ([colliding_name(name)], [1], 0)])
    assert ask(table) == 0, "the old set is still in force"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([(["a"], [0], 0), (["b", "a"], [1], 0)], "the model name .*a.* is used twice"),
        ([([], [0], 0)], "a model needs a name"),
        ([(["a"], [8], 0)], "endpoint"),
        ([(["a"], [-1], 0)], "endpoint"),
        ([(["a"], [0], 8)], "policy must be 0 to 7, not 8"),
    ],
)
def test_publish_refuses_a_wrong_set_and_keeps_the_old_one(table_type: Any, models: Any, message: str) -> None:
    table = new_table(table_type)
    with pytest.raises(ValueError, match=message):
        table.publish(models)
    assert ask(table) == 0


def test_names_of_any_text_are_routed(table_type: Any) -> None:
    names = ["modèle", "模型", "", "\ud800", "a" * 1000, "nul\0inside"]
    table = table_type()
    table.publish([([name], [endpoint], 0) for endpoint, name in enumerate(names)])
    for endpoint in range(len(names)):
        table.set_eligible(endpoint, True)
    assert [ask(table, name) for name in names] == list(range(len(names)))
    assert ask(table, "nul\0other") == UNKNOWN_MODEL
    assert ask(table, "nul") == UNKNOWN_MODEL


def test_many_models_are_published_at_once(table_type: Any) -> None:
    table = table_type(max_endpoints=100)
    table.publish([([f"model-{i}"], [i % 100], 0) for i in range(5000)])
    for endpoint in range(100):
        table.set_eligible(endpoint, True)
    assert all(ask(table, f"model-{i}", tokens=0) == i % 100 for i in range(5000))
    assert ask(table, "model-5000") == UNKNOWN_MODEL
