"""Endpoints that die and come back: nothing goes to a dead one, nothing is lost, and the others' sessions stay."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

from laya.routing import NO_ENDPOINT, UNKNOWN_MODEL, RequestRouter
from laya.routing.table_twin import RouteTable as RouteTableTwin

N_REQUESTS = 1_000_000
N_TWIN_REQUESTS = int(os.environ.get("LAYA_ROUTER_EVENTS", "30000"))  # the same proof takes the twin a minute
N_ENDPOINTS = 24


class _Day:
    """Requests that start and end at random while endpoints fail; what each came to is counted."""

    def __init__(self, router: RequestRouter, seed: int) -> None:
        self.router = router
        self.dice = random.Random(seed)
        self.running: list[tuple[int, int]] = []
        self.outcomes: Counter[str] = Counter()
        self.arrivals = 0

    def arrive(self) -> None:
        self.arrivals += 1
        model = self.dice.choice(["few", "many", "none"])
        tokens = self.dice.randrange(500)
        endpoint = self.router.choose(model, session=f"s{self.dice.randrange(200)}", tokens=tokens)
        if endpoint in (NO_ENDPOINT, UNKNOWN_MODEL):
            self.outcomes["refused"] += 1
            assert endpoint == UNKNOWN_MODEL or not self.may_serve(model)
            return
        self.running.append((endpoint, tokens))
        ready, breaker = self.router.table.inspect(endpoint)[:2]
        assert ready and breaker in (0, 3), "closed, or this is the trial"

    def may_serve(self, model: str) -> bool:
        endpoints = range(3) if model == "few" else range(3, N_ENDPOINTS)
        return any(self.router.table.is_eligible(endpoint) for endpoint in endpoints)

    def end_one(self) -> None:
        endpoint, tokens = self.running.pop(self.dice.randrange(len(self.running)))
        outcome = self.dice.choices(["served", "failed", "cancelled"], [80, 15, 5])[0]
        self.outcomes[outcome] += 1
        self.router.settle(endpoint, tokens)
        table = self.router.table
        {"served": table.served, "failed": lambda index: table.failed(index, 3), "cancelled": table.dropped}[outcome](
            endpoint
        )

    def change(self) -> None:
        endpoint = self.dice.randrange(N_ENDPOINTS)
        if self.dice.random() < 0.5:
            self.router.set_eligible(endpoint, self.dice.random() < 0.6)
        else:
            self.router.table.half_open(endpoint)


def test_a_long_day_with_dying_endpoints_loses_nothing(table_type: Any) -> None:
    router = RequestRouter(table_type(max_endpoints=N_ENDPOINTS))
    for _ in range(N_ENDPOINTS):
        router.add_endpoint()
    router.set_models([("few", range(3), ()), ("many", range(3, N_ENDPOINTS), ())])
    day = _Day(router, seed=9)
    n_requests = N_TWIN_REQUESTS if table_type is RouteTableTwin else N_REQUESTS
    while day.arrivals < n_requests:
        day.arrive()
        while day.running and day.dice.random() < 0.49 + len(day.running) / 500:
            day.end_one()
        if day.dice.random() < 0.05:
            day.change()
    while day.running:
        day.end_one()
    assert sum(day.outcomes.values()) == day.arrivals
    assert all(day.outcomes[outcome] for outcome in ("served", "refused", "failed", "cancelled"))
    assert [router.load(endpoint) for endpoint in range(N_ENDPOINTS)] == [(0, 0)] * N_ENDPOINTS


def turn_of_all(router: RequestRouter, n_turns: int) -> tuple[dict[str, int], Counter[int]]:
    """Every session asks at once, n_turns times: where each ended, and the requests that each endpoint got."""
    homes: dict[str, int] = {}
    got: Counter[int] = Counter()
    for _ in range(n_turns):
        for i in range(200):
            homes[f"session {i}"] = router.choose("m", session=f"session {i}", tokens=300)
        got.update(homes.values())
        for endpoint in homes.values():
            router.settle(endpoint, 300)
    return homes, got


def is_even(got: Counter[int], n_endpoints: int) -> bool:
    even = sum(got.values()) / n_endpoints
    return len(got) == n_endpoints and all(abs(n - even) <= 0.1 * even for n in got.values())


def test_one_of_three_dies_and_comes_back(table_type: Any) -> None:
    router = RequestRouter(table_type())
    for i in range(3):
        router.set_capacity(router.add_endpoint(name=f"m#{i}"), 0, 32_768)
    router.set_model("m", range(3))
    before, got = turn_of_all(router, 5)
    assert is_even(got, 3)
    router.set_eligible(1, False)
    during, got = turn_of_all(router, 5)
    assert is_even(got, 2)
    assert all(during[session] == home for session, home in before.items() if home != 1)
    router.set_eligible(1, True)
    after, got = turn_of_all(router, 5)
    assert is_even(got, 3)
    assert after == before, "the returned endpoint has its sessions back, and no other has moved"
