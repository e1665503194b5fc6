"""The Messages API on the real engine, through Anthropic's official SDK; and tokens by the engine's tokenizer."""

from __future__ import annotations

from typing import Any

import anthropic
import pydantic
import pytest

from .live import MODEL, Serving, is_idle, model_state, plain, until, user

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PERSON: Any = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


class Person(pydantic.BaseModel):
    age: int


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return f"21 degrees in {city}"


def client(server: Serving) -> anthropic.Anthropic:
    """The official client. It does not retry: a test sees the first answer."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=240)


def ask(server: Serving, **fields: Any) -> Any:
    with client(server) as sdk:
        settings = {"model": "smollm2", "max_tokens": 8, "extra_body": {"temperature": 0}}
        return sdk.messages.create(**(settings | fields))


def test_message_is_whole_and_counted(server: Serving) -> None:
    made = ask(server, messages=user("Say hello."), system="Be brief.")
    assert (made.type, made.role, made.model) == ("message", "assistant", MODEL)
    assert made.content[0].type == "text" and made.content[0].text
    assert made.stop_reason == "max_tokens" and made.usage.output_tokens == 8
    assert made._request_id
    with client(server) as sdk:
        counted = sdk.messages.count_tokens(model="smollm2", messages=user("Say hello."), system="Be brief.")
    assert counted.input_tokens == made.usage.input_tokens + made.usage.cache_read_input_tokens


def test_stream_is_what_the_whole_message_says(server: Serving) -> None:
    whole = ask(server, messages=user("Count to three."))
    fields: Any = {"model": "smollm2", "max_tokens": 8, "messages": user("Count to three.")}
    with client(server) as sdk, sdk.messages.stream(**fields, extra_body={"temperature": 0}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [each.text for each in final.content] == [each.text for each in whole.content]  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason
    assert events[0].type == "message_start" and events[-1].type == "message_stop"


def test_stop_sequence_is_named_and_frees_the_slot(server: Serving) -> None:
    question = user("Count from one to ten: one, two,")
    free = ask(server, messages=question)
    word = free.content[0].text.split()[1].strip(",")
    made = ask(server, messages=question, stop_sequences=[word, "\u2603"], max_tokens=200)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", word)
    assert free.content[0].text.startswith(made.content[0].text) and word not in made.content[0].text
    assert 0 < made.usage.output_tokens <= 8
    until(lambda: is_idle(server), 10)


def test_tool_result_is_read_by_the_model(server: Serving) -> None:
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "21 degrees"}]}
    turns: Any = [question, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    with client(server) as sdk:
        alone = sdk.messages.count_tokens(model="smollm2", messages=[question]).input_tokens
        told = sdk.messages.count_tokens(model="smollm2", messages=[question], tools=[WEATHER]).input_tokens
        answered = sdk.messages.count_tokens(model="smollm2", messages=turns, tools=[WEATHER]).input_tokens
    assert alone < told < answered
    made = ask(server, messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
    assert made.content[0].type == "text"


def test_answer_held_to_a_schema(server: Serving) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": PERSON}}
    made = ask(server, messages=user("Give me a person."), output_config=form, max_tokens=40)
    assert '"age"' in made.content[0].text


def test_sdk_parses_an_answer_by_its_model(server: Serving) -> None:
    with client(server) as sdk:
        made = sdk.messages.parse(
            model="smollm2", max_tokens=40, messages=user("Give me a person."), output_format=Person,
            extra_body={"temperature": 0},
        )  # fmt: skip
    assert isinstance(made.parsed_output, Person)


def test_prefill_is_gone_on_with(server: Serving) -> None:
    turns: Any = [*user("What is the capital of France?"), {"role": "assistant", "content": "The capital of France is"}]
    made = ask(server, messages=turns, max_tokens=4)
    assert "Paris" in made.content[0].text


def test_too_long_a_prompt_is_refused_in_words_that_agents_know(server: Serving) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(server, messages=user("tree " * 5000))
    assert "prompt is too long: " in str(caught.value) and "> 4096 maximum" in str(caught.value)


def test_unknown_model_and_field_are_told(server: Serving) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(server, messages=user("x"), model="nobody")
    with pytest.raises(anthropic.BadRequestError, match="'colour' is not a field"):
        ask(server, messages=user("x"), extra_body={"colour": "red"})


def test_client_that_leaves_frees_the_slot(server: Serving) -> None:
    body = {"model": "smollm2", "messages": user("Tell me a very long story."), "stream": True, "max_tokens": 1000}
    with plain(server) as http, http.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()  # held: without it the connection would be closed
        next(lines)
        assert model_state(server)["running"] == 1
    until(lambda: is_idle(server), 10)


def test_tokens_there_and_back(server: Serving) -> None:
    text = "Hello, world: \u00e9\u2603"
    with plain(server) as http:
        there = http.post("/tokenize", json={"model": "smollm2", "content": text}).json()
        back = http.post("/detokenize", json={"model": "smollm2", "tokens": there["tokens"]}).json()
        assert back["content"] == back["prompt"] == text
        theirs = http.post("/tokenize", json={"model": "smollm2", "prompt": text, "return_token_strs": True}).json()
        assert theirs["tokens"] == there["tokens"] and theirs["count"] == len(theirs["token_strs"])
        assert theirs["max_model_len"] == 4096
        of_chat = http.post("/tokenize", json={"model": "smollm2", "messages": user("Hello")}).json()
        counted = http.post("/v1/messages/count_tokens", json={"model": "smollm2", "messages": user("Hello")}).json()
        assert of_chat["count"] == counted["input_tokens"]
        wrong = http.post("/detokenize", json={"model": "smollm2", "tokens": [2**30]})
        assert wrong.status_code == 400 and "vocabulary" in wrong.json()["error"]["message"]
        both = http.post("/tokenize", json={"model": "smollm2", "prompt": "a", "content": "b"})
        assert "say one of them" in both.json()["error"]["message"]


def test_largest_texts_leave_the_engine_below_its_plan(server: Serving) -> None:
    """Blanks and digits take an engine the most of all texts; each thread of it would keep what its text took."""
    before = model_state(server)
    with plain(server) as http:
        refusal = http.post("/tokenize", json={"model": "smollm2", "content": "q z " * 750_000}).json()["error"]
        most = refusal["max_bytes"]
        for sign in " 7":
            for path, name in (("/tokenize", "content"), ("/v1/responses/input_tokens", "input")):
                for _ in range(3):
                    asked = {"model": "smollm2", name: sign * (most - 2000)}
                    answer = http.post(path, json=asked, headers={"connection": "close"})
                    assert answer.status_code == 200, answer.text
        pieces = {"model": "smollm2", "content": "7" * (most // 3 - 2000), "with_pieces": True}
        assert http.post("/tokenize", json=pieces).status_code == 200
    after = model_state(server)
    assert after["pid"] == before["pid"]
    grown_bytes = after["measured_bytes"] - sum(device["total_bytes"] for device in after["plan"]["devices"])
    assert grown_bytes < 0.05 * sum(device["total_bytes"] for device in after["plan"]["devices"])


def test_forced_call_is_made_and_streamed(server: Serving) -> None:
    question = user("What is the weather in Paris?")
    made = ask(server, messages=question, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=60)
    assert made.stop_reason == "tool_use"
    (use,) = [block for block in made.content if block.type == "tool_use"]
    assert use.name == "get_weather" and use.input["city"]
    fields: Any = {"model": "smollm2", "max_tokens": 60, "messages": question, "tools": [WEATHER]}
    fields |= {"tool_choice": {"type": "tool", "name": "get_weather"}, "extra_body": {"temperature": 0}}
    with client(server) as sdk, sdk.messages.stream(**fields) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input] and "city" in pieces


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_of_the_sdk_runs_what_the_model_calls(server: Serving, stream: bool) -> None:
    """It asks for a thread that the server would hold, reads that there is none, and sends the whole conversation."""
    with client(server) as sdk:
        runner = sdk.beta.messages.tool_runner(
            model="smollm2", max_tokens=60, messages=user("What is the weather in Paris?"), tools=[get_weather],
            tool_choice={"type": "any"}, max_iterations=2, stream=stream, extra_body={"temperature": 0},
        )  # fmt: skip
        turns = [turn.get_final_message() if stream else turn for turn in runner]  # type: ignore[union-attr]
        results = runner.generate_tool_call_response()
    assert [turn.stop_reason for turn in turns] == ["tool_use", "tool_use"]  # type: ignore[union-attr]
    assert turns[1].usage.input_tokens + (turns[1].usage.cache_read_input_tokens or 0) > turns[0].usage.input_tokens  # type: ignore[union-attr]
    assert results is not None and "21 degrees in" in str(results["content"])


@pytest.mark.anyio
async def test_async_client_streams(server: Serving) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        async with sdk.messages.stream(model="smollm2", max_tokens=4, messages=user("Say hello.")) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert (await stream.get_final_message()).content[0].text == text != ""  # type: ignore[union-attr]


def test_models_are_told_in_anthropics_words(server: Serving) -> None:
    with client(server) as sdk:
        listed = {model.id: model for model in sdk.models.list()}
        assert sdk.models.retrieve("smollm2") == listed[MODEL]
    found = listed[MODEL]
    assert (found.type, found.display_name, found.max_input_tokens) == ("model", MODEL, 4096)
    assert found.created_at.tzinfo is not None
