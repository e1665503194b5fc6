"""Owns: the malformed requests of the fuzz bench: valid ones of every path, and what is done to them.

The same seed and number make the same bytes. Knows nothing of sockets. A `Case` that is `framed` is a whole HTTP/1.1
request whatever its body says, so it must be answered; any other may leave the server waiting for more.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

_CHAT = {
    "model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0.5, "n": 1,
    "stop": ["x"], "seed": 1, "logit_bias": {"5": 1.0}, "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "tool_choice": "auto", "response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"},
}  # fmt: skip
_DECISIONS = {
    "model": "stub", "state": {"text": "it rains"},
    "questions": {
        "a": {"type": "noul", "instructions": "Is it wet?", "criteria": {"true": "yes", "false": None}},
        "b": {"type": "choice", "instructions": "Which?", "criteria": {"x": "one", "y": None}},
    },
}  # fmt: skip
_TURN = {
    "model": "stub", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], "store": True,
    "text": {"format": {"type": "text"}}, "max_output_tokens": 16, "metadata": {"a": "b"}, "instructions": "be brief",
}  # fmt: skip
_MESSAGE = {
    "model": "stub", "max_tokens": 8, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
}  # fmt: skip
_KEY = {"name": "fuzzed", "role": "user", "models": ["stub"], "expires": "30d", "max_concurrent": 1}
POSTS: tuple[tuple[str, Any], ...] = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {"model": "stub", "messages": _CHAT["messages"]}),
    ("/v1/chat/completions", {"model": "stub", "messages": _CHAT["messages"], "stream": True}),
    ("/v1/completions", {"model": "stub", "prompt": ["a", "b"], "max_tokens": 4, "echo": False, "logprobs": 1}),
    ("/v1/embeddings", {"model": "stub", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2}),
    ("/v1/rerank", {"model": "stub", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}),
    ("/v1/systemone", _DECISIONS),
    ("/v1/responses", _TURN),
    ("/v1/responses", {"model": "stub", "input": "hi", "stream": True, "previous_response_id": "resp_0"}),
    ("/v1/responses/input_tokens", {"model": "stub", "input": "hi"}),
    ("/v1/messages", _MESSAGE),
    ("/v1/messages", {"model": "stub", "max_tokens": 8, "messages": _CHAT["messages"], "stream": True}),
    ("/v1/messages/count_tokens", {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/tokenize", {"model": "stub", "content": "hi", "add_special": True, "with_pieces": False}),
    ("/detokenize", {"model": "stub", "tokens": [1, 2, 3]}),
    ("/api/chat", {"model": "stub", "messages": _CHAT["messages"], "stream": False, "options": {"num_predict": 4}}),
    ("/api/generate", {"model": "stub", "prompt": "hi", "stream": True, "keep_alive": "5m", "format": "json"}),
    ("/api/embed", {"model": "stub", "input": ["a"], "truncate": True}),
    ("/api/show", {"model": "stub"}),
    ("/admin/keys", _KEY),
    ("/admin/models/stub/load?anyway=false", {}),
)  # fmt: skip
GETS = (
    "/", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/stub", "/v1/requests", "/v1/responses/resp_1",
    "/v1/responses/resp_1/input_items?limit=2&order=asc", "/v1/responses/resp_1?stream=true&starting_after=1",
    "/admin/state", "/admin/events?after=3", "/admin/route/explain?model=stub&header=a:b", "/admin/models/stub/slots",
    "/admin/models/stub/logs?lines=5", "/admin/keys", "/admin/keys/fuzzed", "/api/tags", "/api/ps", "/api/version",
    "/nothing/here", "/v1/requests/req-1",
)  # fmt: skip
_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE", "get", "BREW", "")
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, 1.5, "", "x", "\0", "\ud800", "é\u202e😀",
    "a" * 70_000, [], [None], {}, {"": None}, [[]], {"type": "nothing"}, "resp_0", "system", "stub-2", "../../etc",
)  # fmt: skip
_LITERALS = (
    b"1e999",
    b"-0",
    b"NaN",
    b"Infinity",
    b"9" * 400,
    b"0.1e-999",
    b"tru",
    b"'a'",
    b"\xff\xfe",
    b"\x00",
    b"1_0",
)
_TARGETS = (
    "/%00", "/%ff%fe", "//", "/../../etc/passwd", "/v1/models/" + "a" * 9000, "/v1/models/%2e%2e%2f", "*", "?", "",
    "http://elsewhere/v1/models", "http://[", "/v1/chat/completions?%zz", "/v1/models/é", "/admin/models//load",
    "/admin/models/a/b/c/unload", "/v1/responses/%0d%0a", "/page/../x", "/" + "a" * 70_000, "/api/blobs/x",
    "/v1/chat/completions#x", "/admin/events?after=-1", "/admin/events?after=" + "9" * 5000, "/v1/responses/resp_" * 20,
    "/admin/models/stub/logs?lines=-1", "/admin/models/stub/load?anyway=perhaps", "/v1/responses/r?stream=true",
    "/v1/responses/r/input_items?limit=x", "/v1/responses/r/input_items?limit=99999&order=up&after=%00",
    "/admin/route/explain", "/admin/route/explain?header=x", "/admin/route/explain?model=%ff&tokens=-5&header=%0a:b",
)  # fmt: skip
_HEADERS = (
    "content-length: -1", "content-length: +5", "content-length: 0x10", "content-length: " + "9" * 40,
    "content-length: 5, 5", "content-length: ", "transfer-encoding: chunked", "transfer-encoding: gzip, chunked",
    "transfer-encoding: chunked, identity", "transfer-encoding: xchunked", "expect: 100-continue", "expect: 200-ok",
    "connection: upgrade\r\nupgrade: websocket", "connection: upgrade\r\nupgrade: h2c", "connection: close",
    "connection: keep-alive, close, é", "authorization: Basic dTpw", "authorization: Bearer ", "authorization: é",
    "authorization: Bearer laya-" + "b" * 3000, "x-api-key: \x01", "x-laya-model: nobody", "x-laya-model: é",
    "x-laya-priority: soon", "x-session-id: " + "s" * 5000, "x-request-id: " + "r" * 500, "x-request-id: a\x0bb",
    "x-request-id: é", "host: a\r\nhost: b", "content-encoding: gzip", "content-type: text/plain",
    "bad header", ": empty", "name : space", " folded: line", "x-long: " + "l" * 70_000, "accept: \xff", "origin: null",
    "range: bytes=0-0", "if-none-match: *", "x: " + "\r\nx: ".join("y" * 50), "anthropic-version: x", "cookie: a=b;;=",
)  # fmt: skip
_STARTS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\r\n\r\n\r\n", b"\x00" * 64,
    b"GET / HTTP/0.9\r\n\r\n", b"GET /\r\n", b"GET / HTTP/1.1", b"HTTP/1.1 200 OK\r\n\r\n", b"GET  /  HTTP/1.1\r\n\r\n",
    b"\xef\xbb\xbfGET / HTTP/1.1\r\n\r\n", b"POST /v1/chat/completions HTTP/9.9\r\n\r\n", b"quit\r\n", b"\n" * 5000,
)  # fmt: skip


class Case(NamedTuple):
    """One case: what is sent, piece by piece. framed: it must be answered. n_requests: at most, that are in it."""

    pieces: list[bytes]
    framed: bool
    n_requests: int = 1


def case(seed: int, number: int, key: str) -> Case:
    """The case of this number. key: of an admin, so that checks behind the key are reached too."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.random()
    if kind < 0.45:
        return _sent(draw, _framed(draw, key), framed=True)
    if kind < 0.6:
        return _sent(draw, _headed(draw, key), framed=False)
    if kind < 0.7:
        return _sent(draw, _chunked(draw, key), framed=False)
    if kind < 0.8:
        requests = [draw.choice((_framed, _headed, _chunked))(draw, key) for _ in range(draw.randint(2, 6))]
        return _sent(draw, b"".join(requests), framed=False)._replace(n_requests=len(requests))
    if kind < 0.97:
        wire = _damaged(draw, draw.choice((_framed, _chunked))(draw, key))
        return _sent(draw, wire, framed=False)
    return _sent(draw, draw.choice(_STARTS) + draw.randbytes(draw.choice((0, 0, 40))), framed=False)


