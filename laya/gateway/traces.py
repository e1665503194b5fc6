"""Owns: which requests are traced, and what is kept of each for its spans: plain values, taken when it has its outcome.

Who asks with a W3C `traceparent` says by its flag whether; of all others `traces.sample_ratio` are. Never a key, and
nothing of what was said. Spans are made and sent beside the loop, by `trace_sender.py`; there is none while traces are
off, and no request comes here then.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import getrandbits
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from laya.config import Config, read_headers
from laya.gateway.trace_sender import Ended, TraceSender
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.exchange import Exchange

logger = logging.getLogger(__name__)
TRACE_PARENT = "traceparent"
FLUSH_S = 3.0  # that the end of the server waits for the last traces
_LOOK_EVERY_S = 0.02
_LOW_64_BITS = 2**64 - 1  # of a trace's id, which its sampling goes by at everybody's
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1  # of a parent's flags
_OPERATIONS = {EndpointKind.COMPLETION: "text_completion", EndpointKind.EMBEDDING: "embeddings"}  # others: as here


class Parent(NamedTuple):
    """The span that a request belongs to."""

    trace_id: int
    span_id: int
    is_sampled: bool


class Traces(Collector):
    """Of one server. `apply` brings what the configuration says now into force."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sender: TraceSender | None = None
        self._sent_as: tuple[str, dict[str, str]] | None = None
        self._old: list[TraceSender] = []  # that still send what they had when others took their place
        self._counts: Counter[str] = Counter()  # of senders that have ended
        self._bound = 0  # of the low bits of sampled ids
        self.apply()

    @property
    def is_on(self) -> bool:
        return self._sender is not None

    def apply(self) -> None:
        """Another receiver, or another's headers, are for what ends from now on; what waits goes where it was to go."""
        traces = self._config.traces
        self._bound = round(traces.sample_ratio * (_LOW_64_BITS + 1))
        file = traces.headers_file
        try:
            headers = read_headers(Path(file) if file is not None else None)
        except (OSError, ValueError) as error:  # it was right when the configuration was read
            logger.warning("traces.headers_file cannot be read any more, and its headers stay as they were: %s", error)
            return
        wanted = (traces.endpoint, headers) if traces.endpoint is not None else None
        if wanted == self._sent_as:
            return
        if self._sender is not None:
            self._sender.end(FLUSH_S)
            self._old.append(self._sender)
        self._sent_as = wanted
        self._sender = TraceSender(*wanted, self._address()) if wanted is not None else None

    def note(self, exchange: Exchange) -> None:
        """A request has its outcome."""
        parent = read_parent(exchange.kept_headers.get(TRACE_PARENT))
        trace_id = getrandbits(128) if parent is None else parent.trace_id
        is_sampled = trace_id & _LOW_64_BITS < self._bound if parent is None else parent.is_sampled
        if is_sampled and self._sender is not None:
            self._sender.offer(_ended(exchange, trace_id, parent.span_id if parent is not None else 0))

    def collect(self) -> Iterator[Metric]:
        """What became of traces, since the start."""
        family = CounterMetricFamily("laya_traces", "Traced requests by what became of their trace", labels=("result",))
        counts = self._counts + sum((each.counts for each in self._senders()), Counter())
        for result in ("sent", "failed", "dropped"):
            family.add_metric((result,), counts[result])
        yield family

    async def close(self, within_s: float = FLUSH_S) -> None:
        """Send what waits, as far as the time allows; what is left then is counted as failed."""
        senders = self._senders()
        for sender in senders:
            sender.end(within_s)
        end_s = time.monotonic() + within_s
        while any(sender.is_alive for sender in senders) and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        for sender in senders:
            sender.give_up()

    def _senders(self) -> list[TraceSender]:
        """Those that are there; what others have counted is kept."""
        for ended in [each for each in self._old if not each.is_alive]:
            self._old.remove(ended)
            self._counts += ended.counts
        return [*self._old, self._sender] if self._sender is not None else list(self._old)

    def _address(self) -> tuple[str, int]:
        """Where this server is, for who reads its spans elsewhere."""
        server = self._config.server
        return socket.gethostname() if server.host in ("0.0.0.0", "::") else server.host, server.port


def read_parent(header: str | None) -> Parent | None:
    """What a `traceparent` says; None for none, and for one that is not well-formed, as the standard has it."""
    found = _PARENT.fullmatch(header.strip()) if header is not None else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Parent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))


def _ended(exchange: Exchange, trace_id: int, parent_id: int) -> Ended:
    endpoint, fault, parsed = exchange.endpoint, exchange.fault, exchange.parsed
    assert exchange.outcome is not None
    address = endpoint.pool.address if endpoint is not None and endpoint.pool is not None else None
    return Ended(
        trace_id=trace_id,
        parent_id=parent_id,
        request_id=exchange.request_id.decode("latin-1"),
        operation=_OPERATIONS.get(exchange.kind) or exchange.kind.name.lower(),
        # a name that no model here has is the client's own words
        asked_model=_asked_model(exchange) if endpoint is not None else None,
        model=endpoint.model_id if endpoint is not None else None,
        engine=endpoint.name if endpoint is not None else None,
        engine_address=(address.host, address.port) if address is not None else None,
        asked=_asked(exchange, parsed) if parsed is not None else {},
        outcome=exchange.outcome,
        error=fault.code if fault is not None else None,
        is_own_error=exchange.outcome == "failed" or (fault is not None and fault.http_status >= 500),
        prompt_tokens=exchange.prompt_tokens,
        generated_tokens=exchange.n_tokens_out,
        finish_reasons=exchange.finish_reasons,
        n_moves=exchange.n_moves,
        arrived_s=exchange.arrived_s,
        read_s=exchange.read_s,
        was_queued=bool(exchange.deadline_s),
        is_open=address is not None,
        opened_s=endpoint.opened_s if endpoint is not None else 0.0,
        sent_s=exchange.sent_s,
        first_token_s=exchange.first_token_s,
        ended_s=time.monotonic(),
        ended_unix_ns=time.time_ns(),
    )


def _asked_model(exchange: Exchange) -> str | None:
    return exchange.header_model or (exchange.parsed.model if exchange.parsed is not None else None)


def _asked(exchange: Exchange, parsed: ParsedBody) -> dict[str, Any]:
    """What the request said of its answer, by the names of the convention; numbers alone, never words."""
    said: dict[str, Any] = {}
    if parsed.max_tokens is not None and not exchange.has_default_length:
        said["gen_ai.request.max_tokens"] = parsed.max_tokens
    if parsed.n_choices != 1:
        said["gen_ai.request.choice.count"] = parsed.n_choices
    if parsed.wants_stream:
        said["gen_ai.request.stream"] = True
    return said
