"""The Responses API on the real engine, by the official SDK; a conversation that outlives kill -9 of everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import openai
import psutil
import pydantic
import pytest

from .live import MODEL, Serving, async_sdk, is_idle, model_state, plain, sdk, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

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
LONG: Any = {"model": "smollm2", "input": "Count from 1 to 1000.", "temperature": 0, "max_output_tokens": 1000}
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


def ask(server: Serving, **fields: Any) -> Any:
    return sdk(server).responses.create(**({"model": "smollm2", "temperature": 0, "max_output_tokens": 8} | fields))


def test_create_retrieve_and_delete(server: Serving) -> None:
    made = ask(server, input="Say hello.", instructions="Be brief.", metadata={"run": "1"})
    assert made.object == "response" and made.model == MODEL
    assert made.output_text and made.usage.output_tokens <= 8
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    with sdk(server) as client:
        kept = client.responses.retrieve(made.id)
        assert kept.to_dict() == made.to_dict()
        items = client.responses.input_items.list(made.id)
        assert [item.content[0].text for item in items] == ["Say hello."]  # type: ignore[union-attr]
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_stream_is_what_the_whole_answer_says(server: Serving) -> None:
    whole = ask(server, input="Count to three.")
    with sdk(server) as client:
        fields: Any = {"model": "smollm2", "input": "Count to three.", "temperature": 0, "max_output_tokens": 8}
        with client.responses.stream(**fields) as stream:
            events = list(stream)
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert final.status == whole.status == "incomplete"
    assert final.incomplete_details is not None and final.incomplete_details.reason == "max_output_tokens"
    assert final.usage is not None and final.usage.output_tokens == whole.usage.output_tokens


def test_previous_response_is_read_by_the_model(server: Serving) -> None:
    first = ask(server, input="My name is Ann. " + "I like trees. " * 20)
    second = ask(server, input="What is my name?", previous_response_id=first.id)
    alone = ask(server, input="What is my name?")
    assert second.previous_response_id == first.id
    read = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens > read  # all of it, and the question
    assert alone.usage.input_tokens < read
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens  # the engine still had it


def test_tokens_of_a_turn_are_counted_before_it_is_asked(server: Serving) -> None:
    first = ask(server, input="My name is Ann.", instructions="Be brief.")
    fields: Any = {"model": "smollm2", "input": "And yours?", "tools": [WEATHER], "previous_response_id": first.id}
    counted = sdk(server).responses.input_tokens.count(**fields)
    made = ask(server, max_output_tokens=1, **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == made.usage.input_tokens


def test_answer_held_to_a_schema(server: Serving) -> None:
    made = ask(server, input="Give me a person.", text={"format": PERSON}, max_output_tokens=40)
    assert made.status == "completed"
    assert isinstance(json.loads(made.output_text)["age"], int)
    fields: Any = {"model": "smollm2", "input": "Give me a person.", "temperature": 0, "max_output_tokens": 40}
    parsed = sdk(server).responses.parse(**fields, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


def test_function_call_and_its_result(server: Serving) -> None:
    made = ask(server, instructions=CALLER, input=CALL_WANTED, tools=[WEATHER], max_output_tokens=40)
    (call,) = made.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    outcome: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    fields: Any = {"instructions": CALLER, "tools": [WEATHER]}
    by_id = ask(server, input=[outcome], previous_response_id=made.id, **fields)
    said: Any = [{"role": "user", "content": CALL_WANTED}, call.to_dict(), outcome]
    by_hand = ask(server, input=said, store=False, **fields)
    assert by_id.output_text == by_hand.output_text != ""
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens > made.usage.input_tokens


def test_stream_of_a_function_call(server: Serving) -> None:
    fields: Any = {"instructions": CALLER, "input": CALL_WANTED, "tools": [WEATHER], "max_output_tokens": 40}
    events = list(ask(server, stream=True, **fields))
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert deltas == done.arguments and json.loads(deltas) == {"city": "Paris"}
    assert events[-1].type == "response.completed"


def test_client_that_leaves_frees_the_slot(server: Serving) -> None:
    with plain(server) as client, client.stream("POST", "/v1/responses", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert model_state(server)["running"] == 1
    until(lambda: is_idle(server), 10)


def test_client_that_leaves_a_whole_answer_frees_the_slot(server: Serving) -> None:
    with plain(server) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/responses", json=LONG, timeout=0.5)
    until(lambda: is_idle(server), 10)


@pytest.mark.anyio
async def test_two_conversations_at_once_stay_apart(server: Serving) -> None:
    async with async_sdk(server) as client:

        async def talk(name: str) -> list[str]:
            fields: Any = {"model": "smollm2", "temperature": 0, "max_output_tokens": 4}
            first = await client.responses.create(input=f"I am {name}.", **fields)
            await client.responses.create(input="Go on.", previous_response_id=first.id, **fields)
            page = await client.responses.input_items.list(first.id)
            return [item.content[0].text for item in page.data]  # type: ignore[union-attr]

        assert await asyncio.gather(talk("Ann"), talk("Bob")) == [["I am Ann."], ["I am Bob."]]


def test_conversation_outlives_kill_of_engine_and_server(start_server: Callable[..., Any]) -> None:
    settings = ("smollm2", "--max-num-seqs", "1", "--max-seq-len", "2048", "--n-threads", "1")
    first_server = start_server(*settings)
    first = ask(first_server, input="My name is Ann. " + "I like trees. " * 20)
    second = ask(first_server, input="And I like apples.", previous_response_id=first.id)
    engine = model_state(first_server)["pid"]
    os.kill(engine, signal.SIGKILL)
    os.kill(first_server.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(engine))
    server = start_server(*settings)
    with sdk(server) as client:
        assert client.responses.retrieve(second.id).output_text == second.output_text
    third = ask(server, input="What is my name?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens + second.usage.output_tokens
