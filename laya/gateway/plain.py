"""Owns: the short way of plain requests and answers: recognised whole by the native core, never parsed piece by piece.

What the core does not recognise goes the full way (uvicorn's parser, `body.parse_body`, the answer's parser), whose
verdict on anything unusual or wrong stands. Where there is no core, everything goes that way. Both ways give the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.gateway.body import ChatHead, ParsedBody, parse_body
from laya.gateway.limits import SMALL_BODY_BYTES
from laya.routing import RequestRouter, RouteTable
from laya.types import EndpointKind

try:
    from laya._core import ExpressLane, PlainLane, read_plain_answer, read_plain_body, read_plain_request

    NATIVE = True
except ImportError:  # no compiler when Laya was installed
    NATIVE = False

    class ExpressLane:  # type: ignore[no-redef]
        """Never made."""

    class PlainLane:  # type: ignore[no-redef]
        """Never made."""

    def read_plain_request(data: bytes, most_body_bytes: int) -> None:  # type: ignore[misc]
        """(kind, body, host, authorization, request id, session id) of a plain request that `data` is, or None."""

    def read_plain_answer(data: bytes) -> None:  # type: ignore[misc]
        """(content type, body) of a whole answer with status 200 that `data` is, or None."""

    def read_plain_body(data: bytes) -> None:  # type: ignore[misc]
        """(places of members, model, session, stream, include_usage, max_tokens, messages) of a plain body, or None."""


__all__ = [
    "NATIVE",
    "ExpressLane",
    "PlainBody",
    "PlainLane",
    "lane_of",
    "parse",
    "read_plain_answer",
    "read_plain_request",
]
_encode = msgspec.json.Encoder().encode
_NO_FIELDS = ChatHead()  # what a plain body says of all fields that only the full way knows


class PlainBody(ParsedBody):
    """A chat body with nothing in it but what the native core knows; decoded only where someone asks for a field."""

    is_plain = True
    generates = True
    kind = EndpointKind.CHAT
    head = _NO_FIELDS

    def __init__(self, data: bytes, read: tuple[Any, str, str | None, bool, bool, int | None, int]) -> None:
        self.data = data
        self._places, self.model, self.session, self.wants_stream, include_usage, self.max_tokens, n_messages = read
        self.wants_usage_event = self.wants_stream and include_usage
        self.prompt_bound_tokens = len(data) + 16 * n_messages

    def prefix_blocks(self) -> bytes:
        return self._places.prefix_blocks()  # type: ignore[no-any-return]

    def edited(self, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> bytes:
        if self.max_tokens is None and changes == {"model": self.model}:
            return self.data  # without max_tokens there is nothing to drop either
        replaced = b"".join(b'"%b",' % name.encode() for name in (*changes, *drop))
        return self._places.edited(replaced, _encode(changes)[1:-1])  # type: ignore[no-any-return]


def lane_of(router: RequestRouter) -> PlainLane | None:
    """The lane of plain requests over the router's table; None where there is no native core."""
    return PlainLane(router.table) if NATIVE and isinstance(router.table, RouteTable) else None


def parse(kind: EndpointKind, body: bytes | bytearray) -> ParsedBody:
    """Decode and validate a request body. Raises InvalidRequest that names the field and the value."""
    data = bytes(body)
    if kind is EndpointKind.CHAT and len(data) <= SMALL_BODY_BYTES:
        read = read_plain_body(data)
        if read is not None:
            return PlainBody(data, read)
    return parse_body(kind, data)
