"""Owns: the thread that sends traces: it makes their spans, batch by batch, and waits for the receiver in the loop's
place.

What waits is bounded: a receiver that is slow or not there costs traces, which are counted, and never a request. The
SDK's own batch processor does not count what it could not send, and would have its spans made on the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from laya.gateway.trace_spans import SpanMaker

logger = logging.getLogger(__name__)
SEND_EVERY_S = 1.0
SEND_LIMIT_S = 5.0  # for one batch, retries included
MOST_WAITING = 2048  # traces
BATCH_TRACES = 16  # encoded at once, which holds the loop up for a millisecond
PAUSE_S = 0.0001  # after each trace's spans: a thread that never sleeps keeps the interpreter from the loop for 5 ms
TELL_EVERY_S = 60.0  # that traces are lost
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that has ended, as its trace tells of it. Times are seconds of the monotonic clock; 0: it never was."""

    trace_id: int
    parent_id: int  # 0: its trace begins here
    request_id: str
    operation: str
    asked_model: str | None
    model: str | None
    engine: str | None
    engine_address: tuple[str, int] | None
    asked: dict[str, Any]  # attributes
    outcome: str
    error: str | None
    is_own_error: bool  # not the client's
    prompt_tokens: int | None
    generated_tokens: int
    finish_reasons: tuple[str, ...]
    n_moves: int
    arrived_s: float
    read_s: float
    was_queued: bool
    is_open: bool  # its engine is there
    opened_s: float  # since when
    sent_s: float
    first_token_s: float
    ended_s: float
    ended_unix_ns: int


class TraceSender:
    """For one receiver. `offer` and `end` are called on the loop and never wait."""

    def __init__(self, endpoint: str, headers: dict[str, str], server_address: tuple[str, int]) -> None:
        self._endpoint = endpoint
        self._headers = headers
        self._server_address = server_address
        self._waiting: deque[Ended] = deque()
        self._n_sent = 0  # by the thread alone, as is the next one
        self._n_failed = 0
        self._n_dropped = 0
        self._is_failing = False
        self._told_s = float("-inf")
        self._n_told = 0
        self._exporter: SpanExporter | None = None
        self._ending = threading.Event()
        self._end_s = float("inf")
        # a daemon: what the receiver does not take in time is not waited for
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counter[str]:
        """Traces by what became of them."""
        return Counter(sent=self._n_sent, failed=self._n_failed, dropped=self._n_dropped)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def offer(self, ended: Ended) -> None:
        """Take it, unless too many wait."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(ended)
        else:
            self._n_dropped += 1

    def end(self, within_s: float) -> None:
        """Send what waits, and end. A receiver that takes nothing now is not waited for."""
        self._end_s = min(self._end_s, time.monotonic() + within_s)
        self._ending.set()
        if self._is_failing:
            self.give_up()

    def give_up(self) -> None:
        """No more retries, of the batch that is on its way either."""
        self._end_s = 0.0
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.shutdown()

    # the thread
    def _run(self) -> None:
        try:
            maker = self._load()
        except Exception:
            logger.exception("traces cannot be made")
            return
        while True:
            is_ending = self._ending.wait(SEND_EVERY_S)
            while self._waiting and time.monotonic() < self._end_s:
                self._send(maker, self._batch())
            if is_ending:
                break
        self._n_failed += len(self._waiting)
        self._tell()
        self.give_up()

    def _load(self) -> SpanMaker:
        """The libraries, which only who has traces needs, and not on the loop."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from laya.gateway.trace_spans import SpanMaker

        logging.getLogger(_EXPORTER_LOG).addFilter(_last_word)
        self._exporter = OTLPSpanExporter(endpoint=self._endpoint, headers=self._headers, timeout=SEND_LIMIT_S)
        return SpanMaker(self._server_address)

    def _batch(self) -> list[Ended]:
        return [self._waiting.popleft() for _ in range(min(BATCH_TRACES, len(self._waiting)))]

    def _send(self, maker: SpanMaker, batch: list[Ended]) -> None:
        exporter = self._exporter
        try:
            spans = []
            for ended in batch:
                spans += maker.spans_of(ended)
                time.sleep(PAUSE_S)
            is_sent = exporter is not None and exporter.export(spans).name == "SUCCESS"
        except Exception:  # one batch must not end the sending of those after it
            logger.exception("%d traces cannot be sent", len(batch))
            is_sent = False
        self._is_failing = not is_sent
        if is_sent:
            self._n_sent += len(batch)
        else:
            self._n_failed += len(batch)
            if time.monotonic() - self._told_s > TELL_EVERY_S:
                self._tell()

    def _tell(self) -> None:
        n_lost = self._n_failed + self._n_dropped
        if n_lost > self._n_told:
            self._n_told, self._told_s = n_lost, time.monotonic()
            logger.warning("%d traces are lost; %s", n_lost, _last_word.text or "there was no time to send them")


class _LastWord(logging.Filter):
    """Keeps what the exporter says of a failure, instead of a line in the log for each batch."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.text = record.getMessage()
        return False


_last_word = _LastWord()
