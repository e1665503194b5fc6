"""Owns: the spans of one request, by OpenTelemetry's conventions for generative AI (their `gen_ai.*` names).

One span of kind SERVER for the request, and below it what the time went to: `load` (its engine was not there), `queue`,
and `relay`, which is the engine's part, with the moment of the first token in it. Needs the extra `otel`, and only
`trace_sender.py` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import laya
from laya.gateway.trace_sender import Ended

PROVIDER = "laya"
FIRST_TOKEN = "laya.first_token"  # the convention has no event for it


class SpanMaker:
    """Makes spans of requests that were sampled already."""

    def __init__(self, server_address: tuple[str, int]) -> None:
        self._ids = _GivenTraceId()
        self._made = _Made()
        own = Resource({"service.name": "laya", "service.version": laya.__version__})
        told = OTELResourceDetector().detect()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES stand over ours
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            id_generator=self._ids,
            resource=Resource.create().merge(own).merge(told),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._made)
        self._tracer = provider.get_tracer("laya", laya.__version__)
        self._server = {"server.address": server_address[0], "server.port": server_address[1]}

    def spans_of(self, ended: Ended) -> list[ReadableSpan]:
        """The request's span last, behind those below it."""
        self._ids.trace_id = ended.trace_id
        name = ended.operation if ended.asked_model is None else f"{ended.operation} {ended.asked_model}"
        request = self._tracer.start_span(
            name, _context(ended), SpanKind.SERVER, _present(self._server | _attributes(ended)),
            start_time=_unix_ns(ended, ended.arrived_s),
        )  # fmt: skip
        if ended.is_own_error:
            request.set_status(Status(StatusCode.ERROR))
        below = trace.set_span_in_context(request, Context())
        self._wait(ended, below)
        if ended.sent_s:
            self._relay(ended, below)
        request.end(ended.ended_unix_ns)
        return self._made.take()

    def _wait(self, ended: Ended, below: Context) -> None:
        if not ended.was_queued:
            return
        start_s, end_s = ended.read_s or ended.arrived_s, ended.sent_s or ended.ended_s
        if not ended.is_open and not ended.sent_s:
            self._part("load", below, ended, start_s, end_s)
            return
        if ended.opened_s > start_s:
            self._part("load", below, ended, start_s, min(ended.opened_s, end_s))
            start_s = min(ended.opened_s, end_s)
        self._part("queue", below, ended, start_s, end_s)

    def _part(self, name: str, below: Context, ended: Ended, start_s: float, end_s: float) -> None:
        self._tracer.start_span(name, below, start_time=_unix_ns(ended, start_s)).end(_unix_ns(ended, end_s))

    def _relay(self, ended: Ended, below: Context) -> None:
        host, port = ended.engine_address or (None, None)
        said = {"laya.engine": ended.engine, "server.address": host, "server.port": port}
        start_ns = _unix_ns(ended, ended.sent_s)
        relay = self._tracer.start_span("relay", below, SpanKind.CLIENT, _present(said), start_time=start_ns)
        if ended.first_token_s:
            relay.add_event(FIRST_TOKEN, timestamp=_unix_ns(ended, ended.first_token_s))
        relay.end(ended.ended_unix_ns)


class _GivenTraceId(RandomIdGenerator):
    """The id that a request was sampled by."""

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class _Made(SpanProcessor):
    """Spans that have ended, for who asked for them."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        return

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


def _context(ended: Ended) -> Context:
    if not ended.parent_id:
        return Context()
    parent = SpanContext(ended.trace_id, ended.parent_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _attributes(ended: Ended) -> dict[str, Any]:
    is_stream = "gen_ai.request.stream" in ended.asked
    first_s = ended.first_token_s - ended.arrived_s if is_stream and ended.first_token_s else None
    return ended.asked | {
        "gen_ai.operation.name": ended.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": ended.asked_model,
        "gen_ai.response.model": ended.model if ended.sent_s else None,
        "gen_ai.response.time_to_first_chunk": first_s,
        "gen_ai.response.finish_reasons": ended.finish_reasons or None,
        "gen_ai.usage.input_tokens": ended.prompt_tokens if ended.sent_s else None,
        "gen_ai.usage.output_tokens": ended.generated_tokens or None,
        "error.type": ended.error,
        "laya.outcome": ended.outcome,
        "laya.request_id": ended.request_id,
        "laya.moves": ended.n_moves or None,
    }


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _unix_ns(ended: Ended, moment_s: float) -> int:
    """A moment of the request, by the clock that its end was read from too."""
    return ended.ended_unix_ns - int((ended.ended_s - moment_s) * 1e9)
