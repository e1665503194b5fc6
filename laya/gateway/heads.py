"""Owns: what a request's head comes to: its endpoint, id, size, and its form without an offer of another protocol."""

from __future__ import annotations

import itertools
import os
from typing import TypeAlias
from urllib.parse import quote

from laya.errors import InvalidRequest
from laya.types import PRIORITIES, EndpointKind, Priority

Headers: TypeAlias = list[tuple[bytes, bytes]]
HOT_PATHS = {
    b"/v1/chat/completions": EndpointKind.CHAT,
    b"/v1/completions": EndpointKind.COMPLETION,
    b"/v1/embeddings": EndpointKind.EMBEDDING,
    b"/v1/rerank": EndpointKind.RERANK,
    b"/rerank": EndpointKind.RERANK,
    b"/v1/systemone": EndpointKind.DECISION,
}
PRIORITY = "x-laya-priority"
_request_numbers = itertools.count(1)
_request_prefix = f"req-{os.urandom(4).hex()}-".encode()


def own_id_prefix() -> bytes:
    """Of ids that somebody else numbers, and that are never those of `new_request_id`."""
    return b"req-" + os.urandom(4).hex().encode() + b"-"


def new_request_id() -> bytes:
    """The id of a request that brought none."""
    return _request_prefix + b"%d" % next(_request_numbers)


def hot_kind(method: bytes, target: bytes) -> EndpointKind | None:
    """The endpoint that a request line names, or None where it is not for the hot path."""
    if method != b"POST":
        return None
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):  # as to a proxy: http://host/path
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return HOT_PATHS.get(path)


def priority_of(said: str) -> Priority:
    """The priority that a header names. Raises InvalidRequest for a word that is none."""
    if said not in PRIORITIES:
        known = " or ".join(PRIORITIES)
        raise InvalidRequest(f"'{PRIORITY}' is '{said[:40]}': expected {known}.", param=PRIORITY)
    return said


def origin_lines(model_id: str, name: str) -> bytes:
    """Lines of an answer's head: who gave it, without a wait. Names may be those of files, which hold any character."""
    model, engine = (quote(each, safe=" !#$&'()*+,/:;=?@[]^`{|}~").encode() for each in (model_id, name))
    return b"x-laya-model: %b\r\nx-laya-engine: %b\r\nx-laya-queue-ms: 0\r\n" % (model, engine)


def head_bytes(target: bytes, headers: Headers) -> int:
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)


def without_upgrade(method: bytes, target: bytes, headers: Headers) -> bytes:
    """The same head, but it stays with HTTP/1.1."""
    kept = (b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade")
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, b"".join(kept))
