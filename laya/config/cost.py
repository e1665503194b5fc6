"""Owns: what a model's tokens cost, as its owner says it: the keys of `cost`, and the amount of so many tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_MILLION = 1_000_000
Price = Annotated[float, Meta(ge=0, le=1e9)]


class Cost(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Prices of a million tokens."""

    input_per_million: Annotated[Price, Meta(description="What a million tokens of prompts cost.")] = 0
    output_per_million: Annotated[Price, Meta(description="What a million tokens of answers cost.")] = 0
    currency: Annotated[
        str,
        Meta(
            pattern="^[A-Z]{3}$",
            max_length=3,  # `$` stands before a line's end too
            description="Their currency, by its code of three letters.",
            extra={"words": "three capital letters, such as EUR"},
        ),
    ] = "USD"

    def amount(self, prompt_tokens: int, generated_tokens: int) -> float:
        """In `currency`."""
        return (prompt_tokens * self.input_per_million + generated_tokens * self.output_per_million) / _MILLION

    @property
    def words(self) -> str:
        """`2.5 in, 10 out USD`: of a million tokens."""
        return f"{self.input_per_million:g} in, {self.output_per_million:g} out {self.currency}"
