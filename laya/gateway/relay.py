"""Owns: step 5, the engine's answer on its way to the client: one small class for each way it can go.

`StreamRelay`: a stream for a client that streams. `AssembledAnswer`: a stream for a client that wants the answer whole.
`RawAnswer`: bytes as they come, from engines that notice when a client of a whole answer leaves. `EngineError`: any
status but 200, put into Laya's own words. Which one an answer goes is `relay_choice.py`; what other engines than
Laya's own say instead of an answer is `relay_others.py`'s. Knows the exchange and the engine's events, no other step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from laya.errors import EngineCrashed, EngineFailed, LayaError
from laya.gateway.assemble import Assembler, UsageSum, encode
from laya.gateway.body import ChatHead, ParsedBody
from laya.gateway.engine_errors import engine_error, model_of
from laya.gateway.metering import read_usage
from laya.gateway.sse import AnswerReader, EventReader, StreamFilter, event_bytes
from laya.gateway.tool_events import CallAssembler, calls_of
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya._core import StreamBack
    from laya.gateway.exchange import Exchange

PREFILL_NOTE_EVERY_S = 1.0
ERROR_LIMIT_BYTES = 1024 * 1024


def broke_off(model_id: str, reason: str) -> LayaError:
    return EngineCrashed(f"The engine of '{model_id}' broke off: {reason}.")


class Relay:
    """An answer handler (see upstream.AnswerHandler) that turns every status but 200 into an error."""

    takes_whole = False
    _status = 0
    _error_bytes = 0
    _error_headers: dict[bytes, bytes] = {}

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def on_whole(self, content_type: bytes | None, body: bytes) -> None:
        raise AssertionError("who takes answers whole says how")

    def on_asked(self) -> None:
        """The engine is asked."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        if status == 200:
            self.exchange.let_go_of_body()
            self.on_good_head(headers)
        else:  # another engine may take what this one refuses
            self._error_headers = headers
            self._error_parts: list[bytes] = []

    def on_data(self, data: bytes) -> None:
        if self._status == 200:
            self.on_good_data(data)
        elif self._error_bytes < ERROR_LIMIT_BYTES:
            self._error_parts.append(data)
            self._error_bytes += len(data)
        else:  # it may have no end
            connection = self.exchange.connection
            self.on_end()
            if connection is not None:
                connection.abort()

    def on_end(self) -> None:
        self.exchange.connection = None
        if self._status == 200:
            self.on_good_end()
        else:
            body = b"".join(self._error_parts)
            error = engine_error(self._status, self._error_headers, body, self.exchange)
            if self._status < 500 and isinstance(error, EngineFailed):
                # it did nothing for it: no work is done twice where another takes it
                self.exchange.dispatcher.retries.turned_away(self.exchange)
            self.exchange.fail(error)

    def on_broken(self, reason: str, *, reusable: bool) -> None:
        self.exchange.connection = None
        if reusable and not self.exchange.head_sent and not self.exchange.sent_again:
            self.exchange.dispatcher.send_again(self.exchange)
        else:
            self.exchange.engine_lost = True
            endpoint = self.exchange.endpoint
            name = endpoint.name if endpoint is not None else "?"
            self.exchange.fail(self.exchange.dispatcher.crash_error(name, reason))

    @property
    def is_whole(self) -> bool:
        return False

    def on_good_head(self, headers: dict[bytes, bytes]) -> None:
        """The engine answers."""

    def on_good_data(self, data: bytes) -> None:
        raise AssertionError("each relay says what it does with data")

    def on_good_end(self) -> None:
        raise AssertionError("each relay says how an answer ends")

    def _follow(self, reader: EventReader) -> None:
        """Keep what the exchange shows of a stream: prefill progress and the moment of the first token."""
        exchange = self.exchange
        if not exchange.first_token_s:
            exchange.prefill_done, exchange.prefill_total = reader.prefill_done, reader.prefill_total
            if reader.started:
                exchange.first_token_s = time.monotonic()

    def _engine_said(self, error: dict[str, Any]) -> LayaError:
        message = error.get("message") or "no reason given"
        return EngineCrashed(f"The engine of '{model_of(self.exchange)}' broke off its answer: {message}")

    def _count_usage(self, reader: EventReader) -> None:
        self.exchange.prompt_tokens = reader.usage.as_dict()["prompt_tokens"]
        self.exchange.n_tokens_out = reader.usage.completion_tokens


