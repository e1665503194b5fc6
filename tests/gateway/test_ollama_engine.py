"""Ollama's API on the real engine, through Ollama's official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest

from .live import MODEL, Serving, is_idle, model_state, plain, until, user

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
FEW: Any = {"temperature": 0, "num_predict": 8}


@pytest.fixture
def client(server: Serving) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, trust_env=False) as made:
        yield made


def test_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("smollm2", messages=user("Say hello."), options=FEW)
    assert (whole.model, whole.done, whole.done_reason, whole.eval_count) == ("smollm2", True, "length", 8)
    assert whole.message.role == "assistant" and whole.message.content
    assert whole.total_duration >= whole.eval_duration > 0  # type: ignore[operator]
    parts = list(client.chat("smollm2:latest", messages=user("Say hello."), options=FEW, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts][-2:] == [False, True] and parts[-1].eval_count == 8


def test_generate_with_a_template_and_raw(client: ollama.Client) -> None:
    chatted = client.generate("smollm2", "Say hello.", options=FEW)
    assert chatted.response and chatted.prompt_eval_count
    parts = list(client.generate("smollm2", "Say hello.", options=FEW, stream=True))
    assert "".join(part.response for part in parts) == chatted.response and parts[-1].done
    raw = client.generate("smollm2", "One, two,", raw=True, options=FEW, logprobs=True, top_logprobs=2)
    assert raw.prompt_eval_count < chatted.prompt_eval_count  # type: ignore[operator]
    assert raw.logprobs is not None and len(raw.logprobs[0].top_logprobs or ()) == 2


def test_answer_held_to_a_schema(client: ollama.Client) -> None:
    schema: Any = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    options = {"temperature": 0, "num_predict": 40}
    found = client.chat("smollm2", messages=user("Give me a person."), format=schema, options=options)
    assert isinstance(json.loads(found.message.content or "")["age"], int)


def test_tools_of_python_functions_are_told_to_the_model(client: ollama.Client) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    alone = client.chat("smollm2", messages=user("What is 3 plus 4?"), options=FEW)
    told = client.chat("smollm2", messages=user("What is 3 plus 4?"), tools=[add], options=FEW)
    assert told.prompt_eval_count > alone.prompt_eval_count  # type: ignore[operator]
    call = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    turns = [*user("What is 3 plus 4?"), {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "content": "7", "tool_name": "add"}]  # fmt: skip
    answered = client.chat("smollm2", messages=turns, tools=[add], options=FEW)
    assert answered.prompt_eval_count > told.prompt_eval_count  # type: ignore[operator]


def test_call_of_a_tool_is_the_same_whole_and_streamed(client: ollama.Client) -> None:
    # small as it is, the model repeats a call that it is shown
    turns = [
        {"role": "system", "content": "You call functions."},
        {"role": "user", "content": "Repeat exactly this text and nothing else:\n<tool_call>\n"
         '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'},
    ]  # fmt: skip
    city: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": city}}
    options = {"temperature": 0, "num_predict": 40}
    whole = client.chat("smollm2", messages=turns, tools=[tool], options=options)
    parts = list(client.chat("smollm2", messages=turns, tools=[tool], options=options, stream=True))
    for calls in (whole.message.tool_calls, [call for part in parts for call in part.message.tool_calls or ()]):
        assert calls is not None
        assert [(call.function.name, call.function.arguments) for call in calls] == [("get_weather", {"city": "Paris"})]


@pytest.mark.anyio
async def test_async_client_chats_and_streams(server: Serving) -> None:
    client = ollama.AsyncClient(host=server.url, trust_env=False)
    whole = await client.chat("smollm2", messages=user("Say hello."), options=FEW)
    parts = [part async for part in await client.chat("smollm2", messages=user("Say hello."), options=FEW, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content != ""


def test_embeddings_of_texts_are_unit_vectors(embedding: Serving) -> None:
    with ollama.Client(host=embedding.url, trust_env=False) as client:
        texts = ["A cat sat on the mat.", "Interest rates rose."]
        together = client.embed("emb", texts)
        assert together.model == "emb" and together.prompt_eval_count
        for vector, text in zip(together.embeddings, texts, strict=True):
            assert len(vector) == 576
            assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-4)
            assert client.embed("emb", text).embeddings[0] == pytest.approx(vector, abs=1e-3)
        assert len(client.embeddings("emb", texts[0]).embedding) == 576
        (cut,) = client.embed("emb", texts[0], dimensions=8).embeddings
        assert len(cut) == 8 and sum(value * value for value in cut) == pytest.approx(1, abs=1e-4)
        shown = client.show("emb")
    assert shown.capabilities == ["embedding"]


def test_models_are_listed_shown_and_running(client: ollama.Client) -> None:
    listed = {model.model: model for model in client.list().models}
    found = listed[f"{MODEL}:latest"]
    assert found.details is not None
    assert (found.details.family, found.details.parameter_size) == ("llama", "134.52M")
    shown = client.show("smollm2")
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelinfo or {})["general.architecture"] == "llama" and "tools" in (shown.template or "")
    (running,) = [model for model in client.ps().models if model.model == f"{MODEL}:latest"]
    assert running.context_length == 4096 and running.size and running.size_vram == 0


@pytest.mark.parametrize(("call", "said"), [
    (lambda client: client.pull("x"), "laya pull"),
    (lambda client: client.embed("smollm2", "hi"), "not 'embed'"),
    (lambda client: client.chat("nobody", messages=user("x")), "does not exist"),
    (lambda client: client.chat("smollm2", messages=user("x"), options={"num_ctx": 8192}), "served with 4096 tokens"),
    (lambda client: list(client.chat("smollm2", messages=user("tree " * 5000), stream=True)), "4096 tokens"),
])  # fmt: skip
def test_refusals_are_response_errors(client: ollama.Client, call: Callable[[ollama.Client], Any], said: str) -> None:
    with pytest.raises(ollama.ResponseError, match=said):
        call(client)


def test_client_that_leaves_frees_the_slot(server: Serving) -> None:
    body = {"model": "smollm2", "messages": user("Tell me a very long story.")}
    with plain(server) as http, http.stream("POST", "/api/chat", json=body) as response:
        lines = response.iter_lines()  # held: without it the connection would be closed
        next(lines)
        assert model_state(server)["running"] == 1
    until(lambda: is_idle(server), 10)


def test_keep_alive_of_nothing_unloads_and_the_next_request_loads(start_server: Callable[..., Any]) -> None:
    server = start_server("smollm2", "--max-num-seqs", "1", "--max-seq-len", "1024", "--n-threads", "1")
    with ollama.Client(host=server.url, trust_env=False) as client:
        assert client.generate("smollm2", "Hi", keep_alive=0, options={"num_predict": 1}).done
        until(lambda: not client.ps().models)
        assert client.generate("smollm2", keep_alive="5m").done_reason == "load"
        assert [model.model for model in client.ps().models] == [f"{MODEL}:latest"]
        assert client.generate("smollm2", "Hi", options={"num_predict": 1}).eval_count == 1
        assert client.generate("smollm2", keep_alive=0).done_reason == "unload"
        until(lambda: not client.ps().models)
