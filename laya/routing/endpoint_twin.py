"""Owns: one endpoint's counters, limits and health, in plain Python. Knows no model and no clock.

What `csrc/route_endpoint.hpp` does, field for field.
"""

from __future__ import annotations

import dataclasses

MAX_SEQS = (1 << 24) - 1
MAX_TOKENS = (1 << 39) - 1
TRIP_AFTER = 5  # errors in a row that open a breaker
CLOSED, OPEN, HALF_OPEN, TRIAL = range(4)  # what a breaker lets through: all, nothing, one trial, nothing while it runs
BREAKER_NAMES = ("closed", "open", "half-open", "half-open, its trial running")

EndpointFields = tuple[bool, int, int, int, int, int, int, int, int, int, int, int, int]
Rank = tuple[bool, int, int]  # lower is better: has room first, then fewest reserved tokens, then fewest sequences


@dataclasses.dataclass(slots=True)
class Endpoint:
    """One endpoint: what it carries, what it can carry, and how it has been doing."""

    ready: bool = False
    breaker: int = CLOSED
    n_seqs: int = 0
    tokens: int = 0
    max_seqs: int = MAX_SEQS
    max_tokens: int = MAX_TOKENS
    window_tokens: int = 0
    weight: int = 1
    seed: int = 0
    turn: int = 0
    errors: int = 0
    errors_in_row: int = 0
    ttft_us: int = 0

    def fields(self) -> EndpointFields:
        found: EndpointFields = dataclasses.astuple(self)
        return found

    def is_eligible(self) -> bool:
        return self.ready and self.breaker in (CLOSED, HALF_OPEN)

    def has_room(self, n_seqs: int, tokens: int) -> bool:
        return self.n_seqs + n_seqs <= self.max_seqs and self.tokens + tokens <= self.max_tokens

    def rank(self, n_seqs: int, tokens: int) -> Rank | None:
        """None: may not be chosen."""
        if not self.is_eligible():
            return None
        return not self.has_room(n_seqs, tokens), self.tokens, self.n_seqs

    def carry(self, n_seqs: int, tokens: int) -> None:
        """A request was given to it; a half-open breaker's one trial is taken."""
        if self.breaker == HALF_OPEN:
            self.breaker = TRIAL
        self.n_seqs = min(self.n_seqs + n_seqs, MAX_SEQS)
        self.tokens = min(self.tokens + tokens, MAX_TOKENS)

    def settle(self, n_seqs: int, tokens: int) -> None:
        self.n_seqs = max(0, self.n_seqs - n_seqs)
        self.tokens = max(0, self.tokens - tokens)

    def take_turn(self) -> int:
        turn, self.turn = self.turn, (self.turn + 1) & 0xFFFF_FFFF
        return turn

    def served(self) -> None:
        self.errors_in_row = 0
        if self.breaker != OPEN:
            self.breaker = CLOSED

    def failed(self, trip_after: int) -> bool:
        was = self.breaker
        self.errors = (self.errors + 1) & 0xFFFF_FFFF
        self.errors_in_row = min(self.errors_in_row + 1, (1 << 24) - 1)
        if was != CLOSED or self.errors_in_row >= trip_after:
            self.breaker = OPEN
        return was != OPEN and self.breaker == OPEN

    def dropped(self) -> None:
        if self.breaker == TRIAL:
            self.breaker = HALF_OPEN

    def half_open(self) -> bool:
        if self.breaker not in (OPEN, TRIAL):
            return False
        self.breaker = HALF_OPEN
        return True

    def first_token(self, ttft_us: int) -> None:
        self.ttft_us = max(1, (self.ttft_us * 7 + ttft_us) // 8 if self.ttft_us else ttft_us)
