"""The order in which requests wait: urgent ones first but nobody starves, keys in turn, first come first served."""

from __future__ import annotations

import random
from typing import Any

import pytest

from laya.gateway.account import Key
from laya.gateway.queueing import YIELD_SHARES, WaitingLine, priority_for
from laya.types import PRIORITIES, KeyGrant, Priority

TIMEOUT_S = 60.0


class Waiting:
    """Enough of an exchange to wait."""

    def __init__(self, name: str, key: str | None = None, at_s: float = 0.0) -> None:
        self.name = name
        self.key_name = key
        self.read_s = at_s


def line_of(*waiting: tuple[str, str | None, Priority, float]) -> Any:
    """A line of (name, key, priority, time of arrival)."""
    line: Any = WaitingLine(TIMEOUT_S)
    for name, key, priority, at_s in waiting:
        line.add(Waiting(name, key, at_s), priority)
    return line


def order_of(line: Any) -> str:
    return "".join(line.take().name for _ in range(len(line)))


def test_one_key_is_first_come_first_served() -> None:
    assert order_of(line_of(*((name, None, "default", 0.0) for name in "abcdef"))) == "abcdef"


def test_urgent_requests_pass_those_that_came_a_moment_before() -> None:
    line = line_of(
        ("d", None, "bulk", 0.0), ("c", None, "default", 1.0), ("b", None, "interactive", 2.0), ("a", None, "system", 3)
    )
    assert order_of(line) == "abcd"


@pytest.mark.parametrize("slow", PRIORITIES)
@pytest.mark.parametrize("urgent", PRIORITIES)
def test_request_is_passed_only_by_what_comes_within_its_share_of_the_timeout(urgent: Priority, slow: Priority) -> None:
    bound_s = max(0.0, (YIELD_SHARES[slow] - YIELD_SHARES[urgent]) * TIMEOUT_S)
    for later_s, passes in ((bound_s - 0.5, True), (bound_s + 0.5, False)):
        if later_s > 0:
            line = line_of(("old", None, slow, 0.0), ("new", None, urgent, later_s))
            assert (line.take().name == "new") is (passes and urgent != slow)


def test_nobody_is_passed_for_longer_than_half_of_what_it_may_wait() -> None:
    """A stream of urgent requests that never ends, faster than it is served."""
    line = line_of(("bulk", None, "bulk", 0.0))
    now_s, served = 0.0, ""
    while served != "bulk":
        line.add(Waiting("urgent", None, now_s), "system")
        line.add(Waiting("urgent", None, now_s), "interactive")
        served, now_s = line.take().name, now_s + 1
    # what came before its share was over is served first, and came twice as fast as it went
    assert now_s <= 2 * YIELD_SHARES["bulk"] * TIMEOUT_S + 2


def test_keys_take_turns() -> None:
    line = line_of(*((str(number), "greedy", "default", 0.0) for number in range(4)))
    for name, key in (("a", "modest"), ("x", "third"), ("b", "modest")):
        line.add(Waiting(name, key), "default")
    assert order_of(line) == "0ax1b23"


def test_key_that_comes_again_and_again_has_every_other_turn() -> None:
    line = line_of(*((str(number), "greedy", "default", 0.0) for number in range(5)))
    served = ""
    for name in "abcd":
        line.add(Waiting(name, "modest"), "default")
        served += line.take().name + line.take().name
    assert sorted(served) == sorted("0a1b2c3d")
    assert order_of(line) == "4"


def test_what_leaves_is_gone_and_its_key_keeps_its_turn() -> None:
    line: Any = WaitingLine(TIMEOUT_S)
    a, b, c = Waiting("a", "one"), Waiting("b", "one"), Waiting("c", "two")
    for each in (a, b, c):
        line.add(each, "default")
    assert line.discard(a) and not line.discard(a)
    assert a not in line and b in line and len(line) == 2
    assert order_of(line) == "bc"


def test_what_comes_back_goes_first() -> None:
    line = line_of(("a", None, "default", 0.0), ("b", None, "default", 0.0))
    first = line.take()
    line.add(Waiting("s", None, 0.0), "system")
    line.put_back(first)
    assert line.peek() is first and len(line) == 3
    assert order_of(line) == "asb"


def test_empty_line_says_so() -> None:
    line = WaitingLine(TIMEOUT_S)
    assert not line and list(line) == [] and line.take_all() == []
    with pytest.raises(LookupError):
        line.take()


def test_every_request_is_given_out_once_whatever_happens() -> None:
    chance = random.Random(3)
    line: Any = WaitingLine(TIMEOUT_S)
    there: set[Waiting] = set()
    for step in range(5000):
        act = chance.random()
        if act < 0.5 or not there:
            new = Waiting(str(step), chance.choice(["a", "b", "c", None]), step / 10)
            line.add(new, chance.choice(PRIORITIES))
            there.add(new)
        elif act < 0.8:
            taken = line.take()
            if chance.random() < 0.2:
                line.put_back(taken)
            else:
                there.remove(taken)
        else:
            gone = chance.choice(sorted(there, key=lambda each: each.name))
            assert line.discard(gone)
            there.remove(gone)
        assert len(line) == len(there)
        assert not there or line.peek() in there
    assert set(line.take_all()) == there
    assert not line


@pytest.mark.parametrize(
    ("asked", "grant", "given"),
    [
        ("system", None, "system"),
        (None, None, "default"),
        ("system", {"role": "admin"}, "system"),
        ("system", {}, "interactive"),
        ("interactive", {}, "interactive"),
        ("bulk", {}, "bulk"),
        (None, {}, "default"),
        (None, {"priority": "bulk"}, "bulk"),
        ("default", {"priority": "bulk"}, "default"),
        ("interactive", {"priority": "bulk", "max_priority": "default"}, "default"),
        ("bulk", {"max_priority": "default"}, "bulk"),
        (None, {"max_priority": "bulk"}, "bulk"),
        (None, {"priority": "system"}, "system"),
        ("system", {"max_priority": "system"}, "system"),
        ("system", {"role": "admin", "max_priority": "interactive"}, "interactive"),
    ],
)
def test_priority_is_what_is_asked_for_as_far_as_the_key_may(asked: Any, grant: Any, given: Priority) -> None:
    exchange: Any = Waiting("x")
    exchange.priority = asked
    exchange.key = None if grant is None else Key(KeyGrant(name="k", sha256="", **grant))
    assert priority_for(exchange) == given
