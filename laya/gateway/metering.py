"""Owns: limits of use: how much runs at once and was used in a minute, of a key or of a model, and the refusal of more.

A request counts until its outcome; the tokens it may come to take are charged before it waits for a place, and settled
by what it took. Limits are of inference alone. Knows neither keys nor engines, only what they are called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from laya.errors import RateLimitExceeded
from laya.gateway.assemble import MOST_COUNTED_TOKENS

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange

MINUTE_S = 60.0
_SMOOTHING = 0.2  # weight of the newest request in the running mean of how long they take


_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNTED_TOKENS)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    input_tokens: _Count = 0  # as an answer of decisions calls them
    output_tokens: _Count = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


class UseLimits(Protocol):
    """What says how much may be used; None: as much as there is."""

    @property
    def max_concurrent(self) -> int | None: ...
    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def tokens_per_minute(self) -> int | None: ...


class Bucket:
    """What may be used in a minute: full at first, filled evenly, never above one minute's worth. May be overdrawn."""

    __slots__ = ("_at_s", "_clock", "_level", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at_s = clock()

    def level(self) -> float:
        """What may be taken now; below 0 where more was taken than there was."""
        now_s = self._clock()
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / MINUTE_S)
        self._at_s = now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there if nothing else is taken or given back; 0: it is."""
        return max(0.0, (amount - self.level()) * MINUTE_S / self.per_minute)

    def take(self, amount: float) -> None:
        """Take it, also what is not there; a negative amount gives back."""
        self._level = min(self.per_minute, self.level() - amount)

    def resize(self, per_minute: int) -> None:
        """Another limit from now on; what was used stays used."""
        self._level = self.level() + per_minute - self.per_minute
        self.per_minute = per_minute


class Metered:
    """What a key, or all keys of a model, use; its limits may change at any time."""

    __slots__ = ("_charged", "_max_concurrent", "_mean_s", "_who", "is_limited", "requests", "tokens")

    def __init__(self) -> None:
        self._charged: dict[Exchange, int] = {}  # those that count now, with the tokens that they were charged
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self._mean_s = 1.0

    def limit(self, who: str, limits: UseLimits) -> None:
        """From now on these limits hold; what runs and was used stays. who: "The key 'ann'", in messages."""
        self._who = who
        self._max_concurrent = limits.max_concurrent
        self.requests = _resized(self.requests, limits.requests_per_minute)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute)
        self.is_limited = self.requests is not None or self.tokens is not None or limits.max_concurrent is not None

    @property
    def n_running(self) -> int:
        return len(self._charged)

    def begin(self, exchange: Exchange) -> None:
        """Count one request more, until `end`. Raises RateLimitExceeded, and it does not count."""
        most = self._max_concurrent
        if most is not None and self.n_running >= most:
            raise RateLimitExceeded(
                f"{self._who} runs {self.n_running} requests now and may run {most} at once.",
                self._mean_s,
                limit="max_concurrent",
                allowed=most,
                used=self.n_running,
                asked=1,
            )
        if self.requests is not None:
            self._take(self.requests, 1, "requests")
        self._charged[exchange] = 0

    def charge(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Take what the request may come to use of this minute's tokens. Raises RateLimitExceeded; it counts on.

        A request that is larger than a whole minute's worth waits for a full minute, not forever.
        """
        if self.tokens is not None:
            bound = min(_bound_tokens(exchange, endpoint), self.tokens.per_minute)
            self._take(self.tokens, bound, "tokens")
            self._charged[exchange] = bound
            exchange.charged_tokens = max(exchange.charged_tokens, bound)

    def _take(self, bucket: Bucket, amount: int, what: str) -> None:
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            used = bucket.per_minute - int(bucket.level())
            raise RateLimitExceeded(
                f"{self._who} may use {bucket.per_minute} {what} a minute: {used} are used or promised, and "
                f"this request may take {amount}. There is room in {wait_s:.1f} s.",
                wait_s,
                limit=f"{what}_per_minute",
                allowed=bucket.per_minute,
                used=used,
                asked=amount,
            )
        bucket.take(amount)

    def end(self, exchange: Exchange) -> None:
        """It counts no longer, and what it was charged becomes what it used. One that never counted is none of ours."""
        charged_tokens = self._charged.pop(exchange, None)
        if charged_tokens is None:
            return
        self._mean_s += _SMOOTHING * (time.monotonic() - exchange.arrived_s - self._mean_s)
        if self.tokens is not None and charged_tokens:
            self.tokens.take(used_tokens(exchange, charged_tokens) - charged_tokens)


def _resized(bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute)
    bucket.resize(per_minute)
    return bucket


def _bound_tokens(exchange: Exchange, endpoint: Endpoint) -> int:
    """The most tokens of prompt and answer, where the request or the config says how long an answer may be."""
    exchange.read_taken()
    parsed = exchange.parsed
    assert parsed is not None
    if not parsed.generates:
        return parsed.prompt_bound_tokens
    answer_tokens = parsed.max_tokens or endpoint.settings.default_max_tokens
    return parsed.prompt_bound_tokens + answer_tokens * parsed.n_seqs


def used_tokens(exchange: Exchange, charged_tokens: int) -> int:
    """Tokens that a request took, as far as is known of one that did not end by itself.

    What no engine got, and what an engine failed, took nothing.
    """
    if not exchange.sent_s or exchange.outcome == "failed":
        return 0
    if exchange.outcome == "refused":  # by its engine, or in the line between two turns of its prompts
        return (exchange.prompt_tokens or 0) + exchange.n_tokens_out
    prompt_tokens = exchange.prompt_tokens or exchange.prefill_total
    if not prompt_tokens:  # its engine said nothing of it
        return charged_tokens
    if not exchange.first_token_s:
        return exchange.prefill_done
    return prompt_tokens + exchange.n_tokens_out


def read_usage(exchange: Exchange, body: bytes) -> None:
    """Keep what a whole answer, relayed as it is, says of the tokens that it took."""
    try:
        usage = _ANSWER.decode(body).usage
    except (msgspec.DecodeError, RecursionError):  # what was charged stays charged
        return
    if usage is not None:
        exchange.prompt_tokens = usage.prompt_tokens or usage.input_tokens
        exchange.n_tokens_out = usage.completion_tokens or usage.output_tokens
