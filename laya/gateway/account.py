"""Owns: one API key as it is used: what it runs now, what it used lately, and the refusal of what is more than it may.

Limits are of inference alone. A request counts from its head to its outcome; the tokens it may come to take are charged
when its body is read, and settled by what it took. Knows neither where keys are kept nor how they are recognised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from laya.errors import Forbidden, ForbiddenModel, InvalidRequest, LayaError, RateLimitExceeded
from laya.types import KeyGrant, KeyRole

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange

MINUTE_S = 60.0
USERS: frozenset[KeyRole] = frozenset({"user", "admin"})  # roles that inference is for
_SMOOTHING = 0.2  # weight of the newest request in the running mean of how long they take


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


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


class Key:
    """A key of this server. `is_bound`: it may not do everything with inference, so each request of it is looked at."""

    __slots__ = ("_mean_s", "grant", "is_bound", "models", "n_running", "name", "requests", "role", "tokens")

    def __init__(self, grant: KeyGrant) -> None:
        self.n_running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self._mean_s = 1.0
        self.apply(grant)

    def apply(self, grant: KeyGrant) -> None:
        """What it may from now on; what it runs and has used stays."""
        self.grant = grant
        self.name, self.role = grant.name, grant.role
        self.models = frozenset(grant.models)
        self.requests = _resized(self.requests, grant.requests_per_minute)
        self.tokens = _resized(self.tokens, grant.tokens_per_minute)
        is_limited = self.requests is not None or self.tokens is not None or grant.max_concurrent is not None
        self.is_bound = is_limited or bool(self.models) or grant.role not in USERS

    def admit(self, exchange: Exchange) -> None:
        """Count the request from now on. Raises Forbidden, RateLimitExceeded."""
        if self.role not in USERS:
            raise Forbidden(f"The key '{self.name}' has the role '{self.role}', which is not for inference.")
        most = self.grant.max_concurrent
        if most is not None and self.n_running >= most:
            raise RateLimitExceeded(
                f"The key '{self.name}' runs {self.n_running} requests now and may run {most} at once.",
                self._mean_s,
                limit="max_concurrent",
                allowed=most,
                used=self.n_running,
                asked=1,
            )
        if self.requests is not None:
            self._take(self.requests, 1, "requests")
        self.n_running += 1
        exchange.account = self

    def route(
        self,
        exchange: Exchange,
        parsed: ParsedBody,
        route: Callable[[Exchange, ParsedBody], Endpoint],
        id_of: Callable[[str], str | None],
    ) -> Endpoint:
        """What `route` gives, if the key may use it; charged. Tells of no model that the key may not use.

        Raises ForbiddenModel, RateLimitExceeded, and what `route` raises.
        """
        name = exchange.header_model or parsed.model
        if name is None and self.models:
            raise InvalidRequest(
                f"'model' is missing. This key may use: {', '.join(sorted(self.models))}.", param="model"
            )
        try:
            endpoint = exchange.endpoint = route(exchange, parsed)
        except LayaError:
            found = exchange.endpoint
            if name is None or self.may_use(name, found.model_id if found is not None else id_of(name), id_of):
                raise
            raise self.forbidden_model(name) from None
        self.take(exchange, endpoint, name or endpoint.model_id, id_of)
        return endpoint

    def take(self, exchange: Exchange, endpoint: Endpoint, name: str, id_of: Callable[[str], str | None]) -> None:
        """The request is for this endpoint, asked for by this name. Raises ForbiddenModel, RateLimitExceeded."""
        if not self.may_use(name, endpoint.model_id, id_of):
            raise self.forbidden_model(name)
        self._charge(exchange, endpoint)

    def _charge(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Take what the request may come to use of this minute's tokens. Raises RateLimitExceeded.

        A request that is larger than a whole minute's worth waits for a full minute, not forever.
        """
        if self.tokens is not None:
            bound = min(_bound_tokens(exchange, endpoint), self.tokens.per_minute)
            self._take(self.tokens, bound, "tokens")
            exchange.charged_tokens = bound

    def _take(self, bucket: Bucket, amount: int, what: str) -> None:
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            used = bucket.per_minute - int(bucket.level())
            raise RateLimitExceeded(
                f"The key '{self.name}' may use {bucket.per_minute} {what} a minute: {used} are used or promised, and "
                f"this request may take {amount}. There is room in {wait_s:.1f} s.",
                wait_s,
                limit=f"{what}_per_minute",
                allowed=bucket.per_minute,
                used=used,
                asked=amount,
            )
        bucket.take(amount)

    def settle(self, exchange: Exchange) -> None:
        """The request has its outcome: it counts no longer, and what it was charged becomes what it used."""
        self.n_running -= 1
        self._mean_s += _SMOOTHING * (time.monotonic() - exchange.arrived_s - self._mean_s)
        if self.tokens is not None and exchange.charged_tokens:
            self.tokens.take(used_tokens(exchange) - exchange.charged_tokens)

    # models
    def may_use(self, name: str, model_id: str | None, id_of: Callable[[str], str | None]) -> bool:
        """Whether it may use the model `model_id`, asked for as `name`.

        id_of: the id of the model that a name on the list means. A name that is no model (a pool, `auto`) on the list
        allows whatever the rules make of it.
        """
        if not self.models or (name in self.models and (model_id is None or id_of(name) is None)):
            return True
        return model_id is not None and any(model_id == (id_of(each) or each) for each in self.models)

    def forbidden_model(self, name: str) -> ForbiddenModel:
        return ForbiddenModel(self.name, name, sorted(self.models))


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


def used_tokens(exchange: Exchange) -> int:
    """Tokens that a request took, as far as is known of one that did not end by itself.

    What no engine got, and what an engine failed, took nothing.
    """
    if not exchange.sent_s or exchange.outcome == "failed":
        return 0
    if exchange.outcome == "refused":
        return exchange.prompt_tokens or 0
    prompt_tokens = exchange.prompt_tokens or exchange.prefill_total
    if not prompt_tokens:  # its engine said nothing of it
        return exchange.charged_tokens
    if not exchange.first_token_s:
        return exchange.prefill_done
    return prompt_tokens + exchange.n_tokens_out


def read_usage(exchange: Exchange, body: bytes) -> None:
    """Keep what a whole answer, relayed as it is, says of the tokens that it took."""
    try:
        usage = _ANSWER.decode(body).usage
    except msgspec.DecodeError:  # what was charged stays charged
        return
    if usage is not None:
        exchange.prompt_tokens, exchange.n_tokens_out = usage.prompt_tokens, usage.completion_tokens
