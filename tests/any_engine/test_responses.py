"""The Responses API by the official SDK, on any engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from tests.gateway.live import async_sdk, sdk

from .target import Target

pytestmark = [pytest.mark.engine, pytest.mark.needs("laya")]

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
# small as it is, the model repeats a call that it is shown
CALLER = "You call functions."
CALL_WANTED = (
    "Repeat exactly this text and nothing else:\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
PERSON: Any = {
    "type": "json_schema",
    "name": "person",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    },
}


class Person(pydantic.BaseModel):
    age: int


def ask(target: Target, **fields: Any) -> Any:
    return sdk(target).responses.create(**({"model": target.model, "temperature": 0, "max_output_tokens": 8} | fields))


def test_create_retrieve_and_delete(target: Target) -> None:
    made = ask(target, input="Say hello.", instructions="Be brief.", metadata={"run": "1"})
    assert made.object == "response" and made.model == target.model_id
    assert made.output_text and made.usage.output_tokens <= 8
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    with sdk(target) as client:
        kept = client.responses.retrieve(made.id)
        assert kept.to_dict() == made.to_dict()
        items = client.responses.input_items.list(made.id)
        assert [item.content[0].text for item in items] == ["Say hello."]  # type: ignore[union-attr]
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_stream_is_what_the_whole_answer_says(target: Target) -> None:
    whole = ask(target, input="Count to three.")
    with sdk(target) as client:
        fields: Any = {"model": target.model, "input": "Count to three.", "temperature": 0, "max_output_tokens": 8}
        with client.responses.stream(**fields) as stream:
            events = list(stream)
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert final.status == whole.status == "incomplete"
    assert final.incomplete_details is not None and final.incomplete_details.reason == "max_output_tokens"
    assert final.usage is not None and final.usage.output_tokens == whole.usage.output_tokens


def test_previous_response_is_read_by_the_model(target: Target) -> None:
    first = ask(target, input="My name is Ann. " + "I like trees. " * 20)
    second = ask(target, input="What is my name?", previous_response_id=first.id)
    alone = ask(target, input="What is my name?")
    assert second.previous_response_id == first.id
    read = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens > read  # all of it, and the question
    assert alone.usage.input_tokens < read


@pytest.mark.needs("tokenizer")
def test_tokens_of_a_turn_are_counted_before_it_is_asked(target: Target) -> None:
    first = ask(target, input="My name is Ann.", instructions="Be brief.")
    fields: Any = {"model": target.model, "input": "And yours?", "tools": [WEATHER], "previous_response_id": first.id}
    counted = sdk(target).responses.input_tokens.count(**fields)
    made = ask(target, max_output_tokens=1, **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == made.usage.input_tokens


@pytest.mark.needs("json_schema")
def test_answer_held_to_a_schema(target: Target) -> None:
    made = ask(target, input="Give me a person.", text={"format": PERSON}, max_output_tokens=40)
    assert made.status == "completed"
    assert isinstance(json.loads(made.output_text)["age"], int)
    fields: Any = {"model": target.model, "input": "Give me a person.", "temperature": 0, "max_output_tokens": 40}
    parsed = sdk(target).responses.parse(**fields, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


@pytest.mark.needs("tools", "trained")
def test_function_call_and_its_result(target: Target) -> None:
    made = ask(target, instructions=CALLER, input=CALL_WANTED, tools=[WEATHER], max_output_tokens=40)
    (call,) = made.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    outcome: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    fields: Any = {"instructions": CALLER, "tools": [WEATHER]}
    by_id = ask(target, input=[outcome], previous_response_id=made.id, **fields)
    said: Any = [{"role": "user", "content": CALL_WANTED}, call.to_dict(), outcome]
    by_hand = ask(target, input=said, store=False, **fields)
    assert by_id.output_text == by_hand.output_text != ""
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens > made.usage.input_tokens


@pytest.mark.needs("tools", "trained")
def test_stream_of_a_function_call(target: Target) -> None:
    fields: Any = {"instructions": CALLER, "input": CALL_WANTED, "tools": [WEATHER], "max_output_tokens": 40}
    events = list(ask(target, stream=True, **fields))
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert deltas == done.arguments and json.loads(deltas) == {"city": "Paris"}
    assert events[-1].type == "response.completed"


@pytest.mark.anyio
async def test_two_conversations_at_once_stay_apart(target: Target) -> None:
    async with async_sdk(target) as client:

        async def talk(name: str) -> list[str]:
            fields: Any = {"model": target.model, "temperature": 0, "max_output_tokens": 4}
            first = await client.responses.create(input=f"I am {name}.", **fields)
            await client.responses.create(input="Go on.", previous_response_id=first.id, **fields)
            page = await client.responses.input_items.list(first.id)
            return [item.content[0].text for item in page.data]  # type: ignore[union-attr]

        assert await asyncio.gather(talk("Ann"), talk("Bob")) == [["I am Ann."], ["I am Bob."]]
