"""Owns: one request on an inference path, from its parsed head to its outcome, on the client's side of the gateway:
its body, back-pressure, and the one line where it ends. How its answer's bytes are put together is `answering.py`.

Each exchange ends in exactly one of served, refused, failed, cancelled (`finish`). What happens in between is
`dispatch.py`. Stands where uvicorn expects a request cycle, so its few attributes of that name are kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from laya.errors import EngineCrashed, EngineFailed, LayaError, PayloadTooLarge, RequestCancelled, ServerStopping
from laya.gateway.answering import Answering, Outcome
from laya.gateway.assemble import encode
from laya.gateway.decision import decision_status
from laya.gateway.heads import new_request_id, priority_of
from laya.gateway.limits import REQUEST_ID_LIMIT_BYTES, SMALL_BODY_BYTES, bad_encoding, bodies_full, body_too_large
from laya.gateway.plain import parse
from laya.gateway.sse import event_bytes
from laya.types import EndpointKind, Priority

if TYPE_CHECKING:
    from laya.gateway.account import Key
    from laya.gateway.body import ParsedBody
    from laya.gateway.dispatch import Dispatcher
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.prompts import PromptTurns
    from laya.gateway.protocol import LayaProtocol
    from laya.gateway.slots import Slot
    from laya.gateway.upstream import UpstreamConnection
    from laya.memory import Admission

_FAULTS_OF_ENGINES = (EngineCrashed, EngineFailed)
_FAULTS_OF_OURS = (*_FAULTS_OF_ENGINES, ServerStopping)
_READ = frozenset({
    b"authorization", b"content-encoding", b"content-length", b"expect", b"x-laya-model", b"x-laya-priority",
    b"x-request-id", b"x-session-id",
})  # fmt: skip


class _Bell:
    """Nobody waits for an exchange; uvicorn rings all the same."""

    def set(self) -> None:
        return


class Exchange(Answering):
    """One request. Times are seconds of the monotonic clock."""

    # Defaults stand on the class: a request sets what differs, and most never touch most of these.
    # request
    body: bytes | bytearray = b""
    body_complete = False
    held_bytes = 0  # of its body, where it is not a small one
    expects_continue = False
    may_trim = False  # it asks by itself for what `overflow: trim` does
    header_model: str | None = None
    header_session: str | None = None
    kept_headers: Mapping[str, str] = MappingProxyType({})  # those that rules and traces ask about
    priority: Priority | None = None  # as it asked
    key: Key | None = None
    account: Key | None = None  # the same key, where this request counts against its limits
    charged_tokens = 0  # of its key's or its model's tokens a minute, until it is settled by what it took
    request_id = b""
    said = b""  # the beginning of its body, where requests are logged with what they say
    fault: LayaError | None = None  # what it failed with
    early_error: LayaError | None = None  # what the head alone tells to be refused
    parsed: ParsedBody | None = None
    prompt_tokens: int | None = None  # exact, where it was counted
    # where it is
    endpoint: Endpoint | None = None
    connection: UpstreamConnection | None = None
    stream = 0  # its number in the native pump, while it flows there
    turns: PromptTurns | None = None  # of its prompts, where it has several
    slot: Slot | None = None  # the engine's sequence that it was given, where keys are kept apart
    upstream_body = b""
    taken = b""  # the request as it came, where the plain lane took it
    admission: Admission | None = None  # where its reservation is held
    reserved_seqs = 0
    reserved_tokens = 0
    route_s = 0.0  # what the choice of its endpoint took
    routed_seqs = 0
    routed_tokens = 0
    deadline_s = 0.0  # in the queue
    read_s = 0.0  # its body was complete
    noted_s = 0.0  # its client was last told that it waits
    sent_s = 0.0  # it went to the engine
    first_token_s = 0.0
    prefill_done = 0
    prefill_total = 0
    n_tokens_out = 0
    finish_reasons: tuple[str, ...] = ()  # where its answer was put together here
    upstream_paused = False
    engine_lost = False  # its connection broke: most likely the engine has died
    sent_again = False
    tried_later = False
    was_sent = False  # an engine may have read it
    n_tries = 1  # by engines
    n_moves = 0  # to other replicas
    has_default_length = False  # `parsed.max_tokens` is its model's, not the client's
    # response
    started = False
    outcome: Outcome | None = None
    # what uvicorn reads of a cycle
    response_complete = False
    disconnected = False
    message_event = _Bell()

    def __init__(
        self, protocol: LayaProtocol, dispatcher: Dispatcher, kind: EndpointKind, *, http_1_0: bool, keep_alive: bool
    ) -> None:
        self.protocol = protocol
        self.dispatcher = dispatcher
        self.kind = kind
        self.arrived_s = time.monotonic()
        self.chunked = not http_1_0
        self.keep_alive = keep_alive
        self.extra_headers: list[bytes] = []
        self._unsent: list[bytes] = []

    def read_head(self, headers: list[tuple[bytes, bytes]], body_limit_bytes: int) -> bytes | None:
        """Keep what matters of the request's head; gives the Authorization header."""
        authorization = None
        for name, value in headers:
            if name not in _READ:
                continue
            if name == b"authorization":
                authorization = value
            elif name == b"content-length":
                if int(value) > body_limit_bytes:
                    self.early_error = body_too_large(int(value), body_limit_bytes)
            elif name == b"x-laya-model":
                self.header_model = value.decode("latin-1")
            elif name == b"x-session-id":
                self.header_session = value.decode("latin-1")
            elif name == b"content-encoding":
                self.early_error = self.early_error or bad_encoding(value)
            elif name == b"x-laya-priority":
                try:
                    self.priority = priority_of(value.decode("latin-1"))
                except LayaError as error:
                    self.early_error = self.early_error or error
            elif name == b"x-request-id" and 0 < len(value) <= REQUEST_ID_LIMIT_BYTES:
                self.request_id = value
            elif name == b"expect" and value.lower() == b"100-continue":
                self.expects_continue = True
        if not self.request_id:
            self.request_id = new_request_id()
        return authorization

    # the request comes in
    def start(self) -> None:
        """It is this exchange's turn on its connection (pipelined requests wait for theirs)."""
        self.started = True
        if self.body_complete:
            self.begin()
        elif self.early_error is not None and (self.expects_continue or isinstance(self.early_error, PayloadTooLarge)):
            self.fail(self.early_error)
        elif self.expects_continue:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self.early_error is not None or self.response_complete:
            return
        if not self.body:
            self.body = data
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += data
        limits, n_bytes = self.protocol.limits, len(self.body)
        if n_bytes > limits.max_body_bytes:
            self._refuse_body(body_too_large(n_bytes, limits.max_body_bytes))
        elif n_bytes > SMALL_BODY_BYTES:
            if limits.bodies.try_take(n_bytes - self.held_bytes):
                self.held_bytes = n_bytes
            else:
                self._refuse_body(bodies_full(limits.bodies.limit_bytes))

    def _refuse_body(self, error: LayaError) -> None:
        self.early_error = error
        self.let_go_of_body()
        if self.started:
            self.fail(error)

    def read_taken(self) -> None:
        """It does not go the plain lane's way after all: what the full way needs to know of it."""
        if self.parsed is None:
            self.parsed = parse(self.kind, self.taken.partition(b"\r\n\r\n")[2])

    @property
    def is_remote(self) -> bool:
        """Whether another server has it."""
        return self.endpoint is not None and self.endpoint.is_remote

    @property
    def key_name(self) -> str | None:
        return None if self.key is None else self.key.name

    @property
    def can_be_sent_again(self) -> bool:
        """Whether its body is still here."""
        return bool(self.upstream_body) or (self.parsed is not None and bool(self.parsed.data))

    def begin_anew(self) -> None:
        """Another replica gets it; what its engine said or did is forgotten."""
        self.n_moves += 1
        if self.turns is not None and not self.head_sent:
            self.turns.begin_anew()
        self.was_sent = self.sent_again = self.tried_later = self.engine_lost = False
        self.sent_s = self.first_token_s = 0.0
        self.prefill_done = self.prefill_total = self.n_tokens_out = 0
        if self.parsed is not None and self.parsed.max_tokens is None:  # said again with the body for its engine
            self.extra_headers = [each for each in self.extra_headers if not each.startswith(b"x-laya-max-tokens")]

    def let_go_of_body(self) -> None:
        """Its engine answers, or nobody will read it: what it held is free for other requests."""
        self.body = self.upstream_body = b""
        if self.held_bytes:
            self.protocol.limits.bodies.give_back(self.held_bytes)
            self.held_bytes = 0
            if self.parsed is not None:
                self.parsed.forget()

    def on_body_complete(self) -> None:
        self.body_complete = True
        if self.started and not self.response_complete:
            self.begin()

    def begin(self) -> None:
        """Its body is here and it is its turn."""
        if self.early_error is not None:
            self.fail(self.early_error)
        else:
            self.dispatcher.dispatch(self)

    # the end
    def fail(self, error: LayaError) -> None:
        """End with an error: an HTTP error before the first byte, an SSE error event after it.

        An engine's own fault ends nothing where another replica takes the request.
        """
        if self.stream:
            self.dispatcher.streams.take_back(self.stream)
        if self.outcome is not None:
            return
        if self.taken:
            self.read_taken()
        if isinstance(error, _FAULTS_OF_ENGINES) and self.dispatcher.retries.failed(self):
            return
        self.fault = error
        outcome: Outcome = "failed" if isinstance(error, _FAULTS_OF_OURS) or error.http_status == 500 else "refused"
        if isinstance(error, RequestCancelled):
            outcome = "cancelled"
        if not self.head_sent:
            self.extra_headers += [f"{name}: {value}\r\n".encode() for name, value in error.headers().items()]
            status = decision_status(error) if self.kind == EndpointKind.DECISION else error.http_status
            self.respond(status, encode(error.body()), outcome)
        elif self.parsed is not None and self.parsed.wants_stream:
            self.break_off(event_bytes(error.body()), outcome)
        else:
            self.protocol.transport.abort()  # a whole answer broke off half-way: a closed connection says so
            self.finish(outcome)

    def client_gone(self) -> None:
        """The client closed the connection."""
        self.disconnected = True
        if self.stream:
            self.dispatcher.streams.take_back(self.stream)
        self.finish("cancelled")

    def finish(self, outcome: Outcome) -> None:
        """6 settle: the one place where an exchange ends, whatever happened."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.response_complete = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        self.dispatcher.settle(self)
        if self.held_bytes or self.body or self.upstream_body:
            self.let_go_of_body()
        if not self.disconnected:
            self.protocol.exchange_complete(self)

    # back-pressure
    def pause(self) -> None:
        self.upstream_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.upstream_paused and self.connection is not None:
            self.connection.resume()
        self.upstream_paused = False

    def as_state(self, now_s: float) -> dict[str, Any]:
        """How `laya ps` shows a live request."""
        if self.stream and not self.first_token_s:
            self.first_token_s = self.dispatcher.streams.first_token_s(self.stream)
        phase = "queued" if not self.sent_s else "decode" if self.first_token_s else "prefill"
        state: dict[str, Any] = {
            "id": self.request_id.decode("latin-1"),
            "phase": phase,
            "age_s": round(now_s - self.arrived_s, 3),
            "key": self.key_name,
        }
        if phase == "prefill" and self.prefill_total:
            state["prefill_tokens"] = self.prefill_done
            state["prompt_tokens"] = self.prefill_total
        return state
