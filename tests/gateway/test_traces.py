"""Traces: a real OTLP receiver, the real gateway, and receivers that are slow, broken or not there."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from laya.gateway import trace_sender
from laya.gateway.traces import read_parent
from tests.conftest import RunningServer

from .front import CHAT, KEY, Front, chat, front, request, until
from .live import sdk, user
from .scripted_engine import Call, Script, hello

pytestmark = pytest.mark.anyio
SECRET_WORDS = "the plan for tuesday"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Receiver:
    """Takes traces as a collector does."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.raw = b""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.n_asked = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.n_asked += 1
                body = self.rfile.read(int(self.headers["content-length"]))
                owner.may_answer.wait()
                if owner.status == 200:
                    owner.take(body, {name.lower(): value for name, value in self.headers.items()})
                with contextlib.suppress(ConnectionError):  # who does not wait for the answer is its own master
                    self.send_response(owner.status)
                    self.send_header("content-length", "0")
                    self.end_headers()

            def log_message(self, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        told = ExportTraceServiceRequest.FromString(body)
        self.raw += body
        self.headers.append(headers)
        for group in told.resource_spans:
            self.resources.append(values(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def requests(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def below(self, parent: Span) -> dict[str, Span]:
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_sender, "SEND_EVERY_S", 0.02)


def values(owner: Any) -> dict[str, Any]:
    """Attributes of a span or a resource."""
    return {each.key: _value(each.value) for each in owner.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def ask_for_traces(gate: Front, endpoint: str | None, **more: Any) -> None:
    config = gate.gateway.config
    config.traces.endpoint = endpoint
    for name, value in more.items():
        setattr(config.traces, name, value)
    gate.gateway.operating._in_force(config)


@contextlib.asynccontextmanager
async def traced(home: Path, endpoint: str, script: Script = hello, **more: Any) -> AsyncIterator[Front]:
    async with front(home, script, **more) as gate:
        ask_for_traces(gate, endpoint)
        try:
            yield gate
        finally:
            await gate.gateway.operating.traces.close()


def counted(gate: Front) -> dict[str, float]:
    (family,) = gate.gateway.operating.traces.collect()
    return {sample.labels["result"]: sample.value for sample in family.samples if sample.value}


async def sent(gate: Front, n_traces: int) -> None:
    await until(lambda: counted(gate).get("sent") == n_traces)


def body(parent: str | None = None, **fields: Any) -> bytes:
    said = CHAT | {"messages": [{"role": "user", "content": SECRET_WORDS}]} | fields
    return request(said, headers=(f"traceparent: {parent}",) if parent else ())


def parent_header(*, sampled: bool) -> str:
    return f"00-{TRACE}-{PARENT}-{int(sampled):02x}"


@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_request_is_a_span_by_the_convention(tmp_path: Path, receiver: Receiver, cancels_whole: bool) -> None:
    async with traced(tmp_path, receiver.url, cancels_whole=cancels_whole) as gate:
        assert (await gate.ask(body(model="stub-alias", max_tokens=7))).status == 200
        await sent(gate, 1)
        (span,) = receiver.requests()
        said = values(span)
        assert span.name == "chat stub-alias" and not span.parent_span_id
        assert span.status.code == Status.STATUS_CODE_UNSET
        assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.provider.name"] == "laya"
        assert (said["gen_ai.request.model"], said["gen_ai.response.model"]) == ("stub-alias", "stub")
        assert said["gen_ai.request.max_tokens"] == 7
        assert (said["server.address"], said["server.port"]) == ("127.0.0.1", gate.gateway.config.server.port)
        assert said["laya.outcome"] == "served" and "error.type" not in said and "gen_ai.request.stream" not in said
        if not cancels_whole:  # else the answer passes unread
            assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (9, 2)
            assert said["gen_ai.response.finish_reasons"] == ["stop"]
        (name, relay), *rest = receiver.below(span).items()
        assert name == "relay" and not rest and relay.kind == Span.SPAN_KIND_CLIENT
        assert values(relay)["server.port"] == gate.engine.port
        (first,) = relay.events
        assert span.start_time_unix_nano <= relay.start_time_unix_nano <= first.time_unix_nano
        assert first.time_unix_nano <= relay.end_time_unix_nano == span.end_time_unix_nano
    (resource,) = receiver.resources
    assert resource["service.name"] == "laya" and resource["service.version"]
    assert SECRET_WORDS.encode() not in receiver.raw and KEY.encode() not in receiver.raw


async def test_streams_errors_and_other_endpoints_are_told_apart(tmp_path: Path, receiver: Receiver) -> None:
    async with traced(tmp_path, receiver.url) as gate:
        assert (await gate.ask(body(stream=True))).status == 200
        assert (await gate.ask(body(model="sk-a-secret-by-mistake"))).status == 404
        assert (await gate.ask(request({"model": "stub", "input": "x"}, "/v1/embeddings"))).status >= 400
        await sent(gate, 3)
    stream, refused, other = sorted(receiver.requests(), key=lambda span: span.start_time_unix_nano)
    said = values(stream)
    assert said["gen_ai.request.stream"] is True and said["gen_ai.response.time_to_first_chunk"] > 0
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (9, 2)
    # a name that no model has is the client's own words
    assert refused.name == "chat" and b"by-mistake" not in receiver.raw
    assert values(refused)["error.type"] == "model_not_found" and values(refused)["laya.outcome"] == "refused"
    assert refused.status.code == Status.STATUS_CODE_UNSET and not receiver.below(refused)
    assert other.name == "embeddings stub" and values(other)["gen_ai.operation.name"] == "embeddings"


async def test_engines_fault_is_an_error_of_the_span(tmp_path: Path, receiver: Receiver) -> None:
    async def dies(call: Call) -> None:
        call.abort()

    async with traced(tmp_path, receiver.url, dies) as gate:
        assert (await gate.ask(body())).status == 502
        await sent(gate, 1)
    (span,) = receiver.requests()
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert values(span)["error.type"] == "engine_crashed" and values(span)["laya.outcome"] == "failed"


async def test_waiting_for_a_load_and_for_a_place_are_parts_of_the_time(tmp_path: Path, receiver: Receiver) -> None:
    async with traced(tmp_path, receiver.url, loaded=False, max_num_seqs=1) as gate:
        first, second = await gate.client(), await gate.client()
        for client in (first, second):
            client.send(body())
        for client in (first, second):
            assert (await client.answer()).status == 200
        await sent(gate, 2)
    one, two = sorted(receiver.requests(), key=lambda span: span.end_time_unix_nano)
    assert set(receiver.below(one)) == {"load", "queue", "relay"} == set(receiver.below(two))
    load, queue, relay = (receiver.below(two)[name] for name in ("load", "queue", "relay"))
    assert load.end_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == relay.start_time_unix_nano
    assert relay.start_time_unix_nano >= one.end_time_unix_nano - 1_000_000  # read from two clocks


async def test_who_asks_decides_whether_and_under_which_span(tmp_path: Path, receiver: Receiver) -> None:
    async with traced(tmp_path, receiver.url) as gate:
        ask_for_traces(gate, receiver.url, sample_ratio=0)
        assert (await gate.ask(body())).status == 200
        assert (await gate.ask(body("no-such-thing"))).status == 200
        assert (await gate.ask(body(parent_header(sampled=True)))).status == 200
        messages = {"model": "stub", "max_tokens": 5, "messages": CHAT["messages"]}
        told = request(messages, "/v1/messages", headers=(f"traceparent: {parent_header(sampled=True)}",))
        assert (await gate.ask(told)).status == 200
        ask_for_traces(gate, receiver.url, sample_ratio=1)
        assert (await gate.ask(body(parent_header(sampled=False)))).status == 200
        await gate.settled()
        await sent(gate, 2)
    assert len(receiver.requests()) == 2
    for span in receiver.requests():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert all(each.trace_id == span.trace_id for each in receiver.below(span).values())


async def test_share_of_requests_is_sampled_as_others_sample(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [2**100 + n * 2**60 for n in range(16)]
    drawn = iter(ids)
    monkeypatch.setattr("laya.gateway.traces.getrandbits", lambda n_bits: next(drawn))
    async with traced(tmp_path, receiver.url, cancels_whole=True) as gate:  # where requests may go the express lane
        ask_for_traces(gate, receiver.url, sample_ratio=0.25)
        client = await gate.client()
        for _ in range(16):
            assert (await client.ask(body())).status == 200
        await sent(gate, 4)
        assert gate.books == (16, 0, {"served": 16})
    theirs = TraceIdRatioBased(0.25)
    sampled_by_them = [each for each in ids if theirs.should_sample(None, each, "").decision.is_sampled()]
    assert [int.from_bytes(span.trace_id, "big") for span in receiver.requests()] == sampled_by_them


@pytest.mark.parametrize(
    "header",
    [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-03", f"01-{TRACE}-{PARENT}-01-more",
     f"00-{TRACE}-{PARENT}-01-more", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", "", "00",
     f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[1:]}-{PARENT}-01", f"00-{TRACE}-{PARENT}", f" 00-{TRACE}-{PARENT}-01 "],
)  # fmt: skip
def test_parent_is_read_as_the_library_reads_it(header: str) -> None:
    found = TraceContextTextMapPropagator().extract({"traceparent": header}, Context())
    theirs = get_current_span(found).get_span_context()
    ours = read_parent(header)
    if ours is None:
        assert not theirs.is_valid
    else:
        assert ours == (theirs.trace_id, theirs.span_id, theirs.trace_flags.sampled)


async def test_nothing_of_it_is_there_while_it_is_off(tmp_path: Path, receiver: Receiver) -> None:
    async with front(tmp_path) as gate:
        operating, threads = gate.gateway.operating, threading.active_count()
        assert (await gate.ask(chat())).status == 200
        assert gate.gateway.dispatcher.settled == operating._settled and not gate.gateway.dispatcher.keeps_headers
        assert threading.active_count() == threads and gate.gateway.connection.takes_plain
        ask_for_traces(gate, receiver.url)
        assert not gate.gateway.connection.takes_plain
        ask_for_traces(gate, None)
        assert gate.gateway.connection.takes_plain and gate.gateway.dispatcher.settled == operating._settled
        await operating.traces.close()


async def test_reload_sends_what_ends_from_then_on_to_the_other_one(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_sender, "SEND_EVERY_S", 60.0)  # until it is told
    headers = tmp_path / "headers"
    headers.write_text("# of the other one\nX-Api-Key: hunter2\n")
    other = Receiver()
    async with traced(tmp_path, receiver.url) as gate:
        assert (await gate.ask(body())).status == 200
        ask_for_traces(gate, other.url, headers_file=str(headers))
        assert (await gate.ask(body(stream=True))).status == 200
        await gate.settled()
        await until(lambda: receiver.spans)
        await gate.gateway.operating.traces.close()
        assert counted(gate) == {"sent": 2}
    other.close()
    assert [len(each.requests()) for each in (receiver, other)] == [1, 1]
    assert "x-api-key" not in receiver.headers[0] and other.headers[0]["x-api-key"] == "hunter2"


async def test_receiver_that_is_not_there_costs_traces_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces"
    async with traced(tmp_path, url) as gate:
        for _ in range(3):
            assert (await gate.ask(body())).status == 200
        assert gate.books == (3, 0, {"served": 3})
        await gate.gateway.operating.traces.close(0.0)
        await until(lambda: counted(gate) == {"failed": 3})
    assert "3 traces are lost" in caplog.text and KEY not in caplog.text


async def test_receiver_that_fails_is_counted_and_told_once(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 500
    async with traced(tmp_path, receiver.url) as gate:
        for n_failed in (1, 2, 3):
            assert (await gate.ask(body())).status == 200
            await until(lambda n_failed=n_failed: counted(gate) == {"failed": n_failed})
        told = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
        assert len(told) == 1 and "code: 500" in told[0]
        receiver.status = 200
        assert (await gate.ask(body())).status == 200
        await until(lambda: counted(gate) == {"failed": 3, "sent": 1})


async def test_receiver_that_hangs_bounds_what_waits(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_sender, "MOST_WAITING", 4)
    receiver.may_answer.clear()
    async with traced(tmp_path, receiver.url) as gate:
        client = await gate.client()
        assert (await client.ask(body())).status == 200
        await until(lambda: receiver.n_asked)
        for _ in range(10):
            assert (await client.ask(body())).status == 200
        assert counted(gate) == {"dropped": 6}
        receiver.may_answer.set()
        await sent(gate, 5)


async def test_end_sends_what_waits_and_does_not_wait_for_a_receiver_that_hangs(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_sender, "SEND_EVERY_S", 60.0)  # until it is told
    async with traced(tmp_path, receiver.url) as gate:
        assert (await gate.ask(body())).status == 200
        await gate.gateway.operating.traces.close()
        assert counted(gate) == {"sent": 1} and len(receiver.requests()) == 1
    receiver.may_answer.clear()
    async with traced(tmp_path, receiver.url) as gate:
        assert (await gate.ask(body())).status == 200
        await gate.gateway.operating.traces.close(0.1)
        assert not counted(gate)  # it is on its way, and nobody waits for that
        receiver.may_answer.set()


@pytest.mark.engine
def test_server_that_is_stopped_has_sent_its_last_trace(
    start_server: Callable[..., RunningServer], receiver: Receiver
) -> None:
    config = f"{{max_num_seqs: 1, max_seq_len: 256, n_threads: 1, traces: {{endpoint: '{receiver.url}'}}}}"
    server = start_server(config=config)
    headers = {"traceparent": parent_header(sampled=True)}
    answer = sdk(server).chat.completions.create(
        model="smollm2", messages=user(SECRET_WORDS), max_tokens=4, extra_headers=headers
    )
    assert server.stop() == 0
    (span,) = receiver.requests()
    said, usage = values(span), answer.usage
    assert usage is not None and span.trace_id.hex() == TRACE
    assert (said["gen_ai.request.model"], said["gen_ai.response.model"]) == ("smollm2", answer.model)
    assert said["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert said["gen_ai.usage.output_tokens"] == usage.completion_tokens
    assert said["gen_ai.response.finish_reasons"] == [answer.choices[0].finish_reason]
    assert {"load", "relay"} <= receiver.below(span).keys()
    assert SECRET_WORDS.encode() not in receiver.raw
