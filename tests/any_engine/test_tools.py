"""Calls that a choice of tools asks for, by the official SDKs on the real engine, over every API that knows tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from tests.gateway.live import sdk, user

from .target import Target

pytestmark = pytest.mark.engine

CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = user("What is the weather in Paris?")
FIELDS: Any = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, "tools": TOOLS}


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.mark.needs("forced_tools")
def test_a_named_tool_is_called_the_same_whole_and_streamed(target: Target) -> None:
    fields = FIELDS | {"model": target.model} | {"tool_choice": WEATHER}
    whole = sdk(target).chat.completions.create(**fields)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    # what is about texts says nothing of calls, and does not hinder them
    more: Any = {"logprobs": True, "top_logprobs": 2, "stop": ["city"], "stream_options": {"include_usage": True}}
    chunks = list(sdk(target).chat.completions.create(**fields, **more, stream=True))
    deltas = [each for chunk in chunks for of in chunk.choices for each in of.delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function.name == "get_weather" and deltas[0].function.arguments == ""
    assert {each.index for each in deltas} == {0}
    assert not any(each.id or each.function.name for each in deltas[1:])
    assert "".join(each.function.arguments for each in deltas) == call.function.arguments
    assert [of.finish_reason for chunk in chunks for of in chunk.choices][-1] == "tool_calls"
    assert not any(of.delta.content for chunk in chunks for of in chunk.choices)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.needs("forced_tools", "choices")
def test_required_is_one_call_of_any_tool_for_each_choice(target: Target) -> None:
    answer = sdk(target).chat.completions.create(model=target.model, **FIELDS, tool_choice="required", n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name in ("get_weather", "get_time")
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 2


@pytest.mark.needs("forced_tools")
def test_parallel_calls_are_told_by_their_index(target: Target) -> None:
    fields = FIELDS | {"model": target.model} | {"tool_choice": "required", "parallel_tool_calls": True, "stream": True}
    with sdk(target).chat.completions.create(**fields) as stream:
        deltas = [each for chunk in stream for of in chunk.choices for each in of.delta.tool_calls or ()]
    assert [each.index for each in deltas] == sorted(each.index for each in deltas)
    begun = [each for each in deltas if each.id]
    assert [each.index for each in begun] == list(range(len(begun))) != []
    assert all(each.function.name in ("get_weather", "get_time") for each in begun)


@pytest.mark.needs("forced_tools", "json_schema")
def test_sdk_parses_calls_and_answers_by_their_models(target: Target) -> None:
    fields = FIELDS | {"model": target.model} | {"tools": [openai.pydantic_function_tool(Weather, name="get_weather")]}
    called = sdk(target).chat.completions.parse(**fields, tool_choice=WEATHER)
    assert called.choices[0].message.tool_calls is not None
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    with sdk(target).chat.completions.stream(**fields, tool_choice=WEATHER) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    told: Any = {"model": target.model, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    answer = sdk(target).chat.completions.parse(**told, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@pytest.mark.needs("llamacpp")
def test_what_engines_do_not_do_beside_tools_is_said(target: Target) -> None:
    for more in ({"logprobs": True}, {"logprobs": True, "stream": True}):
        with pytest.raises(openai.APIStatusError) as refused:
            sdk(target).chat.completions.create(model=target.model, **FIELDS | {"max_tokens": 1} | more)
        assert (refused.value.code, refused.value.param) == ("not_supported", "logprobs")
    two = sdk(target).chat.completions.create(model=target.model, **FIELDS | {"max_tokens": 2, "stop": ["never"]}, n=2)
    assert [bool(choice.message.content) for choice in two.choices] == [True, True]
    assert two.usage is not None and two.usage.completion_tokens == 4


@pytest.mark.needs("forced_tools")
def test_responses_hold_to_a_named_tool(target: Target) -> None:
    tools: Any = [{"type": "function", "strict": None} | tool["function"] for tool in TOOLS]
    tools[1]["parameters"] = None
    answer = sdk(target).responses.create(
        model=target.model,
        input="What is the weather in Paris?",
        tools=tools,
        tool_choice={"type": "function", "name": "get_weather"},
        temperature=0,
        max_output_tokens=60,
        store=False,
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "get_weather" and answer.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.needs("forced_tools")
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_messages_hold_to_any_tool_and_to_one(target: Target, choice: Any) -> None:
    client = anthropic.Anthropic(base_url=target.url, api_key="none", max_retries=0, timeout=240)
    answer = client.messages.create(
        model=target.model,
        messages=QUESTION,
        tools=[{"name": "get_weather", "description": "The weather.", "input_schema": CITY}],
        tool_choice=choice,
        max_tokens=60,
        extra_body={"temperature": 0},
    )
    assert answer.stop_reason == "tool_use"
    (block,) = answer.content
    assert block.type == "tool_use" and block.name == "get_weather"
    assert block.input["city"] in ("Paris", "Rome")
