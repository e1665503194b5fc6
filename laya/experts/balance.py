"""Owns: measures of how evenly one layer's experts are used. Needs no torch.

Everything is of one layer: layers that are averaged first hide that each of them is uneven.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import SupportsFloat

import msgspec

BAND = (0.8, 1.2)
"""Of the fair share 1 / n_experts: what counts as even; 10 to 15 % of 8 experts."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's use of its experts."""

    share: list[float]
    """Of the assignments; fair is 1 / n_experts."""
    max_vio: float
    """Largest share / fair share - 1."""
    cv: float
    """Standard deviation / mean."""
    entropy: float
    """Over log(n_experts): 1 where it is even."""
    gini: float
    n_dead: int
    """Experts without an assignment."""

    @classmethod
    def of(cls, counts: Iterable[SupportsFloat]) -> Balance:
        """counts: [n_experts], a list or a tensor. Raises ValueError where nothing was counted."""
        values = [float(count) for count in counts]
        total = sum(values)
        if total <= 0:
            raise ValueError("no assignment was counted")
        share = [value / total for value in values]
        n_experts, fair = len(share), 1 / len(share)
        ordered = sorted(share)
        weighted = sum((2 * rank - n_experts - 1) * part for rank, part in enumerate(ordered, start=1))
        deviation = math.sqrt(sum((part - fair) ** 2 for part in share) / n_experts)
        entropy = -sum(part * math.log(part) for part in share if part > 0)
        return cls(
            share=share,
            max_vio=max(share) / fair - 1,
            cv=deviation / fair,
            entropy=entropy / math.log(n_experts) if n_experts > 1 else 1.0,
            gini=weighted / n_experts,
            n_dead=sum(part == 0 for part in share),
        )

    @property
    def outside(self) -> list[int]:
        """Experts whose share is not within `BAND`."""
        low, high = (bound / len(self.share) for bound in BAND)
        return [expert for expert, part in enumerate(self.share) if not low - 1e-9 <= part <= high + 1e-9]
