"""Text completions and the model list through the official SDK, on the real engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from .live import MODEL, Serving, plain, sdk

pytestmark = pytest.mark.engine


def complete(server: Serving, **fields: Any) -> Any:
    return sdk(server).completions.create(
        **{"model": "smollm2", "prompt": "Once upon a", "temperature": 0, "max_tokens": 6} | fields
    )


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_whole_and_streamed_completion_say_the_same(server: Serving) -> None:
    whole = complete(server)
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    assert whole.object == "text_completion"
    assert whole.model == MODEL
    assert whole.choices[0].text == text_of(chunks) != ""
    assert whole.choices[0].finish_reason == "length"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


def test_list_of_prompts_is_answered_in_its_order(server: Serving) -> None:
    prompts = ["Once upon a", "One, two,"]
    alone = [complete(server, prompt=prompt) for prompt in prompts]
    both = complete(server, prompt=prompts)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]
    assert both.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert both.usage.completion_tokens == 12
    chunks = list(complete(server, prompt=prompts, stream=True, stream_options={"include_usage": True}))
    assert [text_of(chunks, index) for index in (0, 1)] == [choice.text for choice in both.choices]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [12]


def test_more_prompts_than_sequences_take_turns(server: Serving) -> None:
    answer = complete(server, prompt=["A", "B", "C", "D", "E"], max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
    assert answer.usage.completion_tokens == 5


def test_prompt_may_be_token_ids(server: Serving) -> None:
    assert complete(server, prompt=[9060, 28]).choices[0].text
    assert len(complete(server, prompt=[[9060, 28], [504]], max_tokens=1).choices) == 2


def test_choices_take_sequences(server: Serving) -> None:
    answer = complete(server, n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError, match="runs 2"):
        complete(server, n=3)


def test_logprobs_have_the_form_of_completions(server: Serving) -> None:
    whole = complete(server, logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert "".join(logprobs.tokens) == whole.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == 6
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    lengths = [len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:index]) for index in range(6)]
    chunks = list(complete(server, logprobs=2, stream=True))
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == logprobs.text_offset


def test_logprobs_zero_gives_the_tokens_alone(server: Serving) -> None:
    logprobs = complete(server, logprobs=0, max_tokens=2).choices[0].logprobs
    assert len(logprobs.tokens) == 2
    assert logprobs.top_logprobs is None
    assert complete(server, max_tokens=1).choices[0].logprobs is None


def test_stop_ends_a_completion(server: Serving) -> None:
    text = complete(server).choices[0].text
    stop = text[3:6]
    stopped = complete(server, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


def test_what_engines_cannot_do_is_refused_by_name(server: Serving) -> None:
    for fields, param in (
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(server, **fields)
        assert refused.value.param == param


def test_models_tell_their_window(server: Serving) -> None:
    client = sdk(server)
    listed = client.models.list().data
    assert MODEL in [model.id for model in listed]
    model: Any = client.models.retrieve(MODEL)
    assert model.object == "model"
    assert model.context_length == model.max_model_len == 4096
    assert model.loaded is True
    alias: Any = client.models.retrieve("smollm2")
    assert alias.id == MODEL


def test_unknown_model_is_not_found_and_named(server: Serving) -> None:
    with pytest.raises(openai.NotFoundError, match="Did you mean 'smollm2'") as refused:
        sdk(server).models.retrieve("smolm2")
    assert refused.value.code == "model_not_found"
    for path in ("/v1/chat/completions", "/v1/completions"):
        with plain(server) as client:
            response = client.post(path, json={"model": "smolm2", "messages": [{"role": "user", "content": "x"}]})
            if path == "/v1/completions":
                response = client.post(path, json={"model": "smolm2", "prompt": "x"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert response.headers["x-should-retry"] == "false"