# bodies
def changed_body(draw: random.Random, body: Any) -> bytes:
    """A valid body with some changes, first of what it says, then of how."""
    changed = copy.deepcopy(body)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        _change(draw, changed)
    try:
        data = json.dumps(changed, ensure_ascii=draw.random() < 0.7).encode()
    except UnicodeEncodeError:  # half a character, which JSON can only escape
        data = json.dumps(changed).encode()
    return draw.choice(_RAW_CHANGES)(draw, data) if draw.random() < 0.4 else data


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every member of every object and list in it: the container and the key or index."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    found: list[tuple[Any, Any]] = [(value, key) for key in keys]
    return found + [place for key in keys for place in _places(value[key])]


def _change(draw: random.Random, body: Any) -> None:
    places = _places(body)
    if not places:
        return
    holder, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.6:
        holder[key] = copy.deepcopy(draw.choice(_ODD))
    elif kind < 0.75:
        del holder[key]
    elif kind < 0.85 and isinstance(holder, dict):
        holder[draw.choice(("unknown", "", "model", "stream", str(key).upper(), "é"))] = holder.pop(key)
    elif isinstance(holder, list):
        holder.extend([holder[key]] * draw.choice((1, 50)))
    else:
        holder[key] = [holder[key]]


def _nested(draw: random.Random, data: bytes) -> bytes:
    n, pair = draw.choice((10, 200, 1500, 30_000)), draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = pair[0] * n + b"1" + pair[1] * n * draw.choice((1, 1, 0))
    return deep if draw.random() < 0.2 else data.replace(b'"stub"', b'"stub","metadata":' + deep, 1)


