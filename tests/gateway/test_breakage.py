"""An engine that breaks, at every point of an answer: the client is told, nothing is told twice, nothing hangs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from laya.gateway import sending

from .front import CHAT, Client, chat, front, request, until
from .scripted_engine import (
    DONE,
    STREAM_HEAD,
    Call,
    Script,
    answers,
    chunk,
    delta,
    event,
    hello,
    progress,
    streams,
    usage,
    whole,
)

pytestmark = pytest.mark.anyio
HEALTH = request(method="GET", path="/health")


def breaks(*pieces: bytes, reset: bool = False) -> Script:
    """Write these, then break the connection."""

    async def script(call: Call) -> None:
        await answers(*pieces)(call)
        await asyncio.sleep(0.005)
        if reset:
            call.abort()
        else:
            call.close()

    return script


async def stream_to_its_end(client: Client) -> list[Any]:
    """Events of a stream that breaks off."""
    answer = await client.broken_answer()
    assert answer.status == 200
    data = answer.body
    payloads = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [json.loads(payload) for payload in payloads if payload != b"[DONE]"] + ["[DONE]"] * data.endswith(DONE)


BEFORE_ANY_TOKEN = {
    "nothing": [],
    "half a head": [b"HTTP/1.1 200 O"],
    "the head": [STREAM_HEAD],
    "progress": [STREAM_HEAD, chunk(progress(1, 9))],
    "half an event": [STREAM_HEAD, chunk(delta(content="a")[:10])],
}


@pytest.mark.parametrize("point", BEFORE_ANY_TOKEN)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_engine_that_breaks_before_a_token_is_a_502(
    tmp_path: Path, point: str, stream: bool, reset: bool
) -> None:
    async with front(tmp_path, breaks(*BEFORE_ANY_TOKEN[point], reset=reset)) as gate:
        client = await gate.client()
        answer = await client.ask(chat(stream=stream))
        assert (answer.status, answer.error["code"]) == (502, "engine_crashed")
        assert "'stub'" in answer.error["message"]
        gate.engine.script = hello
        assert (await client.ask(chat())).status == 200  # on the same connection
        assert await gate.settled() == {"failed": 1, "served": 1}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("last", [b"", chunk(delta(content="b"))[:30]])
async def test_stream_that_breaks_ends_with_an_error_event_and_no_done(
    tmp_path: Path, reset: bool, last: bytes
) -> None:
    async with front(tmp_path, breaks(STREAM_HEAD, chunk(delta(content="a")), last, reset=reset)) as gate:
        client = await gate.client()
        client.send(chat(stream=True))
        first, error = await stream_to_its_end(client)
        assert first["choices"][0]["delta"]["content"] == "a"
        assert error["error"]["code"] == "engine_crashed" and "broke off" in error["error"]["message"]
        assert await gate.settled() == {"failed": 1}
        gate.engine.script = hello
        assert (await gate.ask(chat())).status == 200


async def test_whole_answer_that_breaks_is_a_502(tmp_path: Path) -> None:
    async with front(tmp_path, breaks(STREAM_HEAD, chunk(delta(content="a")))) as gate:
        answer = await gate.ask(chat())
        assert (answer.status, answer.error["code"]) == (502, "engine_crashed")
        assert await gate.settled() == {"failed": 1}


async def test_stream_without_done_is_no_whole_answer(tmp_path: Path) -> None:
    async with front(tmp_path, streams(delta(content="a"), delta("stop"), usage())) as gate:
        client = await gate.client()
        client.send(chat(stream=True))
        events = await stream_to_its_end(client)
        assert "error" in events[-1] and "[DONE]" not in events
        answer = await gate.ask(chat())
        assert answer.status == 502 and "ended before its answer did" in answer.error["message"]
        assert await gate.settled() == {"failed": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_breaks_after_done_has_answered(tmp_path: Path, stream: bool) -> None:
    pieces = [STREAM_HEAD, *(chunk(one) for one in (delta(content="a"), delta("stop"), usage(), DONE))]
    async with front(tmp_path, breaks(*pieces)) as gate:
        client = await gate.client()
        for _ in range(2):
            answer = await client.ask(chat(stream=stream))
            assert answer.status == 200
            assert answer.body.endswith(DONE) if stream else answer.json["choices"][0]["message"]["content"] == "a"
        assert await gate.settled() == {"served": 2}


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b'{"half": '],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b'{"half": ')],
    ],
)
@pytest.mark.parametrize("reset", [False, True])
async def test_raw_answer_that_breaks_is_cut_off_visibly(tmp_path: Path, pieces: list[bytes], reset: bool) -> None:
    async with front(tmp_path, breaks(*pieces, reset=reset), cancels_whole=True) as gate:
        client = await gate.client()
        client.send(chat())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.answer()
        assert await gate.settled() == {"failed": 1}


async def test_raw_answer_that_breaks_before_its_body_is_a_502(tmp_path: Path) -> None:
    async with front(tmp_path, breaks(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"), cancels_whole=True) as gate:
        assert (await gate.ask(chat())).status == 502


# errors inside a stream
@pytest.mark.parametrize("stream", [False, True])
async def test_error_event_before_a_token_is_a_502(tmp_path: Path, stream: bool) -> None:
    script = streams(event({"error": {"code": 500, "message": "Context size has been exceeded."}}))
    async with front(tmp_path, script) as gate:
        client = await gate.client()
        answer = await client.ask(chat(stream=stream))
        assert answer.status == 502 and "Context size has been exceeded." in answer.error["message"]
        assert (await client.ask(HEALTH)).status == 200
        assert await gate.settled() == {"failed": 1}


async def test_error_event_in_a_stream_ends_it(tmp_path: Path) -> None:
    script = streams(delta(content="a"), event({"error": "full"}), delta(content="b"), DONE)
    async with front(tmp_path, script) as gate:
        client = await gate.client()
        client.send(chat(stream=True))
        first, error = await stream_to_its_end(client)
        assert first["choices"][0]["delta"]["content"] == "a" and "full" in error["error"]["message"]
        await asyncio.wait_for(gate.engine.calls[0].gone.wait(), 5)
        assert (await gate.ask(chat())).status == 502
        assert await gate.settled() == {"failed": 2}


async def test_last_words_of_a_stream_come_before_the_end_of_its_connection(tmp_path: Path) -> None:
    """A client in a browser, Node or aiohttp loses what it has not read when the end of the connection comes."""
    async with front(tmp_path, breaks(STREAM_HEAD, chunk(delta(content="a")))) as gate:
        client = await gate.client()
        client.send(chat(stream=True) + HEALTH)
        data = await asyncio.wait_for(client.reader.readuntil(b"\n\n\r\n"), 5)
        while b"engine_crashed" not in data:
            data = await asyncio.wait_for(client.reader.readuntil(b"\n\n\r\n"), 5)
        assert not client.reader.at_eof()
        assert await client.closed()  # and who asked behind it is not answered on it


async def test_error_event_for_an_http_1_0_client_ends_the_connection(tmp_path: Path) -> None:
    async with front(tmp_path, breaks(STREAM_HEAD, chunk(delta(content="a")))) as gate:
        client = await gate.client()
        answer = await client.ask(request(CHAT | {"stream": True}, version="1.0"))
        assert b'"engine_crashed"' in answer.body and b"[DONE]" not in answer.body


NONSENSE = {
    "no JSON": b"data: {nope\n\n",
    "a list": b"data: [1]\n\n",
    "choices of another kind": event({"choices": 5}),
    "choices without members": event({"choices": [5]}),
    "a delta of another kind": event({"choices": [{"index": 0, "delta": "x"}]}),
    "an index of another kind": event({"choices": [{"index": "x", "delta": {"content": "x"}}]}),
    "usage of another kind": event({"choices": [], "usage": {"prompt_tokens": "x"}}),
    "progress of another kind": event({"choices": [], "prompt_progress": 5}),
}


@pytest.mark.parametrize("kind", NONSENSE)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [b"", delta(content="a")])
async def test_nonsense_in_a_stream_ends_the_request(tmp_path: Path, kind: str, stream: bool, before: bytes) -> None:
    async with front(tmp_path, streams(before + NONSENSE[kind], DONE)) as gate:
        client = await gate.client()
        client.send(chat(stream=stream))
        answer = await client.answer_so_far()
        assert answer.status in (200, 502)
        outcomes = await gate.settled()
        assert outcomes in ({"failed": 1}, {"served": 1})
        assert outcomes == {"served": 1} or b"engine_crashed" in answer.body
        gate.engine.script = hello
        assert (await gate.ask(chat())).status == 200


async def test_nonsense_logprobs_end_the_request(tmp_path: Path) -> None:
    choice = {"index": 0, "text": "a", "logprobs": {"content": [{"no": "token"}]}}
    async with front(tmp_path, streams(event({"choices": [choice]}, chat=False), DONE)) as gate:
        for stream in (False, True):
            body = {"model": "stub", "prompt": "x", "logprobs": 1, "stream": stream}
            assert (await gate.ask(request(body, "/v1/completions"))).status == 502
        assert await gate.settled() == {"failed": 2}


@pytest.mark.parametrize("garbage", [b"SSH-2.0-x\r\n", b"\x00" * 20, b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n"])
async def test_engine_that_does_not_speak_http_is_a_502(tmp_path: Path, garbage: bytes) -> None:
    async with front(tmp_path, answers(garbage)) as gate:
        answer = await gate.ask(chat())
        assert answer.status == 502 and "not HTTP" in answer.error["message"]


# connections that are kept
async def test_kept_connection_that_was_closed_is_replaced_once(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        if call.n_requests == 1:
            await hello(call)
        else:
            call.abort()

    async with front(tmp_path, script) as gate:
        client = await gate.client()
        for user in ("a", "b", "c"):
            assert (await client.ask(chat(user=user))).status == 200
        users = [body["user"] for body in gate.engine.bodies]
        assert users == ["a", "b", "b", "c", "c"]
        assert await gate.settled() == {"served": 3}


async def test_replaced_connection_that_closes_too_is_a_502(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        if len(gate.engine.calls) == 1:
            await hello(call)
        else:
            call.abort()

    async with front(tmp_path, script) as gate:
        client = await gate.client()
        assert (await client.ask(chat())).status == 200
        assert (await client.ask(chat())).status == 502
        assert len(gate.engine.calls) == 3
        assert await gate.settled() == {"served": 1, "failed": 1}


@pytest.mark.parametrize("said", [b"H", STREAM_HEAD])
async def test_after_one_byte_nothing_is_sent_again(tmp_path: Path, said: bytes) -> None:
    async def script(call: Call) -> None:
        if call.n_requests == 1:
            await hello(call)
        else:
            call.write(said)
            await asyncio.sleep(0.005)
            call.close()

    async with front(tmp_path, script) as gate:
        client = await gate.client()
        assert (await client.ask(chat())).status == 200
        assert (await client.ask(chat())).status == 502
        assert len(gate.engine.calls) == 2


async def test_request_that_a_dying_engine_never_read_is_sent_once_more(tmp_path: Path) -> None:
    async def dies(call: Call) -> None:
        gate.engine.script = hello
        call.reset()

    async with front(tmp_path, dies) as gate:
        assert (await gate.ask(chat())).status == 200
        assert len(gate.engine.calls) == 2
        assert await gate.settled() == {"served": 1}


async def test_request_that_every_engine_dies_of_is_sent_twice_at_most(tmp_path: Path) -> None:
    async def dies(call: Call) -> None:
        call.reset()

    async with front(tmp_path, dies) as gate:
        assert (await gate.ask(chat())).status == 502
        assert len(gate.engine.calls) == 2
        assert await gate.settled() == {"failed": 1}


async def test_engine_that_hangs_up_on_every_connection_is_told(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        gate.engine.on_connect = Call.abort
        for _ in range(30):
            answer = await gate.ask(chat())
            assert answer.status in (502, 503), answer
        assert await gate.settled() == {"failed": 30}


async def test_engine_that_is_not_there_is_told(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        assert gate.engine._server is not None
        gate.engine._server.close()
        await until(lambda: not gate.engine._server.is_serving())  # type: ignore[union-attr]
        answer = await gate.ask(chat())
        assert (answer.status, answer.error["code"]) == (503, "engine_failed")
        assert await gate.settled() == {"failed": 1}


async def test_engine_that_dies_under_many_fails_each_once(tmp_path: Path) -> None:
    async def hold(call: Call) -> None:
        call.write(STREAM_HEAD)
        call.write(chunk(delta(content="a")))
        await call.gone.wait()

    async with front(tmp_path, hold, max_num_seqs=4) as gate:
        clients = [await gate.client() for _ in range(8)]
        for client in clients:
            client.send(chat(stream=True))
        await until(lambda: len(gate.engine.calls) == 4 and len(gate.endpoint.queue) == 4)
        gate.engine.script = hello
        for call in list(gate.engine.open):
            call.abort()
        bodies = [(await client.answer_so_far()).body for client in clients]
        assert sum(b"engine_crashed" in body for body in bodies) == 4
        assert sum(body.endswith(DONE) for body in bodies) == 4
        assert await gate.settled() == {"failed": 4, "served": 4}


async def test_fault_of_ours_in_one_request_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hold(call: Call) -> None:
        await free.wait()
        await hello(call)

    free = asyncio.Event()
    async with front(tmp_path, hold, max_num_seqs=1) as gate:
        clients = [await gate.client() for _ in range(3)]
        for number, client in enumerate(clients):
            client.send(chat(user=str(number)))
            await until(lambda number=number: gate.stats.arrivals == number + 1)
        body = sending.engine_body

        def faulty(exchange: Any, endpoint: Any) -> bytes:
            if exchange.parsed.session == "1":
                raise ZeroDivisionError
            return body(exchange, endpoint)

        monkeypatch.setattr(sending, "engine_body", faulty)
        free.set()
        assert [(await client.answer()).status for client in clients] == [200, 500, 200]
        assert await gate.settled() == {"served": 2, "failed": 1}


async def test_embedding_that_breaks_is_a_502(tmp_path: Path) -> None:
    async with front(tmp_path, breaks(), model={"task": "embed"}) as gate:
        assert (await gate.ask(request({"model": "stub", "input": "x"}, "/v1/embeddings"))).status == 502
        assert await gate.settled() == {"failed": 1}


async def test_error_answer_that_breaks_is_a_502(tmp_path: Path) -> None:
    async with front(tmp_path, breaks(whole({"error": {"message": "x" * 100}}, 500)[:-50])) as gate:
        assert (await gate.ask(chat())).status == 502
