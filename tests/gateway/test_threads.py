"""How cores are divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laya.gateway.threads import parts


@given(st.integers(-2, 64), st.lists(st.integers(1, 32), max_size=8))
def test_shares_are_equal_as_far_as_they_can_be_and_sum_to_the_cores(n_cores: int, wanted: list[int]) -> None:
    shares = parts(n_cores, wanted)
    assert len(shares) == len(wanted)
    assert all(1 <= share <= most for share, most in zip(shares, wanted, strict=True))
    assert sum(shares) == max(len(wanted), min(n_cores, sum(wanted)))
    unbounded = [share for share, most in zip(shares, wanted, strict=True) if share < most]
    assert not unbounded or max(shares) - min(unbounded) <= 1


def test_what_one_does_not_want_the_others_have() -> None:
    assert parts(8, [8, 8, 2]) == [3, 3, 2]
    assert parts(2, [2, 2]) == [1, 1]
    assert parts(1, [4, 4]) == [1, 1]
