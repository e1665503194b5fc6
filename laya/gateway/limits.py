"""Owns: what a client may take of this server, in bytes and seconds, and what all request bodies together may.

A body is held from its first byte until its engine answers. Each may be as large as the config allows, but not all at
once: past `BODIES_AT_ONCE` of the largest, a body that is not small is refused, so that no number of connections
fills the memory.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from laya.config import ServerConfig
from laya.errors import HeadTooLarge, InvalidRequest, LayaError, PayloadTooLarge, ServerBusy, UnsupportedEncoding
from laya.gateway.assemble import encode
from laya.types import KIB

HEAD_LIMIT_BYTES = 64 * KIB
AHEAD_LIMIT_BYTES = 64 * KIB  # kept of what a client sends before its requests that wait for their turn are answered
REQUEST_ID_LIMIT_BYTES = 128
BODIES_AT_ONCE = 16
SMALL_BODY_BYTES = 64 * KIB  # not counted: who holds all there is with large bodies does not shut small requests out
BODY_RATE_BYTES_PER_S = 64 * KIB  # slower than this, after the first `body_timeout_s`, is a client that holds a place
LINGER_S = 5.0  # how long what a refused client still sends is read and thrown away, so that it gets to read why
STALL_S = 120.0  # how long a client may leave its answer unread
BUSY_RETRY_S = 1.0


class BodyBudget:
    """Bytes of request bodies that are held now, over all connections."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def try_take(self, n_bytes: int) -> bool:
        """Hold so many bytes more; False, and nothing changed, where that is above the limit."""
        if self.held_bytes + n_bytes > self.limit_bytes:
            return False
        self.held_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        self.held_bytes -= n_bytes
        assert self.held_bytes >= 0, "bytes were given back that were not taken"


class Limits:
    """What a connection may take; from the config's `server` section."""

    def __init__(self, *, max_body_bytes: int, header_timeout_s: float, body_timeout_s: float, keep_alive_s: float):
        self.bodies = BodyBudget(BODIES_AT_ONCE * max_body_bytes)
        self._set(max_body_bytes, header_timeout_s, body_timeout_s, keep_alive_s)

    def apply(self, server: ServerConfig) -> None:
        """Other limits from now on; what is held stays held."""
        self.bodies.limit_bytes = BODIES_AT_ONCE * server.max_body_bytes
        self._set(server.max_body_bytes, server.header_timeout_s, server.body_timeout_s, server.keep_alive_s)

    def _set(self, max_body_bytes: int, header_timeout_s: float, body_timeout_s: float, keep_alive_s: float) -> None:
        self.max_body_bytes = max_body_bytes
        self.plain_body_bytes = min(max_body_bytes, SMALL_BODY_BYTES)
        self.idle_s = keep_alive_s
        self.seconds = {  # by what a connection waits for
            "first": header_timeout_s,
            "head": header_timeout_s,
            "body": body_timeout_s,
            "idle": keep_alive_s,
            "linger": LINGER_S,
        }

    @classmethod
    def of(cls, server: ServerConfig) -> Limits:
        return cls(
            max_body_bytes=server.max_body_bytes,
            header_timeout_s=server.header_timeout_s,
            body_timeout_s=server.body_timeout_s,
            keep_alive_s=server.keep_alive_s,
        )


def head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"The request's head is larger than {HEAD_LIMIT_BYTES} bytes.")


def body_too_large(n_bytes: int, limit_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request body has {n_bytes} bytes or more; the limit is {limit_bytes} (server.max_body_bytes).",
        limit_bytes=limit_bytes,
    )


def bad_encoding(said: bytes) -> UnsupportedEncoding | None:
    """What refuses a body of this content-encoding."""
    text = said.decode("latin-1").strip()
    return None if text.lower() in ("", "identity") else UnsupportedEncoding(text)


def bodies_full(limit_bytes: int) -> ServerBusy:
    return ServerBusy(
        f"Requests that arrive or wait now fill the {limit_bytes} bytes that are kept for request bodies.", BUSY_RETRY_S
    )


def bad_http(reason: str) -> InvalidRequest:
    return InvalidRequest(f"This is not a valid HTTP request: {reason}.")


def parting_answer(error: LayaError) -> bytes:
    """The whole answer to what never became a request; the connection ends with it."""
    body = encode(error.body())
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINE[error.http_status] + head + body
