"""First retry at once, then 1, 2, 4 ... 30 seconds."""

from __future__ import annotations

from laya.engines.backoff import STABLE_S, BackOff


def test_back_off_doubles_up_to_its_limit() -> None:
    back_off = BackOff()
    waits = []
    for _ in range(9):
        back_off.failed(100.0)
        waits.append(back_off.wait_s(100.0))
    assert waits == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_back_off_runs_out_with_time() -> None:
    back_off = BackOff()
    for _ in range(3):
        back_off.failed(100.0)
    assert [back_off.wait_s(now_s) for now_s in (101.0, 102.0, 200.0)] == [1.0, 0.0, 0.0]


def test_back_off_starts_anew_after_a_stable_time_and_after_reset() -> None:
    back_off = BackOff()
    for _ in range(5):
        back_off.failed(100.0)
    back_off.failed(1000.0, ready_for_s=STABLE_S)
    assert (back_off.failures, back_off.wait_s(1000.0)) == (1, 0)
    back_off.failed(1000.0)
    back_off.reset()
    assert (back_off.failures, back_off.wait_s(1000.0)) == (0, 0)
