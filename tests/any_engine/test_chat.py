"""Chat through the official SDK, on the real engine: whole, streamed, and every parameter that people use."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.gateway.live import async_sdk, plain, sdk, user

from .target import Target

pytestmark = pytest.mark.engine

QUESTION = user("Name three colours.")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
# small as it is, the model repeats a call that it is shown
CALL_WANTED = [
    {"role": "system", "content": "You call functions."},
    {
        "role": "user",
        "content": "Repeat exactly this text and nothing else:\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    },
]


def ask(target: Target, **fields: Any) -> Any:
    given = {"model": target.model, "messages": QUESTION, "temperature": 0, "max_tokens": 8} | fields
    return sdk(target).chat.completions.create(**given)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_whole_and_streamed_chat_say_the_same(target: Target) -> None:
    whole = ask(target, max_tokens=16)
    chunks = list(ask(target, max_tokens=16, stream=True))
    assert whole.choices[0].message.content == text_of(chunks) != ""
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.model == target.model_id == chunks[0].model
    assert whole.object == "chat.completion"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage.completion_tokens == 16
    assert whole.usage.total_tokens == 16 + whole.usage.prompt_tokens


def test_usage_comes_in_a_stream_only_where_it_was_asked_for(target: Target) -> None:
    without = list(ask(target, stream=True))
    asked = list(ask(target, stream=True, stream_options={"include_usage": True}))
    declined = list(ask(target, stream=True, stream_options={"include_usage": False}))
    assert all(chunk.usage is None and chunk.choices for chunk in without + declined)
    assert [chunk.usage is not None for chunk in asked] == [False] * (len(asked) - 1) + [True]
    assert asked[-1].choices == []
    usage = asked[-1].usage
    assert usage.completion_tokens == 8
    assert usage.total_tokens == 8 + usage.prompt_tokens == ask(target).usage.total_tokens


def test_a_stream_on_the_wire_is_data_lines_and_done(target: Target) -> None:
    body = {"model": target.model, "messages": QUESTION, "max_tokens": 2, "stream": True}
    with plain(target) as client:
        response = client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"] == "mine-1"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith(("data: {", ": prefill ")) for event in events[:-2])
    assert "prompt_progress" not in response.text


def test_async_client_runs_two_answers_at_once(target: Target) -> None:
    async def both() -> tuple[Any, str]:
        client = async_sdk(target)
        fields: dict[str, Any] = {"model": target.model, "messages": QUESTION, "temperature": 0, "max_tokens": 8}

        async def streamed() -> str:
            stream = await client.chat.completions.create(**fields, stream=True)
            return text_of([chunk async for chunk in stream])

        return await asyncio.gather(client.chat.completions.create(**fields), streamed())

    whole, text = asyncio.run(both())
    assert whole.choices[0].finish_reason == "length"
    assert text != ""


@pytest.mark.needs("choices")
def test_two_choices_share_one_prompt_and_sum_their_usage(target: Target) -> None:
    one = ask(target)
    two = ask(target, n=2)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert all(choice.message.content for choice in two.choices)
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert two.usage.completion_tokens == 16
    chunks = list(ask(target, n=2, stream=True, stream_options={"include_usage": True}))
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [(two.usage.prompt_tokens, 16)]
    assert [text_of(chunks, index) for index in (0, 1)] == [choice.message.content for choice in two.choices]
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(finished) == [0, 1]


@pytest.mark.needs("counts")
def test_more_choices_than_sequences_are_refused_with_both_numbers(target: Target) -> None:
    with pytest.raises(openai.BadRequestError, match=r"3 sequences at once; '\S+' runs 2") as refused:
        ask(target, n=3)
    assert refused.value.param == "n"


@pytest.mark.needs("logprobs")
def test_logprobs_are_the_same_whole_and_streamed(target: Target) -> None:
    whole = ask(target, max_tokens=4, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == whole.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # temperature 0 takes the likeliest
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
    chunks = list(ask(target, max_tokens=4, logprobs=True, top_logprobs=3, stream=True))
    assert [entry.token for entry in streamed_logprobs(chunks)] == [entry.token for entry in entries]
    assert ask(target, max_tokens=2).choices[0].logprobs is None


def streamed_logprobs(chunks: list[Any]) -> list[Any]:
    choices = (choice for chunk in chunks for choice in chunk.choices if choice.logprobs)
    return [entry for choice in choices for entry in choice.logprobs.content]


@pytest.mark.needs("exact_logprobs")
@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}])
def test_logprobs_have_no_alternatives_that_nobody_asked_for(target: Target, fields: dict[str, int]) -> None:
    whole = ask(target, max_tokens=3, logprobs=True, **fields)
    entries = whole.choices[0].logprobs.content
    assert [entry.top_logprobs for entry in entries] == [[], [], []]
    streamed = streamed_logprobs(list(ask(target, max_tokens=3, logprobs=True, stream=True, **fields)))
    assert [entry.top_logprobs for entry in streamed] == [[], [], []]


@pytest.mark.needs("exact_logprobs")
def test_logprobs_of_json_are_those_of_its_text(target: Target) -> None:
    """The engine lets a model begin with a fence, and takes it out of the text."""
    json_of = {"messages": user("Say hi as JSON"), "response_format": {"type": "json_object"}, "max_tokens": 6}
    choice = ask(target, logprobs=True, **json_of).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    chunks = list(ask(target, logprobs=True, stream=True, **json_of))
    assert "".join(entry.token for entry in streamed_logprobs(chunks)) == text_of(chunks) == choice.message.content


def test_stop_ends_the_answer_before_the_text(target: Target) -> None:
    text = ask(target).choices[0].message.content
    stop = text[3:6]
    stopped = ask(target, stop=stop).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == text[: text.index(stop)]
    assert ask(target, stop=["never said", stop]).choices[0].message.content == stopped.message.content


@pytest.mark.needs("trained")
def test_seed_repeats_an_answer(target: Target) -> None:
    texts = [
        ask(target, temperature=1.5, seed=seed, extra_body={"cache_prompt": False}).choices[0].message.content
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.needs("llamacpp")
def test_engine_fields_of_extra_body_pass_through(target: Target) -> None:
    likeliest = ask(target).choices[0].message.content
    for fields in ({"top_k": 1}, {"min_p": 1.0}, {"samplers": ["top_k"], "top_k": 1}):
        answer = ask(target, temperature=2, seed=3, extra_body=fields)
        assert answer.choices[0].message.content == likeliest, fields
    fresh = ask(target, extra_body={"cache_prompt": False})
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.needs("json_schema")
def test_json_schema_binds_the_answer(target: Target) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    given = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
    fields = {"messages": user("Give me a person."), "response_format": given, "max_tokens": 40}
    answer = ask(target, **fields)
    assert answer.choices[0].finish_reason == "stop"
    decoded = json.loads(answer.choices[0].message.content)
    assert list(decoded) == ["age"] and isinstance(decoded["age"], int)
    assert json.loads(text_of(list(ask(target, **fields, stream=True)))) == decoded


@pytest.mark.needs("tools")
def test_tools_are_told_to_the_model(target: Target) -> None:
    without = ask(target, max_tokens=1)
    told = ask(target, max_tokens=1, tools=TOOLS)
    assert told.usage.prompt_tokens > without.usage.prompt_tokens + 50
    chosen = ask(target, max_tokens=1, tools=TOOLS, tool_choice="auto")
    assert chosen.usage.prompt_tokens == told.usage.prompt_tokens


@pytest.mark.needs("tools", "trained")
def test_tool_call_is_the_same_whole_and_streamed(target: Target) -> None:
    fields = {"messages": CALL_WANTED, "tools": TOOLS, "max_tokens": 40}
    choice = ask(target, **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id and call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    chunks = list(ask(target, **fields, stream=True))
    deltas = [each for chunk in chunks for choice in chunk.choices for each in choice.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].id and deltas[0].function.name == "get_weather"
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.needs("tools")
def test_result_of_a_tool_goes_back_to_the_model(target: Target) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *user("Weather in Paris?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees, sunny"},
    ]
    answer = ask(target, messages=messages, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].message.content
    assert (
        answer.usage.prompt_tokens > ask(target, messages=messages[:1], tools=TOOLS, max_tokens=1).usage.prompt_tokens
    )


def test_conversation_with_every_role_is_read(target: Target) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi,"}, {"type": "text", "text": " who are you?"}]},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "Which?", "name": "ann"},
    ]
    assert ask(target, messages=messages, max_tokens=2).choices[0].message.content


@pytest.mark.needs("laya")
def test_model_header_chooses_before_the_body(target: Target) -> None:
    body = {"messages": QUESTION, "max_tokens": 1}
    with plain(target) as client:
        for model in ({}, {"model": "gpt-4o"}):
            response = client.post("/v1/chat/completions", json=body | model, headers={"X-Laya-Model": target.model})
            assert response.status_code == 200
            assert response.json()["model"] == target.model_id
        unknown = client.post("/v1/chat/completions", json=body, headers={"X-Laya-Model": target.model + "x"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["nearest"] == target.model
        missing = client.post("/v1/chat/completions", json=body)
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "model"


@pytest.mark.needs("laya")
def test_session_may_be_named_by_header_or_body(target: Target) -> None:
    with plain(target) as client:
        body = {"model": target.model, "messages": QUESTION, "max_tokens": 1}
        given = client.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "talk-1"})
        assert given.status_code == 200
    assert ask(target, user="ann", max_tokens=1).choices
    assert ask(target, prompt_cache_key="talk-1", max_tokens=1).choices


@pytest.mark.needs("laya")
def test_bad_values_are_refused_by_name_and_not_retried(target: Target) -> None:
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(target, **fields)
        assert refused.value.param == param
        assert refused.value.response.headers["x-should-retry"] == "false"


@pytest.mark.needs("llamacpp")
def test_image_for_a_model_without_eyes_is_not_supported(target: Target) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    with pytest.raises(openai.APIStatusError) as refused:
        ask(target, messages=messages)
    assert refused.value.status_code == 501
    assert refused.value.code == "not_supported"
