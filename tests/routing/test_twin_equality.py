"""The native table and its twin are driven by the same random events and must give the same answers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.routing import feature_twin
from laya.routing.choice_twin import POLICIES
from laya.routing.feature_twin import MAX_BLOCKS
from laya.routing.table import hash_name, pack_feature, prefix_blocks
from laya.routing.table_twin import RouteTable as RouteTableTwin

from .names import colliding_name

native = pytest.importorskip("laya._core")

N_EVENTS = int(os.environ.get("LAYA_ROUTER_EVENTS", "30000"))  # of each long day; the whole proof is 1,000,000
N_ENDPOINTS = 12
PLAIN = b"sixteen bytes of"
NAMES = ["a", "b", "c", "alias", PLAIN, colliding_name(PLAIN)]
Event = tuple[Any, ...]


PROMPTS = [f"{system}{history}"
           for system in ("", "s" * 70, "t" * 300)
           for history in ("", "u" * 65, "v" * 500, "v" * 800, "x}" * 3, "x},x}," * 9, "w" * 90_000)]  # fmt: skip
BLOCKS = [prefix_blocks(prompt) for prompt in PROMPTS]


def model_sets() -> st.SearchStrategy[list[tuple[list[str | bytes], list[int], int]]]:
    model = st.tuples(
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=2),
        st.lists(st.integers(0, N_ENDPOINTS - 1), max_size=N_ENDPOINTS),
        st.integers(0, len(POLICIES)),
    )
    return st.lists(model, max_size=4)


endpoints = st.integers(0, N_ENDPOINTS - 1)
sessions = st.one_of(st.none(), st.integers(0, 30).map("s{}".format))
tokens = st.one_of(st.integers(0, 300), st.just(2**32 - 1))
n_seqs = st.one_of(st.integers(1, 4), st.just(65535))
events = st.one_of(
    st.tuples(st.just("route"), st.sampled_from(NAMES), sessions, tokens, n_seqs, st.sampled_from(BLOCKS)),
    st.tuples(st.just("choose"), st.sampled_from(NAMES), sessions, tokens, n_seqs),
    st.tuples(st.just("settle"), endpoints, n_seqs, tokens),
    st.tuples(st.just("set_eligible"), endpoints, st.booleans()),
    st.tuples(st.just("set_capacity"), endpoints, st.integers(0, 5), st.integers(0, 1000)),
    st.tuples(st.just("set_weight"), endpoints, st.integers(0, 3)),
    st.tuples(st.just("set_seed"), endpoints, st.integers(0, 2**64 - 1)),
    st.tuples(st.just("failed"), endpoints, st.integers(1, 3)),
    st.tuples(st.sampled_from(["served", "dropped", "half_open", "reset"]), endpoints),
    st.tuples(st.just("first_token"), endpoints, st.integers(0, 2**32 - 1)),
    st.tuples(st.just("publish"), model_sets()),
)


def happen(table: Any, event: Event) -> Any:
    """The answer of a table to an event; a refusal is an answer."""
    name, *rest = event
    if name == "route":
        model, session, wanted, sequences, blocks = rest
        known = table.homes(model, session, blocks)
        return known, table.route(model, session, 1, 1, 0, wanted, sequences, blocks)
    if name == "choose":
        model, session, wanted, sequences = rest
        session_hash = hash_name(session) if session else 0
        feature = pack_feature(
            kind=1, flags=0, tokens=wanted, model_hash=hash_name(model), session_hash=session_hash, prefix_hash=wanted
        )
        return table.choose(feature, sequences)
    try:
        return getattr(table, name)(*rest)
    except ValueError:
        return "refused"


def require_equal(events: Iterable[Event], *, session_bytes: int, window_tokens: int) -> int:
    """Number of events after which both tables had answered the same and carried the same."""
    options = {
        "max_endpoints": N_ENDPOINTS,
        "session_bytes": session_bytes,
        "prefix_bytes": session_bytes,
        "window_tokens": window_tokens,
    }
    tables = native.RouteTable(**options), RouteTableTwin(**options)
    first: list[Event] = [("publish", [(["a", "alias"], range(3), 0), (["b"], range(3, N_ENDPOINTS), 0)])]
    first += [("set_eligible", endpoint, True) for endpoint in range(N_ENDPOINTS)]
    n_events = 0
    for n_events, event in enumerate([*first, *events], start=1):
        answers = [happen(table, event) for table in tables]
        assert answers[0] == answers[1], f"event {n_events}: {event}"
    for endpoint in range(N_ENDPOINTS):
        assert tables[0].inspect(endpoint) == tables[1].inspect(endpoint)
        assert tables[0].is_eligible(endpoint) == tables[1].is_eligible(endpoint)
    return n_events


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=60), st.sampled_from([0, 64, 300, 4096]), st.sampled_from([0, 200, 8192]))
def test_native_and_twin_answer_the_same(happened: list[Event], session_bytes: int, window_tokens: int) -> None:
    require_equal(happened, session_bytes=session_bytes, window_tokens=window_tokens)


def random_events(n_events: int, n_sessions: int, seed: int) -> Iterator[Event]:
    """A long day: mostly requests and their ends, now and then an endpoint fails or the models change."""
    dice = random.Random(seed)
    running: list[tuple[int, int, int]] = []
    for _ in range(n_events):
        draw = dice.random()
        if draw < 0.52:
            wanted, sequences = dice.randrange(400), dice.choice([1, 1, 1, 2])
            session = f"s{dice.randrange(n_sessions)}" if dice.random() < 0.6 else None
            blocks = dice.choice(BLOCKS) if dice.random() < 0.5 else b""
            yield "route", dice.choice(["a", "alias", "b", "c"]), session, wanted, sequences, blocks
            running.append((dice.randrange(N_ENDPOINTS), sequences, wanted))
        elif draw < 0.9 and running:
            yield "settle", *running.pop(dice.randrange(len(running)))
        elif draw < 0.995:
            yield endpoint_event(dice)
        else:
            members = dice.sample(range(N_ENDPOINTS), dice.randrange(N_ENDPOINTS))
            policies = [dice.randrange(len(POLICIES)) for _ in range(2)]
            yield "publish", [(["a", "alias"], members, policies[0]), (["b"], range(N_ENDPOINTS), policies[1])]


def endpoint_event(dice: random.Random) -> Event:
    endpoint = dice.randrange(N_ENDPOINTS)
    return dice.choice(
        [
            ("set_eligible", endpoint, dice.random() < 0.8),
            ("set_capacity", endpoint, dice.randrange(6), dice.choice([0, 2000])),
            ("set_weight", endpoint, dice.randrange(4)),
            ("failed", endpoint, 2),
            ("served", endpoint),
            ("half_open", endpoint),
            ("dropped", endpoint),
            ("first_token", endpoint, dice.randrange(10**6)),
        ]
    )


@pytest.mark.parametrize("session_bytes", [64, 1024, 1 << 16])
def test_native_and_twin_stay_equal_over_a_long_day(session_bytes: int) -> None:
    n_events = require_equal(
        random_events(N_EVENTS, n_sessions=60, seed=session_bytes), session_bytes=session_bytes, window_tokens=500
    )
    assert n_events > N_EVENTS


def test_native_and_twin_stay_equal_when_session_stamps_run_out() -> None:
    """One set, more uses than a 16-bit stamp counts: the order of use is kept in both."""
    dice = random.Random(1)
    sessions = [*(i % 12 for i in range(65_500)), *(dice.randrange(12) for _ in range(2000))]
    asked = (("route", "b", f"s{session}", 0, 1, b"") for session in sessions)
    require_equal(asked, session_bytes=64, window_tokens=0)


@given(
    st.one_of(
        st.binary(max_size=5000),
        st.lists(st.sampled_from([b"}", b"},", b"},{", b"word ", b"a longer piece"]), max_size=300).map(b"".join),
        st.integers(60_000, 70_000).map(lambda n: b"long}, " * (n // 7)),
    )
)
def test_prompts_have_equal_blocks_in_both(prompt: bytes) -> None:
    assert prefix_blocks(prompt) == feature_twin.prefix_blocks(prompt)


def test_prompts_that_begin_alike_begin_with_equal_blocks() -> None:
    first, second = prefix_blocks("a" * 3000 + "b" * 9000), prefix_blocks("a" * 3000 + "c" * 9000)
    n_equal = sum(first[at : at + 8] == second[at : at + 8] for at in range(0, len(first), 8))
    assert first[: 8 * n_equal] == second[: 8 * n_equal], "the chain parts once and for all"
    assert prefix_blocks("a" * 3000)[: 8 * n_equal] == first[: 8 * n_equal]
    assert len(prefix_blocks("a" * 10**6)) == 8 * (MAX_BLOCKS - 160)
    assert 8 * (MAX_BLOCKS - 16) < len(prefix_blocks("{}," * 10**5)) <= 8 * MAX_BLOCKS == 8 * native.MAX_BLOCKS
    assert prefix_blocks("a" * 31) == b""


def test_a_turn_ends_a_block_of_the_next() -> None:
    turn = '[{"role": "user", "content": "hi"}'
    assert prefix_blocks(turn)[-8:] in {
        prefix_blocks(turn + ', {"role": "assistant", "content": "a long answer to that"}')[at : at + 8]
        for at in range(0, 64, 8)
    }
