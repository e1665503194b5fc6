"""Owns: how sure a figure is: intervals of shares, of means and of ratios, and whether one of two sides wins by chance.

Tokens of one window share their context, so windows are drawn again and not tokens. Knows no model and no task.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054  # of the normal distribution, for 95 %
N_RESAMPLES = 2000
_SEED = 0

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Interval(msgspec.Struct, frozen=True):
    """A figure and the 95 % interval it lies in. low, high: None where one window of text gives none."""

    value: float
    low: float | None
    high: float | None

    @property
    def least(self) -> float:
        return self.value if self.low is None else self.low

    @property
    def most(self) -> float:
        return self.value if self.high is None else self.high


def wilson(n_right: int, n: int) -> Interval:
    """A share, by Wilson's score: right for few items, and for none or all of them right."""
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    share, z2 = n_right / n, _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def bootstrap(values: Numbers, windows: Numbers, of: Callable[[Numbers], Numbers] | None = None) -> Interval:
    """The mean over all tokens, and where means of windows drawn with replacement lie; of one window that is unknown.

    values: of each token. windows: the number of each token's window. of: what is told instead of the mean, such as
    its exponential.
    """
    _, index = np.unique(windows, return_inverse=True)
    counts = np.bincount(index).astype(np.float64)
    sums = np.bincount(index, weights=values)
    told = of or (lambda mean: mean)
    value = float(told(np.asarray(sums.sum() / counts.sum())))
    if len(counts) == 1:
        return Interval(value, None, None)
    drawn = np.random.default_rng(_SEED).integers(len(counts), size=(N_RESAMPLES, len(counts)))
    means = told(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def sign_test(n_wins: int, n_losses: int) -> float:
    """How likely chance alone gives a lead this large either way, of two equal sides (McNemar's exact test)."""
    n = n_wins + n_losses
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(max(n_wins, n_losses), n + 1)) / 2**n
    return float(min(1.0, 2 * tail))
