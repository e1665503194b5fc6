"""An engine's answer on its way to the client: streamed, whole, raw, refused, and never faster than it is read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from .front import CHAT, Answer, chat, front, request, until
from .scripted_engine import (
    DONE,
    STREAM_HEAD,
    USAGE,
    Call,
    answers,
    chunk,
    delta,
    event,
    hello_events,
    progress,
    standstill,
    streams,
    usage,
    whole,
)

pytestmark = pytest.mark.anyio
COMPLETION = {"model": "stub", "prompt": "hi"}


def events_of(answer: Answer) -> list[Any]:
    payloads = [part.removeprefix(b"data: ") for part in answer.body.split(b"\n\n") if part and part[:1] != b":"]
    return [payload.decode() if payload == b"[DONE]" else json.loads(payload) for payload in payloads]


def text_of(answer: Answer) -> str:
    choices = [choice for body in events_of(answer) if body != "[DONE]" for choice in body["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


# what is asked of the engine
async def test_engine_is_asked_for_a_stream_with_progress_and_usage(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        await gate.ask(chat(temperature=0.5, chat_template_kwargs={"a": [1, {"b": None}]}))
        asked = gate.engine.bodies[0]
        assert asked == CHAT | {
            "temperature": 0.5,
            "chat_template_kwargs": {"a": [1, {"b": None}]},
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }


async def test_engine_that_notices_is_asked_for_the_whole_answer(tmp_path: Path) -> None:
    async with front(tmp_path, cancels_whole=True) as gate:
        answer = await gate.ask(chat(model="stub-alias"))
        assert gate.engine.bodies[0] == CHAT
        assert answer.json["choices"][0]["message"]["content"] == "Hello"
        await gate.ask(chat(stream=True))
        assert gate.engine.bodies[1]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_notices_gives_logprobs_event_by_event(tmp_path: Path, stream: bool) -> None:
    entry = {"token": "a", "bytes": [97], "logprob": -1.0}
    told = {"content": [entry | {"top_logprobs": [entry]}]}
    taken_out = {"content": [entry | {"token": "```", "top_logprobs": []}]}
    script = streams(
        delta(logprobs=taken_out["content"], content=None), delta(logprobs=told["content"], content="a"), delta("stop"),
        usage(), DONE,
    )  # fmt: skip
    async with front(tmp_path, script, cancels_whole=True) as gate:
        answer = await gate.ask(chat(logprobs=True, stream=stream))
        assert gate.engine.bodies[0]["top_logprobs"] == 1
        assert gate.engine.bodies[0]["stream"] is True
        bodies = [body for body in events_of(answer) if body != "[DONE]"] if stream else [answer.json]
        found = [choice.get("logprobs") for body in bodies for choice in body["choices"]]
        assert [each["content"] for each in found if each] == [[entry | {"top_logprobs": []}]]


async def test_defaults_are_for_requests_that_do_not_say(tmp_path: Path) -> None:
    async with front(tmp_path, model={"defaults": {"temperature": 0.1, "top_p": 0.9}}) as gate:
        await gate.ask(chat(temperature=1, top_p=None))
        assert (gate.engine.bodies[0]["temperature"], gate.engine.bodies[0]["top_p"]) == (1, None)
        await gate.ask(chat())
        assert (gate.engine.bodies[1]["temperature"], gate.engine.bodies[1]["top_p"]) == (0.1, 0.9)


@pytest.mark.parametrize("name", ["repeat_last_n", "dry_penalty_last_n"])
async def test_look_back_over_the_whole_context_is_sent_as_its_tokens(tmp_path: Path, name: str) -> None:
    async with front(tmp_path) as gate:
        for asked in (-1, 2**31 - 1, 64, 0):
            await gate.ask(chat(**{name: asked}))
        whole_context = gate.engine.bodies[0][name]
        assert whole_context == gate.endpoint.planned.max_seq_len
        assert [body[name] for body in gate.engine.bodies] == [whole_context, whole_context, 64, 0]


async def test_look_back_of_the_config_over_the_whole_context_is_sent_as_its_tokens(tmp_path: Path) -> None:
    async with front(tmp_path, model={"defaults": {"repeat_last_n": -1}}) as gate:
        await gate.ask(chat())
        await gate.ask(chat(repeat_last_n=5))
        assert [body["repeat_last_n"] for body in gate.engine.bodies] == [gate.endpoint.planned.max_seq_len, 5]


async def test_n_predict_is_sent_as_max_tokens(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        await gate.ask(chat(n_predict=7))
        await gate.ask(chat(n_predict=-1))
        assert gate.engine.bodies == [CHAT | gate.engine.bodies[1] | {"max_tokens": 7}, gate.engine.bodies[1]]
        assert "max_tokens" not in gate.engine.bodies[1] and "n_predict" not in gate.engine.bodies[1]


async def test_newer_max_tokens_is_sent_under_the_older_name(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        await gate.ask(chat(max_completion_tokens=7, max_tokens=9))
        assert gate.engine.bodies[0]["max_tokens"] == 7
        assert "max_completion_tokens" not in gate.engine.bodies[0]


async def test_shared_pool_gives_every_request_a_ceiling(tmp_path: Path) -> None:
    planned = {"kv_unified": True, "kv_pool_tokens": 16384}
    async with front(tmp_path, planned=planned, model={"default_max_tokens": 100}) as gate:
        answer = await gate.ask(chat())
        assert answer.headers["x-laya-max-tokens"] == "100"
        assert gate.engine.bodies[0]["max_tokens"] == 100


async def test_max_tokens_beyond_the_window_is_lowered_and_said(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        gate.engine.prompt_tokens = 5000
        answer = await gate.ask(chat(max_tokens=8000))
        assert answer.headers["x-laya-max-tokens"] == str(8192 - 5000)
        assert gate.engine.bodies[0]["max_tokens"] == 8192 - 5000


async def test_prompt_that_fits_with_what_the_template_was_measured_to_add_is_not_counted(tmp_path: Path) -> None:
    planned = {"max_seq_len": 512, "slot_tokens": 512}
    async with front(tmp_path, planned=planned, template_tokens=100) as gate:
        await gate.ask(chat(max_tokens=64))
        await gate.ask(chat(max_tokens=64, ignore_eos=True))
        await gate.ask(request(COMPLETION | {"max_tokens": 64}, "/v1/completions"))
        assert gate.engine.n_counts == 0
        await gate.ask(chat(max_tokens=400))
        await gate.ask(request(COMPLETION | {"max_tokens": 490}, "/v1/completions"))
        assert gate.engine.n_counts == 2


TOOL = {"type": "function", "function": {"name": "a"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"a": 1}},
        {"reasoning_effort": "low"},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_what_a_template_may_write_more_for_is_counted(tmp_path: Path, fields: dict[str, Any]) -> None:
    planned = {"max_seq_len": 512, "slot_tokens": 512}
    async with front(tmp_path, planned=planned, template_tokens=100) as gate:
        await gate.ask(chat(max_tokens=64, **fields))
        assert gate.engine.n_counts == 1


async def test_template_that_was_not_measured_is_bound_by_its_text(tmp_path: Path) -> None:
    async with front(tmp_path, planned={"max_seq_len": 512, "slot_tokens": 512}) as gate:
        await gate.ask(chat(max_tokens=64))
        assert gate.engine.n_counts == 1


async def test_prompt_beyond_the_window_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        gate.engine.prompt_tokens = 9000
        answer = await gate.ask(chat(max_tokens=8000))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert (answer.error["max_seq_len"], answer.error["prompt_tokens"]) == (8192, 9000)
        assert gate.engine.calls == []
        assert await gate.settled() == {"refused": 1}


async def test_text_that_no_tokenizer_brings_into_the_window_is_not_even_counted(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        gate.engine.prompt_tokens = 1
        text = "x" * (8192 * 32 + 40)
        answer = await gate.ask(chat(messages=[{"role": "user", "content": text}]))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["prompt_tokens"] > answer.error["max_seq_len"] == 8192
        assert gate.engine.n_connections == 0


# what the client gets
@pytest.mark.parametrize("wants_usage", [False, True])
async def test_stream_is_relayed_without_what_is_ours(tmp_path: Path, wants_usage: bool) -> None:
    async with front(tmp_path) as gate:
        options = {"stream_options": {"include_usage": True}} if wants_usage else {}
        answer = await gate.ask(chat(stream=True, **options))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert b"prompt_progress" not in answer.body and answer.body.endswith(DONE)
        assert text_of(answer) == "Hello"
        figures = [body["usage"]["total_tokens"] for body in events_of(answer)[:-1] if body.get("usage")]
        assert figures == ([11] if wants_usage else [])
        assert await gate.settled() == {"served": 1}
        assert (gate.endpoint.stats.tokens_in, gate.endpoint.stats.tokens_out) == (9, 2)


async def test_whole_answer_is_the_streams(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(chat())
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["object"] == "chat.completion"
        assert answer.json["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert {name: answer.json["usage"][name] for name in USAGE} == USAGE


async def test_streaming_turned_off_answers_in_one_event(tmp_path: Path) -> None:
    async with front(tmp_path, model={"enable_streaming": False}) as gate:
        answer = await gate.ask(chat(stream=True, stream_options={"include_usage": True}))
        first, figures, last = events_of(answer)
        assert first["choices"][0]["delta"]["content"] == "Hello" and figures["usage"]["total_tokens"] == 11
        assert last == "[DONE]"


async def test_completion_logprobs_zero_asks_for_one_and_gives_none(tmp_path: Path) -> None:
    entry = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}
    choice = {"index": 0, "text": "a", "finish_reason": None, "logprobs": {"content": [entry]}}
    script = streams(event({"choices": [choice]}, chat=False), usage(), DONE)
    async with front(tmp_path, script) as gate:
        answer = await gate.ask(request(COMPLETION | {"logprobs": 0}, "/v1/completions"))
        assert gate.engine.bodies[0]["logprobs"] == 1
        logprobs = answer.json["choices"][0]["logprobs"]
        assert logprobs == {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [0]}


async def test_raw_answer_is_not_touched(tmp_path: Path) -> None:
    data = b'{ "odd" :  [1,2 ],"usage": null}\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.x+json\r\n"
    for raw in (
        head + b"content-length: %d\r\n\r\n" % len(data) + data,
        head
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"".join(chunk(data[i : i + 1]) for i in range(len(data)))
        + b"0\r\n\r\n",
        head + b"connection: close\r\n\r\n" + data,
    ):

        async def script(call: Call, raw: bytes = raw) -> None:
            call.write(raw)
            if b"connection: close" in raw:
                call.close()

        async with front(tmp_path, script, cancels_whole=True) as gate:
            client = await gate.client()
            for version in ("1.1", "1.0"):
                answer = await client.ask(request(CHAT, version=version))
                assert (answer.status, answer.body) == (200, data)
                assert answer.headers["content-type"] == "application/vnd.x+json"
            assert await gate.settled() == {"served": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_large_pieces_are_relayed(tmp_path: Path, stream: bool) -> None:
    pieces = ["x" * 3_000_000, "é" * 500_000, "y" * 10]
    script = streams(*[delta(content=piece) for piece in pieces], usage(), DONE)
    async with front(tmp_path, script) as gate:
        answer = await gate.ask(chat(stream=stream))
        said = text_of(answer) if stream else answer.json["choices"][0]["message"]["content"]
        assert said == "".join(pieces)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_bytes_in_any_pieces_make_no_difference(tmp_path: Path, size: int, stream: bool) -> None:
    data = STREAM_HEAD + b"".join(chunk(one) for one in hello_events()) + b"0\r\n\r\n"

    async def script(call: Call) -> None:
        for start in range(0, len(data), size):
            call.write(data[start : start + size])
            await asyncio.sleep(0)

    async with front(tmp_path, script) as gate:
        answer = await gate.ask(chat(stream=stream))
        assert (text_of(answer) if stream else answer.json["choices"][0]["message"]["content"]) == "Hello"


async def test_long_prefill_is_noted_as_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laya.gateway.relay.PREFILL_NOTE_EVERY_S", -1.0)

    async def script(call: Call) -> None:
        call.write(STREAM_HEAD)
        for n_tokens in (10, 40):
            call.write(chunk(progress(n_tokens, 40)))
            await until(lambda n=n_tokens: next(iter(gate.endpoint.live)).prefill_done == n)
        call.write(b"".join(map(chunk, hello_events()[1:])) + b"0\r\n\r\n")

    async with front(tmp_path, script) as gate:
        answer = await gate.ask(chat(stream=True))
        assert answer.body.startswith(b": prefill 25 %\n\n: prefill 100 %\n\n")
        assert text_of(answer) == "Hello"


async def test_prefill_shows_in_the_state(tmp_path: Path) -> None:
    async with front(tmp_path, streams(progress(10, 40), ends=False)) as gate:
        client = await gate.client()
        client.send(chat(stream=True))
        await until(lambda: [one for one in gate.endpoint.live if one.prefill_total])
        (exchange,) = gate.endpoint.live
        state = exchange.as_state(exchange.arrived_s + 1)
        assert (state["phase"], state["prefill_tokens"], state["prompt_tokens"]) == ("prefill", 10, 40)
        assert state["key"] == "tests"


async def test_empty_answer_is_a_served_one(tmp_path: Path) -> None:
    async with front(tmp_path, streams(progress(9, 9), usage(9, 0), DONE)) as gate:
        assert events_of(await gate.ask(chat(stream=True))) == ["[DONE]"]
        assert (await gate.ask(chat())).json["choices"] == []
        assert await gate.settled() == {"served": 2}


# what an engine refuses
REFUSED = [
    (400, {"message": "bad grammar", "type": "invalid_request_error"}, 400, "invalid_request", "bad grammar"),
    (
        400,
        {"message": "too long", "type": "exceed_context_size_error", "n_prompt_tokens": 9000, "n_ctx": 8192},
        400,
        "context_length_exceeded",
        "9000 tokens",
    ),
    (400, {"message": "too long", "type": "exceed_context_size_error"}, 400, "invalid_request", "too long"),
    (501, {"message": "no embeddings"}, 501, "not_supported", "'stub' can't do this: no embeddings"),
    (500, {"message": "image input is not supported - hint"}, 501, "not_supported", "image input"),
    (503, {"message": "Loading model"}, 503, "model_loading", "Loading model"),
    (500, {"message": "Failed to parse tools: key 'function' not found"}, 400, "invalid_request", "parse tools"),
    (500, {"message": "Unable to generate parser for this template"}, 400, "invalid_request", "generate parser"),
    (500, {"message": "JSON schema conversion failed"}, 400, "invalid_request", "JSON schema"),
    (500, {"message": "Failed to parse input at pos 7: x"}, 503, "engine_failed", "at pos 7"),  # the model's own words
    (500, {"message": "boom"}, 503, "engine_failed", "boom"),
    (418, "teapot", 400, "invalid_request", "teapot"),
    (502, None, 503, "engine_failed", "status 502 without a reason"),
    (302, None, 502, "engine_refused", "'stub' redirects (302)"),
    (401, {"message": "no"}, 502, "engine_refused", "The engine of 'stub' refused Laya's key (401)"),
    (403, None, 502, "engine_refused", "The engine of 'stub' refused Laya's key (403)"),
    (404, {"message": "no model x"}, 502, "engine_refused", "does not know what it is asked for (404): no model x"),
    (408, None, 502, "engine_refused", "The engine of 'stub' waited too long for the request (408)"),
    (422, None, 400, "invalid_request", "The engine of 'stub' refused the request: status 422 without a reason"),
    (429, {"message": "too many"}, 429, "engine_busy", "The engine of 'stub' takes no more requests now: too many"),
]
OF_ENGINES = ("engine_failed", "engine_refused", "engine_busy")


@pytest.mark.parametrize(("status", "said", "expected", "code", "words"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_engine_error_becomes_one_of_ours(
    tmp_path: Path, status: int, said: Any, expected: int, code: str, words: str, stream: bool, cancels_whole: bool
) -> None:
    script = answers(whole({"error": said}, status))
    async with front(tmp_path, script, cancels_whole=cancels_whole) as gate:
        client = await gate.client()
        answer = await client.ask(chat(stream=stream))
        assert (answer.status, answer.error["code"]) == (expected, code)
        assert words in answer.error["message"]
        assert (await client.ask(request(method="GET", path="/health"))).status == 200
        assert (answer.headers.get("x-should-retry") == "false") is (expected in (400, 501))
        assert await gate.settled() == {"failed" if code in OF_ENGINES else "refused": 1}


async def test_busy_engine_says_when_to_come_again(tmp_path: Path) -> None:
    raw = b"HTTP/1.1 429 X\r\nretry-after: 17\r\ncontent-length: 0\r\n\r\n"
    async with front(tmp_path, answers(raw)) as gate:
        answer = await gate.ask(chat())
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "engine_busy", "17")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>Bad gateway</html>", b"[1]", b'{"error": []}', b'{"error": {"message": 5}}', b"\xff" * 3_000_000],
)
async def test_engine_error_without_sense_is_one_all_the_same(tmp_path: Path, body: bytes) -> None:
    raw = b"HTTP/1.1 500 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with front(tmp_path, answers(raw)) as gate:
        answer = await gate.ask(chat())
        assert (answer.status, answer.error["code"]) == (503, "engine_failed")


# a client that reads slowly, or leaves
async def endless(call: Call) -> None:
    """A stream that goes on as long as somebody reads it."""
    call.write(STREAM_HEAD)
    piece = chunk(delta(content="x" * 20_000))
    while not call.gone.is_set():
        call.write(piece)
        await call.drain()
        await asyncio.sleep(0)


async def endless_whole(call: Call) -> None:
    call.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
    while not call.gone.is_set():
        call.write(chunk(b"x" * 20_000))
        await call.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("raw", [False, True])
async def test_slow_reader_holds_the_engine_up(tmp_path: Path, raw: bool) -> None:
    script = endless_whole if raw else endless
    async with front(tmp_path, script, cancels_whole=raw) as gate:
        client = await gate.client(limit=2**16)
        client.send(chat(stream=not raw))
        await until(lambda: gate.engine.calls)
        call = gate.engine.calls[0]
        first = await standstill(call)
        connection = next(iter(gate.connections))
        assert connection.transport.get_write_buffer_size() < 2**20
        for _ in range(first // 2**16 + 20):  # the client reads on, and so does the engine write on
            await client.reader.read(2**16)
        await until(lambda: call.n_written > first)
        again = await standstill(call)
        assert connection.transport.get_write_buffer_size() < 2**20
        assert again > first
        client.abort()
        await asyncio.wait_for(call.gone.wait(), 5)
        assert await gate.settled() == {"cancelled": 1}


@pytest.mark.parametrize("piece_bytes", [2_000, 200_000, 3_000_000])
async def test_stream_that_comes_back_for_a_slow_client_stays_held_up(tmp_path: Path, piece_bytes: int) -> None:
    """Also where what the native pump could not send holds the client's buffer up by itself."""

    async def pieces(call: Call) -> None:
        call.write(STREAM_HEAD)
        piece = chunk(delta(content="x" * piece_bytes))
        while not call.gone.is_set():
            call.write(piece)
            await call.drain()
            await asyncio.sleep(0)

    async with front(tmp_path, pieces) as gate:
        client = await gate.client(limit=2**16)
        client.send(chat(stream=True))
        await until(lambda: gate.engine.calls)
        await asyncio.wait_for(standstill(gate.engine.calls[0]), 10)
        client.abort()
        assert await gate.settled() == {"cancelled": 1}


