"""Owns: answers of engines that are not Laya's own, programs and other servers: which of them are answers at all.

What comes with status 200 may still be none: an error, the page of a login, half a gigabyte, what only a zip reader
reads. That is the engine's fault and told as such, in its words, so that another address may serve the request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from laya.errors import EngineRefused, LayaError
from laya.gateway.engine_errors import SAID_LIMIT_CHARS, own_failure, who_of
from laya.gateway.metering import read_usage
from laya.gateway.relay import AssembledAnswer, Relay, StreamRelay
from laya.gateway.renaming import renamed
from laya.gateway.upstream import ANSWER_LIMIT_BYTES

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING = (b"null", b"false", b'""', b"{}")
_NO_EVENTS = (b"application/json", b"text/html")  # types of what is no stream; some give their streams none at all


class _Whole:
    """The bytes of one answer until it is whole."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._n_bytes = 0

    def add(self, exchange: Exchange, data: bytes) -> None:
        """Fails the exchange where it is more than is held."""
        self._n_bytes += len(data)
        if self._n_bytes <= ANSWER_LIMIT_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()
            exchange.fail(EngineRefused(f"{who_of(exchange)} answers with more than {ANSWER_LIMIT_BYTES} bytes."))

    def bytes(self) -> bytes:
        return b"".join(self._parts)


def fault_of(body: bytes, exchange: Exchange) -> LayaError | None:
    """Why this is no answer to what was asked; None: it is one."""
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _no_answer(exchange, body)
    if bytes(fields.get("error", b"null")) not in _NOTHING:
        return own_failure(body, exchange)
    parsed = exchange.parsed
    if parsed is not None and parsed.generates and not bytes(fields.get("choices", b"")).startswith(b"["):
        return _no_answer(exchange, body)
    return None


def _no_answer(exchange: Exchange, body: bytes) -> LayaError:
    said = body[:SAID_LIMIT_CHARS].decode(errors="replace")
    return EngineRefused(f"{who_of(exchange)} answers with what is no answer: {said!r}")


def _is_encoded(exchange: Exchange, headers: dict[bytes, bytes]) -> bool:
    """Whether it is in a coding that nobody asked for; then the exchange has failed."""
    coding = headers.get(b"content-encoding", b"identity").lower()
    if coding in (b"identity", b""):
        return False
    words = f"{who_of(exchange)} compresses its answer ({coding.decode('latin-1')}), which it was not asked for."
    exchange.fail(EngineRefused(words))
    return True


class WholeAnswer(Relay):
    """A whole answer of an engine that calls the model by another name: read to its end, and renamed."""

    def __init__(self, exchange: Exchange, own_name: str) -> None:
        super().__init__(exchange)
        self._own_name = own_name
        self._whole = _Whole()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Its request is kept until all of the answer is here: another address may still have to serve it."""
        if status == 200:
            self._status = status
            _is_encoded(self.exchange, headers)
        else:
            super().on_head(status, headers)

    def on_good_data(self, data: bytes) -> None:
        self.exchange.first_token_s = self.exchange.first_token_s or time.monotonic()
        self._whole.add(self.exchange, data)

    def on_good_end(self) -> None:
        respond_whole(self.exchange, self._whole.bytes(), self._own_name)


def respond_whole(exchange: Exchange, body: bytes, own_name: str | None) -> None:
    """The answer under the model's own name, or what is wrong with it."""
    fault = fault_of(body, exchange)
    if fault is not None:
        exchange.fail(fault)
        return
    read_usage(exchange, body)
    exchange.respond(200, body if own_name is None else renamed(body, own_name), "served")


class _NoEvents(Relay):
    """Where a stream was asked for: whether one came."""

    _instead: _Whole | None = None

    def on_good_head(self, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if not _is_encoded(self.exchange, headers) and kind in _NO_EVENTS:
            self._instead = _Whole()

    def on_good_data(self, data: bytes) -> None:
        if self._instead is None:
            super().on_good_data(data)
        else:
            self._instead.add(self.exchange, data)

    def on_good_end(self) -> None:
        if self._instead is None:
            super().on_good_end()
        elif self.exchange.outcome is None:
            self.on_instead(self._instead.bytes())

    def on_instead(self, body: bytes) -> None:
        raise AssertionError("each way says what it makes of it")


class OtherStream(_NoEvents, StreamRelay):
    """Stream in, stream out."""

    def on_instead(self, body: bytes) -> None:
        words = f"{who_of(self.exchange)} answers whole where it was asked for a stream, and has none."
        self.exchange.fail(fault_of(body, self.exchange) or EngineRefused(words))


class RemoteStream(OtherStream):
    """A stream from another server: it may come through TLS, so that nothing native reads it."""

    def on_asked(self) -> None:
        """It stays here."""

    @property
    def is_steady(self) -> bool:
        return False


class OtherAnswer(_NoEvents, AssembledAnswer):
    """Stream in, whole answer out; or whole in, from a program that has no streams."""

    _n_bytes = 0

    def on_good_data(self, data: bytes) -> None:
        self._n_bytes += len(data)
        if self._n_bytes > ANSWER_LIMIT_BYTES:
            self.exchange.fail(EngineRefused(f"{who_of(self.exchange)} goes on after {ANSWER_LIMIT_BYTES} bytes."))
        else:
            super().on_good_data(data)

    def on_instead(self, body: bytes) -> None:
        parsed = self.exchange.parsed
        if parsed is None or not parsed.wants_stream:
            respond_whole(self.exchange, body, self._own_name)
            return
        words = f"{who_of(self.exchange)} answers whole where it was asked for a stream, and has none."
        self.exchange.fail(fault_of(body, self.exchange) or EngineRefused(words))
