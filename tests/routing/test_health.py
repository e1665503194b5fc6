"""What needs a clock: cool-downs and trials, the retry budget, engines that make no progress."""

from __future__ import annotations

import random
from typing import Any

import pytest

from laya.routing import NO_ENDPOINT, RequestRouter
from laya.routing.health import (
    COOL_DOWN_S,
    MAX_COOL_DOWN_S,
    TRIAL_S,
    Breakers,
    ProgressWatch,
    RetryBudget,
    may_retry,
)


@pytest.fixture
def router(table_type: Any) -> RequestRouter:
    router = RequestRouter(table_type())
    router.set_model("m", [router.add_endpoint()])
    return router


def test_breaker_opens_waits_and_closes_after_one_trial(router: RequestRouter) -> None:
    breakers = Breakers(router.table, trip_after=2)
    assert breakers.next_s() is None
    assert [breakers.failed(0, 10.0), breakers.failed(0, 10.0)] == [False, True]
    assert router.choose("m") == NO_ENDPOINT
    assert breakers.next_s() == 10.0 + COOL_DOWN_S
    assert breakers.tick(10.0 + COOL_DOWN_S / 2) == []
    assert breakers.tick(10.0 + COOL_DOWN_S) == [0]
    assert [router.choose("m"), router.choose("m")] == [0, NO_ENDPOINT], "one trial"
    breakers.served(0)
    assert router.choose("m") == 0
    assert breakers.next_s() is None


def test_breaker_waits_longer_after_each_failed_trial(router: RequestRouter) -> None:
    breakers, now_s = Breakers(router.table, trip_after=1), 0.0
    assert breakers.failed(0, now_s)
    waits = []
    for _ in range(9):
        due_s = breakers.next_s()
        assert due_s is not None
        waits.append(due_s - now_s)
        now_s = due_s
        assert breakers.tick(now_s) == [0] and router.choose("m") == 0
        assert breakers.failed(0, now_s)
    assert waits[:3] == [COOL_DOWN_S, 2 * COOL_DOWN_S, 4 * COOL_DOWN_S]
    assert waits[-1] == MAX_COOL_DOWN_S
    breakers.forget(0)
    assert breakers.tick(now_s + 1000) == []


def test_breaker_takes_back_a_lost_trial_and_one_without_a_verdict(router: RequestRouter) -> None:
    breakers = Breakers(router.table, trip_after=1)
    breakers.failed(0, 0.0)
    breakers.tick(COOL_DOWN_S)
    assert router.choose("m") == 0
    breakers.dropped(0)
    assert router.choose("m") == 0, "its client left; the next request is the trial"
    assert router.choose("m") == NO_ENDPOINT
    assert breakers.tick(COOL_DOWN_S + TRIAL_S) == [0]
    assert router.choose("m") == 0


def test_retry_budget_is_a_tenth_of_requests() -> None:
    budget, dice = RetryBudget(), random.Random(0)
    n_requests = n_retries = 0
    for _ in range(20_000):
        budget.arrived()
        n_requests += 1
        if dice.random() < 0.5:
            n_retries += budget.take()
        assert n_retries <= max(1, 0.1 * n_requests)
    assert n_retries > 0.09 * n_requests


def test_retry_budget_saves_nothing_up_from_a_calm_year() -> None:
    budget = RetryBudget()
    for _ in range(10**6):
        budget.arrived()
    assert sum(budget.take() for _ in range(1000)) <= 200


def test_retry_is_before_the_first_byte_and_once() -> None:
    budget = RetryBudget()
    budget.arrived()
    assert not may_retry(n_bytes_sent=1, n_tries=1, budget=budget)
    assert not may_retry(n_bytes_sent=0, n_tries=2, budget=budget)
    assert may_retry(n_bytes_sent=0, n_tries=1, budget=budget), "the refusals above took nothing from the budget"
    assert not may_retry(n_bytes_sent=0, n_tries=1, budget=budget)


def test_an_endpoint_that_gives_nothing_is_seen() -> None:
    watch = ProgressWatch()
    assert watch.look(0, ("first", 0), 0.0) == 0
    assert watch.look(0, ("first", 0), 50.0) == 50
    assert watch.look(1, ("other", 0), 50.0) == 0, "each has its own"
    assert watch.look(0, ("first", 1), 60.0) == 0, "a token came"
    assert watch.look(0, ("first", 1), 75.0) == 15
    assert watch.look(0, None, 80.0) == 0, "it has nothing to do"
    assert watch.look(0, None, 1000.0) == 0
    assert watch.look(0, ("second", 0), 1001.0) == 0
    assert watch.look(0, ("second", 0), 1003.0) == 2
    watch.forget(0)
    assert watch.look(0, ("second", 0), 2000.0) == 0, "a new engine"


def test_breaker_of_a_new_engine_is_closed(router: RequestRouter) -> None:
    breakers = Breakers(router.table, trip_after=1)
    assert breakers.failed(0, 0.0)
    breakers.renew(0)
    assert router.choose("m") == 0
    assert breakers.next_s() is None
    assert breakers.failed(0, 1.0) and breakers.next_s() == 1.0 + COOL_DOWN_S, "nor does it wait longer"
    assert breakers.tick(1.0 + COOL_DOWN_S) == [0]
    assert router.choose("m") == 0
    breakers.renew(0)
    assert router.choose("m") == 0, "also while it was on trial"


def test_breaker_that_may_not_open_counts(router: RequestRouter) -> None:
    breakers = Breakers(router.table, trip_after=1)
    assert not any(breakers.failed(0, 0.0, may_open=False) for _ in range(100))
    assert router.choose("m") == 0
    assert breakers.served(0)
