"""Owns: how two distributions of the next token differ, token by token. Knows no model: logits in, figures out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Matrix = np.ndarray[Any, np.dtype[np.float32]]
Vector = np.ndarray[Any, np.dtype[Any]]
ROWS_AT_ONCE = 64  # of a vocabulary's width: what is held besides the logits


class TokenFigures(NamedTuple):
    """One figure a token; natural logarithms, and the reference's distribution is the one that is right."""

    reference_nll: Vector  # of the token that follows in the text
    nll: Vector
    kl: Vector  # sum of p_reference * log(p_reference / p)
    same_top: Vector  # whether both find the same token likeliest
    p_change: Vector  # probability of the token that follows, less the reference's


def token_figures(reference: Matrix, logits: Matrix, following: Vector) -> TokenFigures:
    """reference, logits: [tokens, vocabulary]. following: the token that comes next in the text, of each row."""
    rows: list[tuple[Vector, ...]] = []
    for start in range(0, len(following), ROWS_AT_ONCE):
        at = slice(start, start + ROWS_AT_ONCE)
        ours, theirs, token = reference[at], logits[at], following[at, None]
        our_sum, their_sum = log_sum_exp(ours), log_sum_exp(theirs)
        p = np.exp(ours - our_sum[:, None].astype(np.float32))
        # the difference of logits is small where both agree: no large numbers cancel
        kl = (p * (ours - theirs)).sum(1, dtype=np.float64) - (our_sum - their_sum) * p.sum(1, dtype=np.float64)
        our_nll = our_sum - np.take_along_axis(ours, token, 1)[:, 0]
        their_nll = their_sum - np.take_along_axis(theirs, token, 1)[:, 0]
        same = ours.argmax(1) == theirs.argmax(1)
        rows.append((our_nll, their_nll, np.maximum(kl, 0), same, np.exp(-their_nll) - np.exp(-our_nll)))
    return TokenFigures(*(np.concatenate(column) for column in zip(*rows, strict=True)))


def log_sum_exp(logits: Matrix) -> Vector:
    """Of each row."""
    most = logits.max(1)
    total: Vector = most.astype(np.float64) + np.log(np.exp(logits - most[:, None]).sum(1, dtype=np.float64))
    return total


def nll_of(logits: Matrix, following: Vector) -> Vector:
    """Of the token that follows each row, in nats."""
    nll: Vector = log_sum_exp(logits) - np.take_along_axis(logits, following[:, None], 1)[:, 0]
    return nll
