"""Ledger and admission: nothing is promised twice, and free + reserved is the total whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.errors import InsufficientMemory
from laya.memory import Admission, Ledger
from laya.types import GIB


def test_ledger_reserves_until_full_and_names_both_figures() -> None:
    ledger = Ledger()
    ledger.set_total("cpu", 10 * GIB)
    ledger.reserve("a", "cpu", 6 * GIB)
    with pytest.raises(InsufficientMemory, match=r"'b' needs 5.0 GiB of 4.0 GiB that are free on cpu") as caught:
        ledger.reserve("b", "cpu", 5 * GIB)
    assert caught.value.details["need_bytes"] == 5 * GIB
    assert caught.value.details["available_bytes"] == 4 * GIB
    assert ledger.reserved("cpu") == 6 * GIB
    assert ledger.free("cpu") == 4 * GIB


def test_ledger_release_gives_back_every_device_and_ignores_strangers() -> None:
    ledger = Ledger()
    ledger.set_total("cpu", 100)
    ledger.set_total("threads", 4)
    ledger.reserve("a", "cpu", 60)
    ledger.reserve("a", "threads", 3)
    ledger.release("a")
    ledger.release("nobody")
    assert (ledger.free("cpu"), ledger.free("threads")) == (100, 4)
    ledger.reserve("a", "threads", 3)
    ledger.reserve("a", "cpu", 60)
    ledger.give_back("a", "threads")
    assert (ledger.free("cpu"), ledger.free("threads")) == (40, 4)


def test_ledger_turns_what_was_promised_into_what_is_used() -> None:
    ledger = Ledger()
    ledger.set_total("cpu", 100)
    ledger.reserve("a", "cpu", 60)
    ledger.post_measured("a", "cpu", 55)
    assert (ledger.free("cpu"), ledger.reserved("cpu"), ledger.used("cpu"), ledger.held("cpu")) == (40, 5, 55, 60)
    ledger.post_measured("nobody", "cpu", 55)
    assert ledger.used("cpu") == 55
    ledger.release("a")
    assert (ledger.free("cpu"), ledger.used("cpu")) == (100, 0)


def test_ledger_takes_what_an_engine_holds_above_its_promise_from_what_is_free() -> None:
    ledger = Ledger()
    ledger.set_total("cpu", 100)
    ledger.reserve("a", "cpu", 60)
    ledger.post_measured("a", "cpu", 75)
    assert (ledger.free("cpu"), ledger.reserved("cpu"), ledger.used("cpu")) == (25, 0, 75)
    with pytest.raises(InsufficientMemory):
        ledger.reserve("b", "cpu", 30)
    ledger.reserve("a", "cpu", 60)  # loaded again: what the last engine held says nothing of the next one
    assert (ledger.free("cpu"), ledger.used("cpu")) == (40, 0)


def test_ledger_is_overdrawn_only_by_who_insists_and_says_so() -> None:
    ledger = Ledger()
    ledger.set_total("cpu", 100)
    ledger.reserve("a", "cpu", 130, overdraw=True)
    assert ledger.snapshot()["cpu"] == {
        "total": 100,
        "free": -30,
        "reserved": 130,
        "used": 0,
        "overdrawn": True,
        "owners": {"a": {"promised": 130, "measured": 0}},
    }
    with pytest.raises(InsufficientMemory) as caught:
        ledger.reserve("b", "cpu", 1)
    assert caught.value.details["available_bytes"] == 0


def test_ledger_second_reservation_replaces_the_first() -> None:
    ledger = Ledger()
    ledger.set_total("cpu", 100)
    ledger.reserve("a", "cpu", 60)
    ledger.reserve("a", "cpu", 90)
    assert (ledger.free("cpu"), ledger.reserved("cpu"), ledger.held_by("a", "cpu")) == (10, 90, 90)


def test_ledger_total_may_shrink_below_what_is_reserved() -> None:
    ledger = Ledger()
    ledger.set_total("cpu", 100)
    ledger.reserve("a", "cpu", 80)
    ledger.set_total("cpu", 50)
    assert ledger.free("cpu") == -30
    with pytest.raises(InsufficientMemory) as caught:
        ledger.reserve("b", "cpu", 1)
    assert caught.value.details["available_bytes"] == 0


def test_ledger_counts_threads_in_cores() -> None:
    ledger = Ledger()
    ledger.set_total("threads", 2)
    ledger.reserve("a", "threads", 1)
    with pytest.raises(InsufficientMemory, match="'b' needs 2 of 1 that are free on threads"):
        ledger.reserve("b", "threads", 2)


@given(st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_ledger_balances_over_random_schedules(seed: int) -> None:
    rng, ledger = random.Random(seed), Ledger()
    held: dict[str, int] = {}
    promised: dict[str, int] = {}
    total = 0
    for _ in range(60):
        owner = f"m{rng.randrange(5)}"
        action = rng.choice(("reserve", "release", "total", "measured"))
        if action == "total":
            total = rng.randrange(1000)
            ledger.set_total("cpu", total)
        elif action == "release":
            ledger.release(owner)
            held.pop(owner, None)
        elif action == "measured":
            n_bytes = rng.randrange(500)
            ledger.post_measured(owner, "cpu", n_bytes)
            if owner in held:
                held[owner] = max(promised[owner], n_bytes)
        else:
            amount = rng.randrange(400)
            others = sum(value for name, value in held.items() if name != owner)
            try:
                ledger.reserve(owner, "cpu", amount)
            except InsufficientMemory:
                assert amount > total - others
            else:
                assert amount <= total - others
                held[owner] = promised[owner] = amount
                if not amount:
                    del held[owner]
        assert ledger.held("cpu") == sum(held.values())
        assert ledger.free("cpu") + ledger.reserved("cpu") + ledger.used("cpu") == total


def test_admission_counts_sequences_where_each_has_its_slot() -> None:
    admission = Admission(2)
    assert admission.try_reserve(1, 10**9)
    assert admission.free_tokens is None
    assert not admission.try_reserve(2, 0)
    assert admission.try_reserve(1, 0)
    assert not admission.try_reserve(1, 0)
    admission.release(1, 10**9)
    assert admission.free_seqs == 1


def test_admission_keeps_the_sum_of_promises_within_the_pool() -> None:
    admission = Admission(4, 1000)
    assert admission.try_reserve(1, 600)
    assert not admission.try_reserve(1, 500)
    assert admission.can_ever_fit(1, 500)
    assert not admission.can_ever_fit(1, 1001)
    assert not admission.can_ever_fit(5, 10)
    assert admission.try_reserve(2, 400)
    assert (admission.free_tokens, admission.reserved_tokens, admission.free_seqs) == (0, 1000, 1)
    admission.release(1, 600)
    assert admission.try_reserve(1, 500)


def test_admission_release_without_reservation_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="released that were not reserved"):
        Admission(2).release(1, 0)
    admission = Admission(2, 100)
    assert admission.try_reserve(1, 50)
    with pytest.raises(AssertionError, match="tokens were released"):
        admission.release(1, 60)


@given(st.integers(0, 1 << 30), st.sampled_from([None, 64, 1000]))
@settings(max_examples=25, deadline=None)
def test_admission_balances_over_random_schedules(seed: int, pool: int | None) -> None:
    rng, admission = random.Random(seed), Admission(4, pool)
    live: list[tuple[int, int]] = []
    for _ in range(80):
        if live and rng.random() < 0.45:
            admission.release(*live.pop(rng.randrange(len(live))))
        else:
            asked = (rng.randint(1, 4), rng.randrange(400))
            if admission.try_reserve(*asked):
                assert admission.can_ever_fit(*asked)
                live.append(asked)
        assert admission.reserved_seqs == sum(n_seqs for n_seqs, _ in live) <= 4
        if pool is not None:
            assert admission.reserved_tokens == sum(tokens for _, tokens in live) <= pool
