"""Text completions and the model list through the official SDK, on the real engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.live import sdk, user

from .target import Target

pytestmark = pytest.mark.engine


def complete(target: Target, **fields: Any) -> Any:
    return sdk(target).completions.create(
        **{"model": target.model, "prompt": "Once upon a", "temperature": 0, "max_tokens": 6} | fields
    )


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_whole_and_streamed_completion_say_the_same(target: Target) -> None:
    whole = complete(target)
    chunks = list(complete(target, stream=True, stream_options={"include_usage": True}))
    assert whole.object == "text_completion"
    assert whole.model == target.model_id
    assert whole.choices[0].text == text_of(chunks) != ""
    assert whole.choices[0].finish_reason == "length"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


def test_list_of_prompts_is_answered_in_its_order(target: Target) -> None:
    prompts = ["Once upon a", "One, two,"]
    alone = [complete(target, prompt=prompt) for prompt in prompts]
    both = complete(target, prompt=prompts)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]
    assert both.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert both.usage.completion_tokens == 12
    chunks = list(complete(target, prompt=prompts, stream=True, stream_options={"include_usage": True}))
    assert [text_of(chunks, index) for index in (0, 1)] == [choice.text for choice in both.choices]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [12]


def test_more_prompts_than_sequences_take_turns(target: Target) -> None:
    answer = complete(target, prompt=["A", "B", "C", "D", "E"], max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
    assert answer.usage.completion_tokens == 5


@pytest.mark.needs("token_ids")
def test_prompt_may_be_token_ids(target: Target) -> None:
    assert complete(target, prompt=[60, 28]).choices[0].text
    assert len(complete(target, prompt=[[60, 28], [50]], max_tokens=1).choices) == 2


@pytest.mark.needs("choices")
def test_choices_take_sequences(target: Target) -> None:
    answer = complete(target, n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError, match="runs 2"):
        complete(target, n=3)


@pytest.mark.needs("completion_logprobs")
def test_logprobs_have_the_form_of_completions(target: Target) -> None:
    whole = complete(target, logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert "".join(logprobs.tokens) == whole.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == 6
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    lengths = [len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:index]) for index in range(6)]
    chunks = list(complete(target, logprobs=2, stream=True))
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == logprobs.text_offset


@pytest.mark.needs("completion_logprobs")
def test_logprobs_zero_gives_the_tokens_alone(target: Target) -> None:
    logprobs = complete(target, logprobs=0, max_tokens=2).choices[0].logprobs
    assert len(logprobs.tokens) == 2
    assert logprobs.top_logprobs is None
    assert complete(target, max_tokens=1).choices[0].logprobs is None


def test_stop_ends_a_completion(target: Target) -> None:
    text = complete(target).choices[0].text
    stop = text[3:6]
    stopped = complete(target, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.needs("laya")
def test_what_engines_cannot_do_is_refused_by_name(target: Target) -> None:
    for fields, param in (
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(target, **fields)
        assert refused.value.param == param


def test_models_are_listed(target: Target) -> None:
    client = sdk(target)
    assert target.model_id in [model.id for model in client.models.list().data]
    model = client.models.retrieve(target.model_id)
    assert (model.object, model.id) == ("model", target.model_id)


@pytest.mark.needs("laya")
def test_unknown_model_is_not_found(target: Target) -> None:
    unknown = f"{target.model}-none"
    with pytest.raises(openai.NotFoundError):
        sdk(target).models.retrieve(unknown)
    for ask in (
        lambda: complete(target, model=unknown),
        lambda: sdk(target).chat.completions.create(model=unknown, messages=user("x")),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert refused.value.code == "model_not_found"
        assert refused.value.response.headers["x-should-retry"] == "false"
