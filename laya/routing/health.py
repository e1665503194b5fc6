"""Owns: when an endpoint is tried again, when it makes no progress, and how many requests may be tried twice.

The state that a choice looks at is in the route table; here is what needs a clock, which the caller gives: every time
is in seconds of one monotonic clock. Knows no engine and no HTTP.
"""

from __future__ import annotations

import dataclasses

from laya.routing.endpoint_twin import CLOSED, TRIP_AFTER
from laya.routing.table import RouteTable
from laya.routing.table_twin import RouteTable as RouteTableTwin

COOL_DOWN_S = 1.0  # from the opening of a breaker to its trial; doubles with each trial that fails
MAX_COOL_DOWN_S = 60.0
TRIAL_S = 60.0  # a trial that has not come back by then is taken back, and another may try
RETRY_SHARE = 0.1  # of requests
_WINDOW_REQUESTS = 1000
_NEVER = 2**32 - 1  # errors in a row


@dataclasses.dataclass(slots=True)
class _Open:
    cool_down_s: float
    due_s: float


class Breakers:
    """The circuit breakers' clock: closed -> open after errors in a row -> half-open with one trial -> closed or open.

    A trip is any failure that is the endpoint's own: it did not answer, broke off or answered 5xx. A client that left,
    a refusal and a request that was wrong are no failure: they are `dropped`.
    """

    def __init__(self, table: RouteTable | RouteTableTwin, *, trip_after: int = TRIP_AFTER) -> None:
        self._table = table
        self._trip_after = trip_after
        self._open: dict[int, _Open] = {}

    def served(self, endpoint: int) -> bool:
        """An answer came, its first byte at least. True when the endpoint's breaker is closed."""
        self._table.served(endpoint)
        if self._open and self._table.inspect(endpoint)[1] == CLOSED:
            self._open.pop(endpoint, None)
        return endpoint not in self._open

    def failed(self, endpoint: int, now_s: float, *, may_open: bool = True) -> bool:
        """The endpoint failed a request; True when it may not be chosen any more.

        may_open: False: it is merely counted, since there is no other for its requests.
        """
        if not self._table.failed(endpoint, self._trip_after if may_open else _NEVER):
            return False
        was = self._open.get(endpoint)
        cool_down_s = min(2 * was.cool_down_s, MAX_COOL_DOWN_S) if was else COOL_DOWN_S
        self._open[endpoint] = _Open(cool_down_s, now_s + cool_down_s)
        return True

    def dropped(self, endpoint: int) -> None:
        """A request ended without a verdict on the endpoint."""
        self._table.dropped(endpoint)

    def tick(self, now_s: float) -> list[int]:
        """The endpoints that get a trial from now on; call it now and then, or at `next_s`."""
        due = [endpoint for endpoint, open_ in self._open.items() if open_.due_s <= now_s]
        for endpoint in due:
            self._open[endpoint].due_s = now_s + TRIAL_S
        return [endpoint for endpoint in due if self._table.half_open(endpoint)]

    def next_s(self) -> float | None:
        """When `tick` has something to do; None: nothing is open."""
        return min((open_.due_s for open_ in self._open.values()), default=None)

    def renew(self, endpoint: int) -> None:
        """Its engine is a new one: its breaker is closed."""
        self._table.half_open(endpoint)
        self._table.served(endpoint)
        self.forget(endpoint)

    def forget(self, endpoint: int) -> None:
        """The endpoint is removed."""
        self._open.pop(endpoint, None)


class RetryBudget:
    """At most a tenth of the requests is tried a second time, so that retries cannot multiply an overload.

    Counted over about the last thousand requests; the very first retry is always there.
    """

    def __init__(self, share: float = RETRY_SHARE) -> None:
        self._share = share
        self._n_requests = 0.0
        self._n_retries = 0.0

    def arrived(self, n_requests: int = 1) -> None:
        """Requests came; a retry of one is none."""
        self._n_requests += n_requests
        while self._n_requests >= 2 * _WINDOW_REQUESTS:
            self._n_requests /= 2
            self._n_retries /= 2

    def take(self) -> bool:
        """Whether one more request may be tried again; if so, it is counted."""
        if self._n_retries and self._n_retries + 1 > self._share * self._n_requests:
            return False
        self._n_retries += 1
        return True


def may_retry(*, n_bytes_sent: int, n_tries: int, budget: RetryBudget) -> bool:
    """Whether a failed request may go to another replica: before its first byte, once, and within the budget."""
    return n_bytes_sent == 0 and n_tries == 1 and budget.take()


@dataclasses.dataclass(slots=True)
class _Progress:
    sign: object
    last_s: float


class ProgressWatch:
    """Which endpoints have something to do and give nothing: an engine may answer its health check and still be stuck.

    Progress is any change of a sign that its caller looks at now and then: first bytes, tokens, prefill events, ends of
    requests. It is counted from the last change, or from when there was something to do.
    """

    def __init__(self) -> None:
        self._progress: dict[int, _Progress] = {}

    def look(self, endpoint: int, sign: object, now_s: float) -> float:
        """Seconds since the sign was another one. None as the sign: there is nothing to do, so 0."""
        at = self._progress.get(endpoint)
        if sign is None or at is None or at.sign != sign:
            self._progress[endpoint] = _Progress(sign, now_s)
            return 0.0
        return now_s - at.last_s

    def forget(self, endpoint: int) -> None:
        """Its engine is a new one, or gone."""
        self._progress.pop(endpoint, None)