async def test_client_that_reads_nothing_while_it_waits_holds_its_engine_up_too(tmp_path: Path) -> None:
    async with front(tmp_path, endless, max_num_seqs=1) as gate:
        first = await gate.client()
        first.send(chat(stream=True))
        await until(lambda: gate.endpoint.live)
        (connection_of_first,) = gate.connections
        client = await gate.client(limit=2**16)
        client.send(chat(stream=True))
        await until(lambda: len(gate.endpoint.queue) == 1)
        (connection,) = gate.connections - {connection_of_first}
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        (waiting,) = gate.endpoint.queue
        while not connection.flow.write_paused:
            waiting.write(b": waiting\n\n" * 10_000)
        n_before = connection.transport.get_write_buffer_size()
        first.abort()
        await until(lambda: len(gate.engine.calls) == 2)
        await asyncio.wait_for(standstill(gate.engine.calls[-1]), 10)
        assert connection.transport.get_write_buffer_size() == n_before
        client.abort()
        assert await gate.settled() == {"cancelled": 2}


async def test_client_that_never_reads_on_is_dropped(tmp_path: Path) -> None:
    async with front(tmp_path, endless) as gate:
        client = await gate.client(limit=2**16)
        client.send(chat(stream=True))
        await until(lambda: gate.engine.calls)
        await standstill(gate.engine.calls[0])
        gate.sweep(119)
        assert gate.stats.in_flight == 1
        gate.sweep(121)
        await asyncio.wait_for(gate.engine.calls[0].gone.wait(), 5)
        assert await gate.settled() == {"cancelled": 1}


