"""A client's connection: heads and bodies in every shape, deadlines, limits, and what a bad one is told."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from laya.gateway.limits import HEAD_LIMIT_BYTES, LINGER_S
from laya.types import MIB

from .front import CHAT, KEY, Answer, chat, front, request, until
from .scripted_engine import Call, answers, chunk, hello

pytestmark = pytest.mark.anyio
BODY = json.dumps(CHAT).encode()
HEAD = request(method="POST").removesuffix(b"\r\n")  # without the blank line that ends it


def assert_error(answer: Answer, status: int, code: str) -> None:
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["code"] == code, answer.error


# one connection, many requests
async def test_keep_alive_serves_many_requests(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        for _ in range(3):
            answer = await client.ask(chat())
            assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "Hello")
            assert "connection" not in answer.headers
            assert (await client.ask(request(path="/health", method="GET"))).status == 200
        assert len(gate.connections) == 1
        assert await gate.settled() == {"served": 3}


async def test_connection_close_is_obeyed(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        answer = await client.ask(request(CHAT, headers=("connection: close",)))
        assert answer.status == 200 and answer.headers["connection"] == "close"
        assert await client.closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_client_gets_an_answer_without_chunks(tmp_path: Path, stream: bool) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        answer = await client.ask(request(CHAT | {"stream": stream}, version="1.0"))
        assert answer.status == 200 and "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        assert b"[DONE]" in answer.body if stream else answer.json["usage"]["total_tokens"] == 11
        assert await client.closed()


async def test_request_in_single_bytes_is_read(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        for position in range(len(chat())):
            client.send(chat()[position : position + 1])
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200


async def test_absolute_target_is_the_hot_path(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(CHAT, "http://127.0.0.1:8000/v1/chat/completions?x=1"))
        assert answer.status == 200
        assert await gate.settled() == {"served": 1}


# bodies
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_chunked_body_is_put_together(tmp_path: Path, size: int) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(BODY), size):
            client.send(chunk(BODY[start : start + size]))
            await asyncio.sleep(0)
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        assert gate.engine.bodies[0]["messages"] == CHAT["messages"]


async def test_chunked_body_with_extensions_and_trailers_is_read(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        pieces = b"%x;name=value\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(BODY), BODY)
        for _ in range(2):
            assert (await client.ask(HEAD + b"transfer-encoding: chunked\r\n\r\n" + pieces)).status == 200


async def test_trailers_without_end_are_cut_off(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY) + b"0\r\n")
        await until(lambda: gate.stats.arrivals)
        for number in range(100):
            client.send(b"x-trailer-%d: %b\r\n" % (number, b"x" * 1000))
        assert_error(await client.answer(), 431, "head_too_large")
        assert await gate.settled() == {"refused": 1}


async def test_empty_body_is_not_json(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        for data in (request(), request(b"")):
            assert_error(await client.ask(data), 400, "invalid_request")
        assert (await client.ask(chat())).status == 200


async def test_body_of_a_mebibyte_reaches_the_engine_whole(tmp_path: Path) -> None:
    async with front(tmp_path, planned={"max_seq_len": 2 * MIB, "slot_tokens": 2 * MIB}) as gate:
        messages = [{"role": "user", "content": "é" * (MIB // 2)}]
        assert (await gate.ask(chat(messages=messages))).status == 200
        assert gate.engine.bodies[0]["messages"] == messages


# limits
async def test_body_at_the_limit_passes_and_one_byte_more_does_not(tmp_path: Path) -> None:
    async with front(tmp_path, server={"max_body_bytes": len(BODY)}) as gate:
        assert (await gate.ask(request(BODY))).status == 200
        answer = await gate.ask(request(BODY + b" "))
        assert_error(answer, 413, "payload_too_large")
        assert str(len(BODY)) in answer.error["message"] and answer.error["limit_bytes"] == len(BODY)
        assert answer.headers["x-should-retry"] == "false"
        assert await gate.settled() == {"served": 1, "refused": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/api/show", "/admin/keys"])
async def test_compressed_body_is_told_as_that(tmp_path: Path, path: str) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        for said in ("gzip", "br", "identity, zstd"):
            client.send(request(gzip.compress(BODY), path, headers=(f"Content-Encoding: {said}",)))
            answer = await client.answer()
            assert answer.status == 415, answer.body
            assert answer.headers["accept-encoding"] == "identity"
            assert f"content-encoding: {said}" in answer.body.decode()
        client.send(request(CHAT, headers=("content-encoding: identity",)))
        assert (await client.answer()).status == 200
        assert (await gate.settled())["served"] == 1


async def test_too_large_body_is_told_while_the_client_still_sends(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        data = b"x" * 30 * MIB
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(data))
        sending = asyncio.ensure_future(_send_slowly(client, data))
        answer = await client.answer()
        assert_error(answer, 413, "payload_too_large")
        assert answer.headers["connection"] == "close"
        await sending
        assert await client.closed()
        assert await gate.settled() == {"refused": 1}


async def _send_slowly(client: Any, data: bytes) -> None:
    for start in range(0, len(data), MIB):
        client.send(data[start : start + MIB])
        await client.writer.drain()


async def test_too_large_chunked_body_is_told_as_soon_as_it_is(tmp_path: Path) -> None:
    async with front(tmp_path, server={"max_body_bytes": 1000}) as gate:
        client = await gate.client()
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"x" * 600) + chunk(b"x" * 600))
        assert_error(await client.answer(), 413, "payload_too_large")
        client.send(chunk(b"x" * 600) + b"0\r\n\r\n")
        assert await client.closed()


async def test_refused_client_that_never_ends_its_body_is_closed(tmp_path: Path) -> None:
    async with front(tmp_path, server={"max_body_bytes": 1000}) as gate:
        client = await gate.client()
        client.send(HEAD + b"content-length: 5000\r\n\r\n" + b"x" * 2000)
        assert (await client.answer()).status == 413
        gate.sweep(LINGER_S - 1)
        client.send(b"x" * 2000)
        gate.sweep(LINGER_S + 1)
        assert await client.closed()


@pytest.mark.parametrize("lines", [1, 3000])
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health"])
async def test_head_too_large_is_told(tmp_path: Path, lines: int, ended: bool, path: str) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        line = b"x-filler: %b\r\n" % (b"x" * (HEAD_LIMIT_BYTES * 2 // lines))
        client.send(request(path=path).removesuffix(b"\r\n") + line * lines + b"\r\n" * ended)
        assert_error(await client.answer(), 431, "head_too_large")
        assert await client.closed()


async def test_head_too_large_on_a_kept_connection_is_told(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        assert (await client.ask(chat())).status == 200
        client.send(b"GET /health HTTP/1.1\r\n")
        for _ in range(100):
            client.send(b"x-filler: %b\r\n" % (b"x" * 1000))
            await asyncio.sleep(0)
        assert_error(await client.answer(), 431, "head_too_large")


async def test_large_head_and_large_body_do_not_add_up(tmp_path: Path) -> None:
    async with front(tmp_path, server={"max_body_bytes": MIB}) as gate:
        client = await gate.client()
        filler = "x-filler: " + "x" * (HEAD_LIMIT_BYTES // 2)
        for _ in range(2):
            answer = await client.ask(request(BODY + b" " * (MIB // 2), headers=(filler,)))
            assert answer.status == 200


# deadlines
@pytest.mark.parametrize("sent", [b"P", b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127", HEAD])
@pytest.mark.parametrize("kept", [False, True])
async def test_slow_head_is_told_and_closed(tmp_path: Path, sent: bytes, kept: bool) -> None:
    async with front(tmp_path, server={"header_timeout_s": 10.0}) as gate:
        client = await gate.client()
        if kept:
            assert (await client.ask(chat())).status == 200
        client.send(sent)
        await until(lambda: [connection for connection in gate.connections if connection._deadline_of == "head"])
        gate.sweep(9)
        gate.sweep(11)
        answer = await client.answer()
        assert_error(answer, 408, "request_timeout")
        assert "10 s" in answer.error["message"] and answer.headers["connection"] == "close"
        assert await client.closed()


async def test_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    async with front(tmp_path, server={"header_timeout_s": 10.0}) as gate:
        client = await gate.client()
        await until(lambda: gate.connections)
        gate.sweep(9)
        assert not client.reader.at_eof()
        gate.sweep(11)
        assert await client.closed()


async def test_slow_body_is_told_and_closed(tmp_path: Path) -> None:
    async with front(tmp_path, server={"body_timeout_s": 30.0}) as gate:
        client = await gate.client()
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:10])
        await until(lambda: gate.stats.arrivals)
        gate.sweep(29)
        gate.sweep(31)
        assert_error(await client.answer(), 408, "request_timeout")
        assert await client.closed()
        assert await gate.settled() == {"refused": 1}
        assert gate.engine.calls == []


async def test_body_that_keeps_coming_may_take_longer(tmp_path: Path) -> None:
    async with front(tmp_path, server={"body_timeout_s": 30.0}) as gate:
        client = await gate.client()
        body = BODY + b" " * MIB
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:-1])
        await until(lambda: gate.stats.arrivals and len(next(iter(gate.connections)).cycle.body) == len(body) - 1)
        gate.sweep(40)  # 30 s, and 16 more for a mebibyte
        client.send(body[-1:])
        assert (await client.answer()).status == 200


async def test_idle_connection_is_closed(tmp_path: Path) -> None:
    async with front(tmp_path, server={"keep_alive_s": 60.0}) as gate:
        client = await gate.client()
        for data in (chat(), request(path="/health", method="GET")):
            assert (await client.ask(data)).status == 200
            gate.sweep(59)
            assert not client.reader.at_eof()
        gate.sweep(61)
        assert await client.closed()


async def test_long_answer_is_no_idle_connection(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await hello(call)

    async with front(tmp_path, slow) as gate:
        client = await gate.client()
        client.send(chat())
        await until(lambda: gate.engine.calls)
        gate.sweep(3600)
        release.set()
        assert (await client.answer()).status == 200


async def test_hundreds_of_slow_heads_do_not_stop_a_client(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        slow = [await gate.client() for _ in range(500)]
        for client in slow:
            client.send(HEAD)
        await until(lambda: sum(connection._deadline_of == "head" for connection in gate.connections) == 500)
        assert (await gate.ask(chat())).status == 200
        gate.sweep(11)
        assert all([(await client.answer()).status == 408 for client in slow])
        gate.sweep(LINGER_S + 1)
        await until(lambda: not gate.connections)


# Expect: 100-continue
EXPECT = "expect: 100-continue"


async def test_expect_is_told_to_go_on(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        for _ in range(2):
            client.send(request(headers=(EXPECT, f"content-length: {len(BODY)}")))
            assert (await client.answer()).status == 100
            assert (await client.ask(BODY)).status == 200


@pytest.mark.parametrize(
    ("key", "length", "model", "status"), [(KEY, 40 * MIB, "stub", 413), ("bad", 10, "stub", 401), (KEY, 10, "no", 404)]
)
async def test_expect_is_refused_before_the_body(
    tmp_path: Path, key: str, length: int, model: str, status: int
) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(request(key=key, headers=(EXPECT, f"content-length: {length}", f"x-laya-model: {model}")))
        answer = await client.answer()
        assert answer.status == status and answer.headers["connection"] == "close"
        assert await gate.settled() == {"refused": 1}


async def test_expect_with_the_body_at_once_is_served(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(request(CHAT, headers=(EXPECT,)))
        statuses = [(await client.answer()).status]
        if statuses == [100]:
            statuses.append((await client.answer()).status)
        assert statuses[-1] == 200


# not HTTP
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # TLS to a plain port
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\n: empty\r\n\r\n",
        b"POST / HTTP/1.1\r\na: b\r\n folded\r\n\r\n",
        b"POST / HTTP/1.1\r\na: b\x00c\r\n\r\n",
        b"POST / HTTP/1.1\nhost: a\n\n",
        b"CONNECT example.org:443 HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
    ids=lambda data: repr(data[:24]),
)
async def test_garbage_is_told_in_json(tmp_path: Path, data: bytes) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        answer = await client.ask(data)
        assert_error(answer, 400, "invalid_request")
        assert "not a valid HTTP request" in answer.error["message"]
        assert await client.closed()
        assert gate.books == (0, 0, {})


SMUGGLED = b"0\r\n\r\nGET /admin/state HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        b"content-length: 4\r\ncontent-length: 40\r\n",
        b"content-length: 4\r\ncontent-length: 4\r\n",
        b"content-length: 4, 4\r\n",
        b"content-length: +4\r\n",
        b"content-length: -4\r\n",
        b"content-length: 0x4\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"content-length : 4\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding:\x0bchunked\r\n",
    ],
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/health"])
async def test_ambiguous_framing_is_refused_and_the_connection_closed(
    tmp_path: Path, framing: bytes, path: bytes
) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        head = HEAD.replace(b"/v1/chat/completions", path)
        answer = await client.ask(head + framing + b"\r\n" + SMUGGLED)
        # where the framing is judged after the head, another path answers by its method first
        assert answer.status == 400 or (answer.status == 405 and path == b"/health"), answer
        assert await client.closed()
        assert gate.stats.in_flight == 0 and gate.books


@pytest.mark.parametrize("broken", [b"zz\r\nabc\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"fffffffffffffffff\r\n"])
async def test_broken_chunks_are_refused(tmp_path: Path, broken: bytes) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        answer = await client.ask(HEAD + b"transfer-encoding: chunked\r\n\r\n" + broken)
        assert_error(answer, 400, "invalid_request")
        assert await client.closed()
        assert await gate.settled() == {"refused": 1}


async def test_told_client_that_goes_on_sending_still_reads_it(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(b"\x00garbage")
        await until(lambda: client.reader._buffer or client.reader.at_eof())  # type: ignore[attr-defined]
        client.send(b"x" * 100_000)
        assert_error(await client.answer(), 400, "invalid_request")
        assert await client.closed()
        client.close()
        await until(lambda: not gate.connections)


async def test_told_client_that_never_closes_is_closed(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        assert (await client.ask(b"\x00garbage")).status == 400
        gate.sweep(LINGER_S + 1)
        await until(lambda: not gate.connections)


# Upgrade: some clients offer HTTP/2 with every plain request
UPGRADE = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")


async def test_upgrade_to_http_2_is_ignored(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        for _ in range(2):
            answer = await client.ask(request(CHAT, headers=UPGRADE))
            assert answer.status == 200 and answer.json["choices"]
        assert (await client.ask(request(path="/health", method="GET", headers=UPGRADE))).status == 200
        client.send(request(CHAT, headers=UPGRADE) + chat() + request(method="GET", path="/health", headers=UPGRADE))
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 200]
        assert await gate.settled() == {"served": 4}


async def test_upgrade_with_a_late_body_is_ignored(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        data = request(CHAT, headers=UPGRADE)
        client.send(data[:-20])
        await until(lambda: gate.stats.arrivals)
        assert (await client.ask(data[-20:])).status == 200


@pytest.mark.parametrize("connection", ["Upgrade, close", "close, Upgrade, HTTP2-Settings"])
async def test_upgrade_of_a_last_request_is_ignored(tmp_path: Path, connection: str) -> None:
    async with front(tmp_path) as gate:
        headers = (f"connection: {connection}", *UPGRADE[1:])
        for sent in (request(CHAT, headers=headers), request(path="/health", method="GET", headers=headers)):
            client = await gate.client()
            answer = await client.ask(sent)
            assert answer.status == 200 and answer.headers["connection"] == "close"
            assert await client.closed()


async def test_websocket_is_not_here(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        headers = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13")
        assert (await gate.ask(request(path="/v1/realtime", method="GET", headers=headers))).status == 404


# names and ids
async def test_request_id_is_echoed(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        for data in (
            request(CHAT, headers=("X-Request-ID: mine",)),
            request(CHAT | {"stream": True}, headers=("X-Request-ID: mine",)),
            request(b"{", headers=("X-Request-ID: mine",)),
            request(path="/v1/models", method="GET", headers=("X-Request-ID: mine",)),
            request(path="/nowhere", method="GET", headers=("X-Request-ID: mine",)),
            request(CHAT, key="bad", headers=("X-Request-ID: mine",)),
        ):
            assert (await gate.ask(data)).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("given", ["", "x-request-id:", "x-request-id: " + "x" * 129])
async def test_request_id_is_made_where_there_is_none(tmp_path: Path, given: str) -> None:
    headers = (given,) if given else ()
    async with front(tmp_path) as gate:
        hot = [await gate.ask(request(CHAT, headers=headers)) for _ in range(2)]
        cold = [await gate.ask(request(path="/health", method="GET", headers=headers)) for _ in range(2)]
        ids = {answer.headers["x-request-id"] for answer in [*hot, *cold]}
        assert len(ids) == 4 and all(made.startswith("req-") for made in ids)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
async def test_wrong_method_on_a_hot_path_says_which(tmp_path: Path, method: str) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(request(method=method))
        answer = await client.answer(has_body=method != "HEAD")
        assert answer.status == 405 and answer.headers["allow"] == "POST"
        if method != "HEAD":
            assert answer.error["message"] == f"{method} is not allowed on /v1/chat/completions; use POST."
        assert (await client.ask(chat())).status == 200


async def test_wrong_method_on_another_path_says_which(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(b"{}", "/v1/models"))
        assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"
        assert_error(answer, 405, "method_not_allowed")


async def test_head_of_a_page_has_no_body(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(request(path="/health", method="HEAD"))
        assert (await client.answer(has_body=False)).status == 200
        assert (await client.ask(request(path="/health", method="GET"))).json == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "close"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
        ("/helth", "/health"),
    ],
)
async def test_unknown_path_names_the_nearest(tmp_path: Path, path: str, close: str) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(CHAT, path))
        assert_error(answer, 404, "not_found")
        assert answer.error["message"] == f"There is nothing at {path}. Did you mean {close}?"


@pytest.mark.parametrize("name", ["new%0Aline", "x", "%7Bmodel_id:path%7D"])
async def test_unknown_path_is_never_answered_with_a_template(tmp_path: Path, name: str) -> None:
    async with front(tmp_path) as gate:
        for path in (f"/admin/models/{name}/lod", f"/admin/models/{name}/load"):
            answer = await gate.ask(request(CHAT, path))
            assert answer.status == 404
            assert "Did you mean /admin" not in answer.error["message"]


@pytest.mark.parametrize("path", ["/v1/complete", "/completion", "/generate"])
async def test_endpoint_of_another_api_is_said_to_be_none_of_this_version(tmp_path: Path, path: str) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(CHAT, path))
        assert_error(answer, 404, "not_found")
        assert answer.error["message"] == f"{path} is not part of this version of Laya: use /v1/chat/completions."


@pytest.mark.parametrize("path", ["/v1/files", "/v1/audio/speech", "/v1/conversations/x/items"])
async def test_endpoint_that_is_not_here_is_not_taken_for_another(tmp_path: Path, path: str) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(CHAT, path))
        assert_error(answer, 404, "not_found")
        assert answer.error["message"] == f"{path} is an endpoint of OpenAI that this version of Laya does not have."


async def test_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(chat(model="stubb"))
        assert_error(answer, 404, "model_not_found")
        assert "Did you mean 'stub'?" in answer.error["message"]
        assert_error(await gate.ask(request(method="GET", path="/v1/models/nope")), 404, "model_not_found")
        assert_error(await gate.ask(request(method="GET", path="/v1/models/")), 400, "invalid_request")  # an empty name
        assert await gate.settled() == {"refused": 1}


async def test_model_header_goes_before_the_body(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        assert (await gate.ask(request(CHAT | {"model": "x"}, headers=("x-laya-model: stub-alias",)))).status == 200
        assert_error(await gate.ask(request(CHAT, headers=("x-laya-model: x",))), 404, "model_not_found")
        assert gate.engine.bodies[0]["model"] == "stub"


async def test_missing_model_names_those_there_are(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request({"messages": CHAT["messages"]}))
        assert_error(answer, 400, "invalid_request")
        assert answer.error["message"] == "'model' is missing. This server has: stub."


# keys
@pytest.mark.parametrize(
    "authorization", [None, "authorization: Bearer wrong", "authorization: Basic the-key", "authorization:"]
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models")])
async def test_bad_key_is_refused(tmp_path: Path, authorization: str | None, method: str, path: str) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        headers = (authorization,) if authorization else ()
        answer = await client.ask(request(BODY, path, method=method, key=None, headers=headers))
        assert_error(answer, 401, "invalid_api_key")
        assert gate.engine.calls == []
        assert (await client.ask(chat())).status == 200  # the connection is still good


async def test_key_is_not_told_to_the_engine(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        await gate.ask(chat())
        assert gate.engine.calls[0].headers[b"authorization"] == b"Bearer engine-key"


async def test_health_needs_no_key(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        for path in ("/", "/health", "/ready"):
            assert (await gate.ask(request(path=path, method="GET", key=None))).status == 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models")])
async def test_without_keys_only_local_names_are_answered(tmp_path: Path, method: str, path: str) -> None:
    async with front(tmp_path, keys=False) as gate:
        for host, status in (
            ("localhost", 200),
            ("127.0.0.1:80", 200),
            ("evil.example", 403),
            ("127.evil.example", 403),
        ):
            assert (await gate.ask(request(CHAT, path, method=method, key=None, host=host))).status == status
        for origin, status in (
            ("http://localhost:1", 200),
            ("http://evil.example", 403),
            ("null", 403),
            ("http://[", 403),
        ):
            data = request(CHAT, path, method=method, key=None, headers=(f"origin: {origin}",))
            assert (await gate.ask(data)).status == status
        await gate.settled()


# leaving
async def test_client_that_closes_its_half_has_left(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()

    async with front(tmp_path, script) as gate:
        client = await gate.client()
        client.send(chat())
        await until(lambda: gate.endpoint.is_running)
        client.writer.write_eof()
        assert await client.closed()
        assert await gate.settled() == {"cancelled": 1}
        release.set()


async def test_client_that_leaves_half_way_is_counted_once(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        for sent in (HEAD + b"content-length: 50\r\n\r\n", HEAD + b"content-length: 50\r\n\r\n{"):
            client = await gate.client()
            client.send(sent)
            arrived = gate.stats.arrivals
            await until(lambda arrived=arrived: gate.stats.arrivals > arrived)
            client.abort()
        assert await gate.settled() == {"cancelled": 2}


async def test_fault_of_our_own_is_a_500_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(tmp_path) as gate:
        monkeypatch.setattr(gate.gateway.keys, "check", lambda *_: 1 / 0)
        assert_error(await gate.ask(chat()), 500, "internal_error")
        assert await gate.settled() == {"failed": 1}
        assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("broken", ["fleet.refresh", "keys.check"])
async def test_fault_beside_the_hot_path_is_told_in_the_words_of_its_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    async with front(tmp_path) as gate:
        part, method = broken.split(".")
        monkeypatch.setattr(getattr(gate.gateway, part), method, lambda *_: 1 / 0)
        assert_error(await gate.ask(request(None, "/v1/models", method="GET")), 500, "internal_error")
        ollama = await gate.ask(request(None, "/api/tags", method="GET"))
        assert (ollama.status, ollama.json["code"]) == (500, "internal_error")
        assert isinstance(ollama.json["error"], str)
        assert "ZeroDivisionError" in caplog.text


async def test_work_that_was_cancelled_under_a_handler_is_told_as_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async with front(tmp_path) as gate:
        monkeypatch.setattr(gate.gateway.fleet, "refresh", cancelled)
        assert_error(await gate.ask(request(None, "/v1/models", method="GET")), 500, "internal_error")


async def test_fault_in_reading_a_head_is_a_500_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(tmp_path) as gate:
        monkeypatch.setattr("laya.gateway.exchange.Exchange.read_head", lambda *_: 1 / 0)
        client = await gate.client()
        assert_error(await client.ask(request(CHAT, headers=("connection: close",))), 500, "internal_error")
        assert await client.closed()
        assert "ZeroDivisionError" in caplog.text


async def test_answers_with_nothing_in_them_are_relayed(tmp_path: Path) -> None:
    empty = answers(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    async with front(tmp_path, empty, cancels_whole=True) as gate:
        answer = await gate.ask(chat())
        assert (answer.status, answer.body) == (200, b"")


# whatever comes
WELL_FORMED = [
    chat(),
    chat(stream=True),
    request(method="GET", path="/health"),
    request(CHAT, headers=UPGRADE),
    request(CHAT, headers=(EXPECT,)),
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY[:10]) + chunk(BODY[10:]) + b"0\r\nx-trailer: 1\r\n\r\n",
    request(CHAT, "/v1/embeddings"),
    request(CHAT, headers=("connection: close",)),
    request(CHAT, version="1.0"),
]


def mutated(dice: random.Random) -> bytes:
    """A few requests behind each other, with a few of their bytes changed, left out or doubled."""
    data = bytearray(b"".join(dice.choices(WELL_FORMED, k=dice.randint(1, 4))))
    for _ in range(dice.randint(0, 3)):
        at = dice.randrange(len(data))
        kind = dice.randrange(4)
        if kind == 0:
            data[at] = dice.randrange(256)
        elif kind == 1:
            del data[at : at + dice.randint(1, 20)]
        elif kind == 2:
            data[at:at] = data[at : at + dice.randint(1, 40)]
        else:
            data[at:at] = dice.choice([b"\r\n", b"\x00", b"\n\n", b"content-length: 3\r\n", b"%00", b" "])
    return bytes(data)


async def test_mutated_requests_leave_the_books_straight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dice = random.Random(11)
    async with front(tmp_path) as gate:
        for _ in range(400):
            client = await gate.client()
            data = mutated(dice)
            cuts = sorted(dice.choices(range(len(data)), k=dice.randint(0, 3)))
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                client.send(data[start:end])
                await asyncio.sleep(0)
            if dice.random() < 0.3:
                client.abort()
            else:
                await asyncio.sleep(0.001)
                if not client.writer.transport.is_closing():
                    client.writer.write_eof()
                await client.closed()
        await until(lambda: not gate.connections)
        await gate.settled()
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
        assert gate.stats.outcomes["served"] > 50
        assert (await gate.ask(chat())).status == 200
