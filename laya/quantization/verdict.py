"""Owns: which figures a variant of so many bits should not have: what of a table is flagged, and why.

The limits tell a broken file from one that merely lost what its type loses: each is about twice what a model of 135 M
parameters, which is hit harder than a large one, was seen to lose. Knows no file and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from laya.quantization.inspection import Flag
from laya.quantization.statistics import Interval


class Limit(NamedTuple):
    """Of types with at least `bits` a weight."""

    bits: float
    mean_kl: float
    same_top_share: float
    ppl_ratio: float
    same_experts_share: float


LIMITS = (
    Limit(15.5, 0.01, 0.93, 1.02, 0.95),
    Limit(8.0, 0.02, 0.91, 1.02, 0.90),
    Limit(6.0, 0.05, 0.87, 1.05, 0.85),
    Limit(5.0, 0.12, 0.80, 1.12, 0.80),
    Limit(4.0, 0.45, 0.65, 1.45, 0.65),
    Limit(3.0, 1.0, 0.50, 2.5, 0.45),
    Limit(0.0, 2.5, 0.25, 10.0, 0.20),
)


class Likelihood(msgspec.Struct, kw_only=True):
    """What a variant makes of a text. Without a reference only `perplexity` is there."""

    n_tokens: int
    n_windows: int
    perplexity: Interval
    ppl_ratio: Interval | None = None
    mean_kl: Interval | None = None
    kl_p99: float | None = None
    max_kl: float | None = None
    same_top_share: Interval | None = None
    rms_p_change: float | None = None
    same_experts_share: float | None = None
    expert_overlap: float | None = None
    least_experts_layer: int | None = None
    least_experts_share: float | None = None


def limit_of(bits: float, kv_bits: float | None = None) -> Limit:
    """By the fewer bits of weights and KV cache: that is what is lost by."""
    least = min(bits, kv_bits or bits)
    return next(limit for limit in LIMITS if least >= limit.bits)


def flags_of(found: Likelihood, limit: Limit) -> list[Flag]:
    """Figures that are beyond what a type of these bits does, each with both."""
    told: list[Flag] = []

    def check(name: str, value: float | None, most: float, *, is_share: bool = False) -> None:
        if value is None:
            return
        if is_share and value < most:
            told.append(Flag(what=f"{name} {value:.1%}; at least {most:.0%} is usual at {_bits(limit)}"))
        elif not is_share and not value <= most:  # a NaN is beyond every limit
            told.append(Flag(what=f"{name} {value:.4g}; at most {most:g} is usual at {_bits(limit)}"))

    check("mean KL divergence", found.mean_kl.value if found.mean_kl else None, limit.mean_kl)
    check("perplexity ratio", found.ppl_ratio.least if found.ppl_ratio else None, limit.ppl_ratio)
    share = found.same_top_share
    # where the model itself is undecided (KL is tiny all the same) another likeliest token says nothing
    if share is not None and found.mean_kl is not None and found.mean_kl.value > limit.mean_kl / 4:
        check("same likeliest token", share.most, limit.same_top_share, is_share=True)
    check("same experts", found.same_experts_share, limit.same_experts_share, is_share=True)
    return told


def worse_than_fewer_bits(rows: Sequence[tuple[str, float, Likelihood]]) -> dict[str, Flag]:
    """Variants that lost more than one of at least a bit less, beyond chance. rows: name, bits a weight, figures."""
    told: dict[str, Flag] = {}
    for name, bits, found in rows:
        for other, other_bits, theirs in rows:
            if found.mean_kl is None or theirs.mean_kl is None or other_bits > bits - 1:
                continue
            if found.mean_kl.low is None or theirs.mean_kl.high is None:  # what chance does is unknown
                continue
            if found.mean_kl.low > theirs.mean_kl.high:
                what = f"KL divergence {found.mean_kl.value:.4g} with {bits:.1f} bits, more than {other}'s "
                what += f"{theirs.mean_kl.value:.4g} with {other_bits:.1f}"
                told[name] = Flag(what=what)
    return told


def _bits(limit: Limit) -> str:
    return "16 bits" if limit.bits > 15 else f"{limit.bits:g} bits" if limit.bits else "less than 3 bits"