async def silent(call: Call) -> None:
    await call.gone.wait()


LEAVING = {
    "before the head": silent,
    "after the head": answers(STREAM_HEAD),
    "in the prefill": streams(progress(1, 9), ends=False),
    "after a token": streams(delta(content="a"), ends=False),
    "in the middle of an event": answers(STREAM_HEAD, chunk(delta(content="a")[:20])),
    "after the end of the answer": streams(delta(content="a"), usage(), DONE, ends=False),
    "while it comes": endless,
}


@pytest.mark.parametrize("point", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_client_that_leaves_takes_the_engine_along(tmp_path: Path, point: str, stream: bool, reset: bool) -> None:
    async with front(tmp_path, LEAVING[point], max_num_seqs=1) as gate:
        client = await gate.client()
        client.send(chat(stream=stream))
        await until(lambda: gate.engine.calls)
        await asyncio.sleep(0.01)  # whatever comes, comes
        if reset:
            client.abort()
        else:
            client.close()
        await asyncio.wait_for(gate.engine.calls[0].gone.wait(), 5)
        assert await gate.settled() == {"cancelled": 1}


async def test_client_that_leaves_a_raw_answer_takes_the_engine_along(tmp_path: Path) -> None:
    for script in (silent, answers(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab"), endless_whole):
        async with front(tmp_path, script, cancels_whole=True) as gate:
            client = await gate.client()
            client.send(chat())
            await until(lambda: gate.engine.calls)
            client.abort()
            await asyncio.wait_for(gate.engine.calls[0].gone.wait(), 5)
            assert await gate.settled() == {"cancelled": 1}


async def test_client_that_leaves_while_the_engine_is_connected_to(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(chat())
        await until(lambda: gate.stats.arrivals)
        client.abort()
        await until(lambda: gate.stats.in_flight == 0)
        outcomes = await gate.settled()
        assert outcomes in ({"cancelled": 1}, {"served": 1})
        assert (await gate.ask(chat())).status == 200


# other endpoints
async def test_embeddings_are_relayed_raw(tmp_path: Path) -> None:
    body = {"object": "list", "data": [{"embedding": [0.5], "index": 0, "object": "embedding"}]}
    async with front(tmp_path, answers(whole(body)), model={"task": "embed"}) as gate:
        answer = await gate.ask(request({"model": "stub-alias", "input": "hi"}, "/v1/embeddings"))
        assert answer.json == body
        assert gate.engine.bodies[0] == {"model": "stub", "input": "hi"}
        assert gate.engine.calls[0].path == "/v1/embeddings"
        wrong = await gate.ask(chat())
        assert (wrong.status, wrong.error["code"]) == (501, "not_supported")
        assert await gate.settled() == {"served": 1, "refused": 1}


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_rerank_is_relayed_raw(tmp_path: Path, path: str) -> None:
    async with front(tmp_path, answers(whole({"results": []})), model={"task": "rerank"}) as gate:
        answer = await gate.ask(request({"model": "stub", "query": "q", "documents": ["a"]}, path))
        assert answer.json == {"results": []} and gate.engine.calls[0].path == "/v1/rerank"
