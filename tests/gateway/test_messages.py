"""Anthropic's Messages API over an engine whose answers are known: blocks, events, stops, refusals, keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laya.errors import EngineCrashed, Forbidden, InsufficientMemory, InvalidRequest, LayaError, QueueTimeout
from laya.gateway.envelopes import anthropic_error
from laya.gateway.messages_blocks import chat_messages
from laya.gateway.messages_request import chat_of, read_create
from laya.gateway.messages_turn import StopFinder

from .front import KEY, Answer, front, request
from .scripted_engine import DONE, STREAM_HEAD, Call, Script, chunk, delta, streams, usage

pytestmark = pytest.mark.anyio
PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": "stub", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


def create(*headers: str, key: str | None = KEY, path: str = PATH, **fields: Any) -> bytes:
    return request(BODY | fields, path, headers=headers, key=key)


def events_of(answer: Answer) -> list[Any]:
    found = []
    for block in answer.body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def says(*texts: str, reason: str = "stop") -> Script:
    return streams(*(delta(content=text) for text in texts), delta(reason), usage(), DONE)


def calls() -> Script:
    named = {"index": 0, "id": "call_a", "function": {"name": "get_weather", "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": text}} for text in ('{"city":', '"Paris"}')]
    second = {"index": 1, "id": "call_b", "function": {"name": "get_time", "arguments": "{}"}}
    deltas = [delta(tool_calls=[each]) for each in (named, *pieces, second)]
    return streams(delta(content="Wait."), *deltas, delta("tool_calls"), usage(), DONE)


def chat(**fields: Any) -> dict[str, Any]:
    return chat_of(read_create(json.dumps(BODY | fields).encode()))


async def test_whole_message_is_anthropics_object(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        answer = await world.ask(create("x-request-id: mine", system="Be brief.", top_k=3, metadata={"user_id": "ann"}))
        body = answer.json
        assert (answer.status, answer.headers["request-id"]) == (200, "mine")
        assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "stub")
        assert body["content"] == [{"type": "text", "text": "Hello"}]
        assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
        assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (9, 2)
        sent = world.engine.bodies[0]
        assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        assert (sent["max_tokens"], sent["top_k"], sent["user"]) == (100, 3, "ann")
        assert await world.settled() == {"served": 1}


async def test_stream_tells_each_step_in_the_official_order(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        events = events_of(await world.ask(create(stream=True)))
        assert [each["type"] for each in events] == [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        start = events[0]["message"]
        assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 9)
        assert events[2]["content_block"] == {"type": "text", "text": ""}
        assert events[3]["delta"] == {"type": "text_delta", "text": "Hel"}
        assert events[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert events[6]["usage"]["output_tokens"] == 2


async def test_calls_are_blocks_with_their_input(tmp_path: Path) -> None:
    async with front(tmp_path, calls()) as world:
        whole = (await world.ask(create(tools=[TOOL]))).json
        text, first, second = whole["content"]
        assert (text["text"], whole["stop_reason"]) == ("Wait.", "tool_use")
        assert first == {"type": "tool_use", "id": "call_a", "name": "get_weather", "input": {"city": "Paris"}}
        assert (second["name"], second["input"]) == ("get_time", {})
        events = events_of(await world.ask(create(tools=[TOOL], stream=True)))
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta" and each["index"] == 1]
        assert "".join(each["partial_json"] for each in deltas) == '{"city":"Paris"}'
        started = [each["content_block"] for each in events if each["type"] == "content_block_start"]
        assert started[1] == {"type": "tool_use", "id": "call_a", "name": "get_weather", "input": {}}


async def test_call_that_was_cut_says_so_and_one_that_is_wrong_fails(tmp_path: Path) -> None:
    def broken(reason: str) -> Script:
        call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"city":'}}
        return streams(delta(tool_calls=[call]), delta(reason), usage(completion=100), DONE)

    async with front(tmp_path, broken("length")) as world:
        cut = (await world.ask(create(tools=[TOOL]))).json
        assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})
        world.engine.script = broken("tool_calls")
        wrong = await world.ask(create(tools=[TOOL]))
        assert (wrong.status, wrong.error["type"], wrong.error["code"]) == (503, "api_error", "engine_failed")
        assert events_of(await world.ask_broken(create(tools=[TOOL], stream=True)))[-1]["type"] == "error"


@pytest.mark.parametrize(("thinking", "kinds"), [
    (None, ["thinking", "text"]),
    ({"type": "enabled", "budget_tokens": 50}, ["thinking", "text"]),
    ({"type": "adaptive", "display": "omitted"}, ["text"]),
    ({"type": "disabled"}, ["text"]),
])  # fmt: skip
async def test_thinking_is_a_block_unless_it_is_not_wanted(tmp_path: Path, thinking: Any, kinds: list[str]) -> None:
    script = streams(delta(reasoning_content="Hm"), delta(reasoning_content="m."), delta(content="Hi"), delta("stop"),
                     usage(), DONE)  # fmt: skip
    async with front(tmp_path, script) as world:
        body = (await world.ask(create(**({"thinking": thinking} if thinking else {})))).json
        assert [each["type"] for each in body["content"]] == kinds
        if kinds[0] == "thinking":
            assert body["content"][0] == {"type": "thinking", "thinking": "Hmm.", "signature": ""}
        sent = world.engine.bodies[0].get("chat_template_kwargs")
        assert sent == (None if thinking is None else {"enable_thinking": thinking["type"] != "disabled"})


async def test_answer_ends_at_its_stop_sequence_and_so_does_the_engine(tmp_path: Path) -> None:
    gone = []

    async def talks_on(call: Call) -> None:
        call.write(STREAM_HEAD)
        for text in ("One, t", "wo, thr", "ee, four"):
            call.write(chunk(delta(content=text)))
        await call.gone.wait()
        gone.append(call)

    async with front(tmp_path, talks_on) as world:
        whole = (await world.ask(create(stop_sequences=["three", "nine"]))).json
        assert (whole["content"][0]["text"], whole["stop_reason"]) == ("One, two, ", "stop_sequence")
        assert (whole["stop_sequence"], whole["usage"]["output_tokens"]) == ("three", 3)
        assert "stop" not in world.engine.bodies[0]
        events = events_of(await world.ask(create(stop_sequences=["three"], stream=True)))
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "three"}
        assert await world.settled() == {"served": 2}
        assert len(gone) == 2


def test_stop_finder_holds_back_no_more_than_a_beginning() -> None:
    finder = StopFinder(["abc", "b!"])
    assert finder.feed("xab") == ("x", None)
    assert finder.feed("d a") == ("abd ", None)
    assert finder.rest() == "a" and finder.rest() == ""
    assert finder.feed("zabcb!") == ("z", "abc")
    assert StopFinder([]).feed("any") == ("any", None)


async def test_context_that_ends_before_max_tokens_is_told(tmp_path: Path) -> None:
    async with front(tmp_path, says("Hel", reason="length")) as world:
        assert (await world.ask(create())).json["stop_reason"] == "model_context_window_exceeded"
        assert (await world.ask(create(max_tokens=2))).json["stop_reason"] == "max_tokens"


async def test_stream_that_breaks_off_ends_with_an_error_event(tmp_path: Path) -> None:
    async with front(tmp_path, streams(delta(content="Hel"), ends=False)) as world:
        script = world.engine.script

        async def breaks(call: Call) -> None:
            await script(call)
            call.abort()

        world.engine.script = breaks
        events = events_of(await world.ask_broken(create(stream=True)))
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
        assert "message_stop" not in [each["type"] for each in events]
        whole = await world.ask(create())
        assert (whole.status, whole.json["type"]) == (502, "error")
        assert await world.settled() == {"failed": 2}


async def test_key_may_come_as_x_api_key(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        assert (await world.ask(create(f"x-api-key: {KEY}", key=None))).status == 200
        for answer in (await world.ask(create("x-api-key: wrong", key=None)), await world.ask(create(key=None))):
            assert (answer.status, answer.json["type"]) == (401, "error")
            assert answer.error["type"] == "authentication_error"
        assert "x-api-key" in answer.error["message"]


async def test_count_is_the_engines(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        world.engine.prompt_tokens = 31
        body = {"model": "stub", "messages": BODY["messages"], "system": "Be brief.", "tools": [TOOL]}
        answer = await world.ask(request(body, PATH + "/count_tokens"))
        assert answer.json == {"input_tokens": 31}
        assert (await world.ask(request(body | {"max_tokens": 3}, PATH + "/count_tokens"))).status == 400
        unknown = await world.ask(request(body | {"model": "nobody"}, PATH + "/count_tokens"))
        assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")
        assert await world.settled() == {"served": 1, "refused": 2}


async def test_count_that_the_engine_does_not_answer_fails(tmp_path: Path) -> None:
    async with front(tmp_path, model={"replicas": 2}) as world:
        for engine in world.engines:
            await engine.stop()
        body = {"model": "stub", "messages": BODY["messages"]}
        answer = await world.ask(request(body, PATH + "/count_tokens"))
        assert (answer.status, answer.error["code"]) == (503, "engine_failed")
        assert await world.settled() == {"failed": 1}


@pytest.mark.parametrize(("fields", "said"), [
    ({"messages": [{"role": "user", "content": []}]}, "'messages[0].content' is empty"),
    ({"max_token": 1}, "'max_token' is not a field of /v1/messages. Did you mean 'max_tokens'?"),
    ({"max_tokens": None}, "'max_tokens' is missing."),
    ({"messages": []}, "'messages' is []"),
    ({"temperature": 3}, "'temperature' is 3"),
    ({"container": "c"}, "'container' is not supported here"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "this server takes text, image"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]}, "content[0].b' is not a"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool that the client runs"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, "there are: get_weather"),
    ({"tool_choice": {"type": "any"}}, "'tools' is empty"),
    ({"stop_sequences": [" "]}, "'stop_sequences'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "'thinking.budget_tokens' is 100"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits no conversation"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "no tool_use before"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "it may have"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "the assistant's"),
])  # fmt: skip
def test_request_that_is_wrong_is_told_where(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LayaError) as caught:
        chat(**fields)
    assert said in caught.value.message and caught.value.param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a":' + b"[" * 100_000])
def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_create(body)


def test_conversation_with_tools_and_images_becomes_chat_messages() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    document = {
        "type": "document",
        "source": {"type": "text", "data": "Once.", "media_type": "text/plain"},
        "title": "T",
    }
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}], "is_error": True}
    asked = read_create(json.dumps(BODY | {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [document]},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "b"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "c"}, image]},
        ],
    }).encode())  # fmt: skip
    system, user, said, told, more = chat_messages(asked.system, asked.messages)
    assert (system["content"], user["content"]) == ("Be brief.", "a\n\nT\nOnce.")
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert said == {"role": "assistant", "content": "b", "tool_calls": [call]}
    assert told == {"role": "tool", "tool_call_id": "t1", "content": "Error: no"}
    assert more["content"][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_turns_of_one_role_are_one_where_they_are_text() -> None:
    use = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    result = [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]
    given = [("user", "a"), ("user", "b"), ("user", "c"), ("assistant", "d"), ("assistant", use), ("assistant", "e"),
             ("assistant", "f"), ("user", result), ("user", result), ("user", "g")]  # fmt: skip
    messages = chat(messages=[{"role": role, "content": content} for role, content in given])["messages"]
    told = [(each["role"], each["content"]) for each in messages]
    assert told == [("user", "a\n\nb\n\nc"), ("assistant", "d"), ("assistant", None), ("assistant", "e\n\nf"),
                    ("tool", "r"), ("tool", "r"), ("user", "g")]  # fmt: skip


def test_tool_choice_becomes_chats() -> None:
    other = TOOL | {"name": "other"}
    assert chat(tools=[TOOL])["tool_choice"] == "auto"
    forced = chat(tools=[TOOL, other], tool_choice={"type": "tool", "name": "other", "disable_parallel_tool_use": True})
    assert [each["function"]["name"] for each in forced["tools"]] == ["other"]
    assert (forced["tool_choice"], forced["parallel_tool_calls"]) == ("required", False)
    assert chat(tools=[TOOL], tool_choice={"type": "any"})["tool_choice"] == "required"
    assert chat(tools=[TOOL], tool_choice={"type": "none"})["tool_choice"] == "none"
    schema = {"type": "object"}
    held = chat(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert held["response_format"]["json_schema"]["schema"] == schema
    assert held["chat_template_kwargs"] == {"reasoning_effort": "low"}


@pytest.mark.parametrize(("error", "status", "kind"), [
    (InvalidRequest("x"), 400, "invalid_request_error"),
    (Forbidden("x"), 403, "permission_error"),
    (QueueTimeout("x", 2.0), 529, "overloaded_error"),
    (EngineCrashed("x"), 502, "api_error"),
    (InsufficientMemory("x", need_bytes=2, available_bytes=1, limit="RAM", suggestions=[]), 422,
     "invalid_request_error"),
])  # fmt: skip
def test_errors_have_anthropics_types(error: LayaError, status: int, kind: str) -> None:
    answer = anthropic_error(error)
    assert (answer.status_code, json.loads(bytes(answer.body))["error"]["type"]) == (status, kind)