class StreamRelay(Relay):
    """Stream in, stream out."""

    def __init__(self, exchange: Exchange, events: StreamFilter) -> None:
        super().__init__(exchange)
        self._filter = events
        self._noted_s = exchange.sent_s
        self.is_offered = False  # to the native pump

    def on_asked(self) -> None:
        if self._filter.passes_events and not self.exchange.charged_tokens:  # whose tokens are counted as they come
            self.exchange.dispatcher.streams.begin(self.exchange, self)

    @property
    def ends_plainly(self) -> bool:
        """Whether its end says nothing to the client but that it is the end."""
        return self._filter.ends_plainly

    def has_flowed(self, back: StreamBack) -> None:
        """Some of it went through the native pump."""
        self._filter.has_flowed(has_started=back.has_started, is_done=back.is_done, usage=back.usage)
        if back.first_token_s and not self.exchange.first_token_s:
            self.exchange.first_token_s = back.first_token_s

    def on_flowed(self) -> None:
        """All of it did."""
        self.exchange.connection = None
        self._count_usage(self._filter)
        self.exchange.finish("served")

    @property
    def is_steady(self) -> bool:
        """Whether nothing but whole, unmarked events is expected and nothing of one is held here."""
        return self._filter.is_steady and self.exchange.chunked and self.exchange.outcome is None

    def on_good_data(self, data: bytes) -> None:
        stream, exchange = self._filter, self.exchange
        out = stream.feed(data)
        if exchange.charged_tokens:  # known at the end, unless the client leaves before
            exchange.n_tokens_out += out.count(b"data:")
        if not exchange.first_token_s:
            self._follow(stream)
            if not stream.started and stream.error is None:
                self._note_prefill()
                return
        if out:
            exchange.write(out)
        if stream.error is not None:
            exchange.fail(self._engine_said(stream.error))
        elif self.is_steady and not exchange.charged_tokens:
            exchange.dispatcher.streams.offer(exchange, self)

    def _note_prefill(self) -> None:
        """A long prefill is shown as SSE comments, so that clients and proxies do not time out."""
        now_s = time.monotonic()
        if now_s - self._noted_s >= PREFILL_NOTE_EVERY_S and self._filter.prefill_total:
            self._noted_s = now_s
            percent = 100 * self._filter.prefill_done // self._filter.prefill_total
            self.exchange.write(b": prefill %d %%\n\n" % percent)

    @property
    def is_whole(self) -> bool:
        return self._filter.done

    def on_good_end(self) -> None:
        if self._filter.done:
            self._count_usage(self._filter)
            self.exchange.end(self._filter.end(), "served")
        else:
            self.exchange.fail(self._engine_said({"message": "its stream ended before its answer did"}))


class AssembledAnswer(Relay):
    """Stream in, whole answer out."""

    def __init__(self, exchange: Exchange, own_name: str | None = None) -> None:
        """own_name: of the model, where its engine calls it by another."""
        super().__init__(exchange)
        parsed, endpoint = exchange.parsed, exchange.endpoint
        assert parsed is not None and endpoint is not None
        self._own_name = own_name
        self.is_ours = endpoint.is_llamacpp
        self._reader = AnswerReader(usage_of(parsed))
        is_chat = isinstance(parsed.head, ChatHead)
        n_top_logprobs = None if is_chat and not endpoint.is_llamacpp else parsed.n_top_logprobs
        calls = calls_of(parsed) if endpoint.is_llamacpp else None
        self._assembler = (
            CallAssembler(calls) if calls is not None else Assembler(chat=is_chat, n_top_logprobs=n_top_logprobs)
        )

    def on_good_data(self, data: bytes) -> None:
        for event in self._reader.feed(data):
            self._assembler.add(event)
            self.exchange.n_tokens_out += 1
        self._follow(self._reader)
        error = self._reader.error or self._assembler.error
        if error is not None:
            self.exchange.fail(self._engine_said(error))

    @property
    def is_whole(self) -> bool:
        return self._reader.done

    def on_good_end(self) -> None:
        if self.exchange.outcome is not None:
            return
        if not self._reader.done:
            self.exchange.fail(self._engine_said({"message": "its stream ended before its answer did"}))
            return
        self._count_usage(self._reader)
        self.exchange.finish_reasons, usage = self._assembler.finish_reasons, self._reader.usage.as_dict()
        if self._reader.usage_event is not None:
            self._assembler.add(self._reader.usage_event | {"choices": []})
        if self._own_name is not None:
            self._assembler.meta["model"] = self._own_name
        parsed = self.exchange.parsed
        assert parsed is not None
        if not parsed.wants_stream:
            answer = self._assembler.answer(usage)
            if not self._reader.usage.n_events and not self.is_ours:  # it said nothing of it, which is not 0
                del answer["usage"]
            self.exchange.respond(200, encode(answer), "served")
            return
        last = self._assembler.answer_as_event()
        out = event_bytes(last)
        if parsed.wants_usage_event:
            out += event_bytes(last | {"choices": [], "usage": usage})
        self.exchange.end(out + b"data: [DONE]\n\n", "served")


class RawAnswer(Relay):
    """Bytes as they come. An answer that comes in one piece, as most do, goes in one."""

    takes_whole = True
    _length: bytes | None = None
    _type = b"application/json"
    _whole = b""

    def on_whole(self, content_type: bytes | None, body: bytes) -> None:
        exchange = self.exchange
        exchange.connection = None
        exchange.first_token_s = time.monotonic()
        if exchange.charged_tokens or exchange.kind == EndpointKind.DECISION:
            read_usage(exchange, body)
        exchange.respond(200, body, "served", b"content-type: %b\r\n" % (content_type or self._type))

    def on_good_head(self, headers: dict[bytes, bytes]) -> None:
        self._length = headers.get(b"content-length")
        self._type = headers.get(b"content-type", self._type)

    def on_good_data(self, data: bytes) -> None:
        exchange = self.exchange
        if not exchange.first_token_s:
            exchange.first_token_s = time.monotonic()
            if self._length is not None and int(self._length) == len(data):
                self._whole = data
                return
            exchange.start_raw(200, self._type, self._length)
        exchange.write(data)

    def on_good_end(self) -> None:
        if self.exchange.head_sent:
            self.exchange.end(b"", "served")
        else:
            self.on_whole(self._type, self._whole)


def relay_taken(exchange: Exchange, wants_usage: bool | None) -> Relay:
    """The way of one that the plain lane took; `wants_usage`: of a stream, None for a whole answer."""
    if wants_usage is None:
        return RawAnswer(exchange)
    return StreamRelay(exchange, StreamFilter(UsageSum(), wants_usage=wants_usage))


def usage_of(parsed: ParsedBody) -> UsageSum:
    return UsageSum(parsed.n_seqs // parsed.n_choices, parsed.n_choices)
