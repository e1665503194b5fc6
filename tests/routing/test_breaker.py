"""The circuit breaker as the tables hold it: who may be chosen, who gets the one trial, what closes it."""

from __future__ import annotations

from typing import Any

import pytest

from laya.routing import NO_ENDPOINT, RequestRouter
from laya.routing.endpoint_twin import CLOSED, HALF_OPEN, OPEN, TRIAL


@pytest.fixture
def table(table_type: Any) -> Any:
    table = table_type(max_endpoints=4)
    table.publish([(["m"], [0, 1], 0), (["one"], [2], 0)])
    for endpoint in range(3):
        table.set_eligible(endpoint, True)
    return table


def ask(table: Any, model: str = "one", session: str | None = None) -> int:
    return table.route(model, session, 1, 0, 0, 10, 1)


def breaker(table: Any, endpoint: int = 2) -> int:
    return table.inspect(endpoint)[1]


def trip(table: Any, endpoint: int = 2) -> None:
    assert [table.failed(endpoint, 3) for _ in range(4)] == [False, False, True, False]


def test_errors_in_a_row_open_it_and_an_answer_between_starts_again(table: Any) -> None:
    table.failed(2, 3)
    table.failed(2, 3)
    table.served(2)
    assert not table.failed(2, 3)
    assert ask(table) == 2
    table.served(2)
    trip(table)
    assert breaker(table) == OPEN and ask(table) == NO_ENDPOINT
    assert not table.is_eligible(2)
    assert table.inspect(2)[10] == 7, "every error is counted"


def test_half_open_lets_one_trial_through(table: Any) -> None:
    trip(table)
    assert table.half_open(2) and breaker(table) == HALF_OPEN
    assert ask(table) == 2
    assert breaker(table) == TRIAL and ask(table) == NO_ENDPOINT
    table.served(2)
    assert breaker(table) == CLOSED and ask(table) == 2
    assert not table.half_open(2), "a closed one has no trial"


def test_a_failed_trial_opens_it_again(table: Any) -> None:
    trip(table)
    table.half_open(2)
    ask(table)
    assert table.failed(2, 3) and breaker(table) == OPEN


def test_a_trial_without_a_verdict_is_given_back(table: Any) -> None:
    trip(table)
    table.half_open(2)
    ask(table)
    table.dropped(2)
    assert breaker(table) == HALF_OPEN and ask(table) == 2
    assert table.half_open(2) and ask(table) == 2, "or taken back by who has a clock"


def test_a_late_answer_does_not_close_an_open_one(table: Any) -> None:
    trip(table)
    table.served(2)
    assert breaker(table) == OPEN


def test_a_session_of_an_open_endpoint_is_served_elsewhere_and_comes_back(table: Any) -> None:
    home = ask(table, "m", "s")
    table.settle(home, 1, 10)
    trip(table, home)
    assert [ask(table, "m", "s") for _ in range(2)] == [1 - home] * 2
    table.half_open(home)
    assert ask(table, "m", "s") == home, "the trial"
    table.served(home)
    assert ask(table, "m", "s") == home


def test_ttft_average_moves_by_an_eighth(table: Any) -> None:
    for ttft_us in (800, 1600, 0):
        table.first_token(2, ttft_us)
    assert table.inspect(2)[12] == 787
    table.reset(2)
    assert table.inspect(2)[10:] == (0, 0, 0)


def test_a_recycled_index_has_no_history(table_type: Any) -> None:
    router = RequestRouter(table_type(max_endpoints=2))
    endpoint = router.add_endpoint()
    router.table.failed(endpoint, 1)
    router.remove_endpoint(endpoint)
    assert router.add_endpoint() == endpoint
    router.set_model("m", [endpoint])
    assert router.choose("m") == endpoint