def _literal(draw: random.Random, data: bytes) -> bytes:
    at = data.find(b":", draw.randrange(len(data) or 1)) + 1
    return (
        data[:at] + draw.choice(_LITERALS) + data[draw.choice((at, data.find(b",", at) if b"," in data[at:] else at)) :]
    )


def _doubled_key(draw: random.Random, data: bytes) -> bytes:
    more = draw.choice((b'"model":"stub",', b'"model":7,', b'"stream":true,', b'"messages":[],', b'"n":129,'))
    return data[:1] + more + data[1:]


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _around(draw: random.Random, data: bytes) -> bytes:
    before, after = draw.choice(
        ((b"\xef\xbb\xbf", b""), (b" \n\t", b"  "), (b"", b"{}"), (b"[", b"]"), (b"\x1f\x8b\x08", b""))
    )
    return before + data + after


def _damaged(draw: random.Random, data: bytes) -> bytes:
    """Some bytes changed, left out, doubled or put in."""
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(damaged) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            damaged[at : at + 1] = draw.randbytes(1)
        elif kind == 1:
            del damaged[at : at + draw.choice((1, 5, 100))]
        elif kind == 2:
            damaged[at:at] = damaged[at : at + draw.choice((1, 20, 300))]
        else:
            damaged[at:at] = draw.choice(
                (b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\xff", b":", b"\r\n\r\n", b"0\r\n\r\n")
            )
    return bytes(damaged)


_RAW_CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _nested, _literal, _doubled_key, _damaged, _cut, _around,
)  # fmt: skip


# requests
def _framed(draw: random.Random, key: str) -> bytes:
    """A whole request: its head is right, its body as it comes."""
    if draw.random() < 0.12:
        return _head("GET", draw.choice(GETS), key)
    path, body = draw.choice(POSTS)
    data = changed_body(draw, body)
    return _head("POST", path, key, f"content-length: {len(data)}") + data


def _headed(draw: random.Random, key: str) -> bytes:
    """A request whose head says odd things."""
    path, body = draw.choice(POSTS)
    method = "POST"
    data = json.dumps(body).encode()
    lines = [f"content-length: {len(data)}"]
    if draw.random() < 0.3:
        path, method = draw.choice((*_TARGETS, *GETS)), draw.choice(("GET", "POST", "DELETE", *_METHODS))
    for _ in range(draw.choice((0, 1, 1, 2))):
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(_HEADERS))
    if draw.random() < 0.2:
        lines = [line for line in lines if not line.startswith("content-length")]
    if draw.random() < 0.1:
        lines.append(f"content-length: {len(data) + draw.choice((-3, -1, 0, 1, 500))}")
    return _head(method, path, draw.choice((key, key, key, "", "wrong")), *lines) + data


def _chunked(draw: random.Random, key: str) -> bytes:
    """A request in chunks, whose sizes, ends and trailers may be wrong."""
    path, body = draw.choice(POSTS)
    data = json.dumps(body).encode()
    wire, at = _head("POST", path, key, "transfer-encoding: chunked"), 0
    while at < len(data):
        piece = data[at : at + draw.randint(1, 200)]
        size = draw.choice((b"%x", b"%x", b"%x", b"%X;a=b", b"0%x", b"%x ", b"-%x", b"%xg")) % len(piece)
        wire += size + draw.choice((b"\r\n", b"\r\n", b"\r\n", b"\n")) + piece + b"\r\n"
        at += len(piece)
    ends = (
        b"0\r\n\r\n",
        b"0\r\n\r\n",
        b"0\r\na: b\r\n\r\n",
        b"",
        b"0\r\nx: " + b"t" * 70_000 + b"\r\n\r\n",
        b"ffffffffffffffffff\r\n",
    )
    return wire + draw.choice(ends)


def _head(method: str, path: str, key: str, *lines: str) -> bytes:
    keyed = (f"authorization: Bearer {key}",) if key else ()
    said = "\r\n".join((f"{method} {path} HTTP/1.1", "host: 127.0.0.1", *keyed, *lines))
    return said.encode("utf-8" if "é" in said else "latin-1") + b"\r\n\r\n"


def _sent(draw: random.Random, wire: bytes, *, framed: bool) -> Case:
    """Mostly in one write, sometimes in a few."""
    cuts = sorted(draw.randrange(len(wire) + 1) for _ in range(draw.choice((0, 0, 0, 1, 3))))
    pieces = [wire[start:end] for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    return Case(pieces, framed)
