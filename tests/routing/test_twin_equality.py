"""The native table and its twin are driven by the same random events and must give the same answers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.routing.table import hash_name, pack_feature
from laya.routing.table_twin import RouteTable as RouteTableTwin

from .names import colliding_name

native = pytest.importorskip("laya._core")

N_ENDPOINTS = 12
PLAIN = b"sixteen bytes of"
NAMES = ["a", "b", "c", "alias", PLAIN, colliding_name(PLAIN)]
Event = tuple[Any, ...]


def model_sets() -> st.SearchStrategy[list[tuple[list[str | bytes], list[int]]]]:
    model = st.tuples(
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=2),
        st.lists(st.integers(0, N_ENDPOINTS - 1), max_size=N_ENDPOINTS),
    )
    return st.lists(model, max_size=4)


endpoints = st.integers(0, N_ENDPOINTS - 1)
sessions = st.one_of(st.none(), st.integers(0, 30).map("s{}".format))
tokens = st.one_of(st.integers(0, 300), st.just(2**32 - 1))
n_seqs = st.one_of(st.integers(1, 4), st.just(65535))
events = st.one_of(
    st.tuples(st.just("route"), st.sampled_from(NAMES), sessions, tokens, n_seqs),
    st.tuples(st.just("choose"), st.sampled_from(NAMES), sessions, tokens, n_seqs),
    st.tuples(st.just("settle"), endpoints, n_seqs, tokens),
    st.tuples(st.just("set_eligible"), endpoints, st.booleans()),
    st.tuples(st.just("set_capacity"), endpoints, st.integers(0, 5), st.integers(0, 1000)),
    st.tuples(st.just("publish"), model_sets()),
)


def happen(table: Any, event: Event) -> Any:
    """The answer of a table to an event; a refusal is an answer."""
    name, *rest = event
    if name == "route":
        model, session, wanted, sequences = rest
        return table.route(model, session, 1, 1, 0, wanted, sequences)
    if name == "choose":
        model, session, wanted, sequences = rest
        session_hash = hash_name(session) if session else 0
        feature = pack_feature(kind=1, flags=0, tokens=wanted, model_hash=hash_name(model), session_hash=session_hash)
        return table.choose(feature, sequences)
    try:
        return getattr(table, name)(*rest)
    except ValueError:
        return "refused"


def require_equal(events: Iterable[Event], *, session_bytes: int, window_tokens: int) -> int:
    """Number of events after which both tables had answered the same and carried the same."""
    options = {"max_endpoints": N_ENDPOINTS, "session_bytes": session_bytes, "window_tokens": window_tokens}
    tables = native.RouteTable(**options), RouteTableTwin(**options)
    first: list[Event] = [("publish", [(["a", "alias"], range(3)), (["b"], range(3, N_ENDPOINTS))])]
    first += [("set_eligible", endpoint, True) for endpoint in range(N_ENDPOINTS)]
    n_events = 0
    for n_events, event in enumerate([*first, *events], start=1):
        answers = [happen(table, event) for table in tables]
        assert answers[0] == answers[1], f"event {n_events}: {event}"
    for endpoint in range(N_ENDPOINTS):
        assert tables[0].load(endpoint) == tables[1].load(endpoint)
        assert tables[0].is_eligible(endpoint) == tables[1].is_eligible(endpoint)
    return n_events


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=60), st.sampled_from([0, 64, 300, 4096]), st.sampled_from([0, 200, 8192]))
def test_native_and_twin_answer_the_same(happened: list[Event], session_bytes: int, window_tokens: int) -> None:
    require_equal(happened, session_bytes=session_bytes, window_tokens=window_tokens)


def random_events(n_events: int, n_sessions: int, seed: int) -> Iterable[Event]:
    """A long day: mostly requests and their ends, now and then an endpoint or the models change."""
    dice = random.Random(seed)
    running: list[tuple[int, int, int]] = []
    for _ in range(n_events):
        draw = dice.random()
        if draw < 0.55:
            wanted, sequences = dice.randrange(400), dice.choice([1, 1, 1, 2])
            session = f"s{dice.randrange(n_sessions)}" if dice.random() < 0.8 else None
            yield "route", dice.choice(["a", "alias", "b", "c"]), session, wanted, sequences
            running.append((dice.randrange(N_ENDPOINTS), sequences, wanted))
        elif draw < 0.95 and running:
            yield "settle", *running.pop(dice.randrange(len(running)))
        elif draw < 0.98:
            yield "set_eligible", dice.randrange(N_ENDPOINTS), dice.random() < 0.7
        elif draw < 0.995:
            yield "set_capacity", dice.randrange(N_ENDPOINTS), dice.randrange(6), dice.choice([0, 2000])
        else:
            members = dice.sample(range(N_ENDPOINTS), dice.randrange(N_ENDPOINTS))
            yield "publish", [(["a", "alias"], members), (["b"], range(N_ENDPOINTS)), (["c"], [])]


@pytest.mark.parametrize("session_bytes", [64, 1024, 1 << 16])
def test_native_and_twin_stay_equal_over_a_long_day(session_bytes: int) -> None:
    n_events = require_equal(
        random_events(30_000, n_sessions=60, seed=session_bytes), session_bytes=session_bytes, window_tokens=500
    )
    assert n_events > 30_000


def test_native_and_twin_stay_equal_when_session_stamps_run_out() -> None:
    """One set, more uses than a 16-bit stamp counts: the order of use is kept in both."""
    dice = random.Random(1)
    asked = (("route", "b", f"s{dice.randrange(12)}", 0, 1) for _ in range(90_000))
    require_equal(asked, session_bytes=64, window_tokens=0)
