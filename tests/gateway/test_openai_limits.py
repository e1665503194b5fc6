"""Windows, ceilings, shared pools and whole answers by config, through the official SDK on the real engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from .live import Serving, busy_slots, is_idle, plain, prompt_of, sdk, until, user

pytestmark = pytest.mark.engine

CONFIG = """
version: 1
n_threads: 1
models:
  small: {source: smollm2, max_seq_len: 250, max_num_seqs: 1, ttl: 30}
  set: {source: smollm2, max_seq_len: 250, max_num_seqs: 1, ttl: 30, defaults: {max_tokens: 3, temperature: 0}}
  whole: {source: smollm2, max_seq_len: 256, max_num_seqs: 1, enable_streaming: false, ttl: 30}
  pool: {source: smollm2, max_seq_len: 384, max_num_seqs: 4, kv_pool_tokens: 512, default_max_tokens: 5, ttl: 30}
  wordy: {source: smollm2, max_seq_len: 512, max_num_seqs: 1, chat_template: "%s", ttl: 30}
"""
# Says more of a long conversation than was measured when it was loaded.
WORDY = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if messages|length > 4 %}{% for i in range(600) %}word {% endfor %}{% endif %}"
)


@pytest.fixture(scope="module")
def limited(start_server: Callable[..., Any]) -> Iterator[Serving]:
    """Three settings of one model; each is loaded when it is asked for."""
    server = start_server(config=CONFIG.replace("%s", WORDY))
    yield server
    assert server.stop() == 0


def ask(server: Serving, model: str, text: str = "Name three colours.", **fields: Any) -> Any:
    given = {"model": model, "messages": user(text), "temperature": 0} | fields
    return sdk(server).chat.completions.with_raw_response.create(**given)


def test_max_tokens_is_clamped_to_the_window_and_said(limited: Serving) -> None:
    raw = ask(limited, "small", prompt_of(200), max_tokens=5000, extra_body={"ignore_eos": True})
    answer = raw.parse()
    n_prompt = answer.usage.prompt_tokens
    assert 190 < n_prompt < 240
    assert int(raw.headers["x-laya-max-tokens"]) == 250 - n_prompt
    assert answer.usage.total_tokens == 250  # of 256 cells: the window is the user's, not the engine's
    assert answer.choices[0].finish_reason == "length"


def test_answer_without_max_tokens_ends_with_the_window(limited: Serving) -> None:
    raw = ask(limited, "small", prompt_of(200), extra_body={"ignore_eos": True})
    answer = raw.parse()
    assert answer.usage.total_tokens == 250
    assert answer.choices[0].finish_reason == "length"
    assert "x-laya-max-tokens" not in raw.headers


def test_max_tokens_that_fits_is_not_touched(limited: Serving) -> None:
    raw = ask(limited, "small", prompt_of(200), max_completion_tokens=2, extra_body={"ignore_eos": True})
    assert "x-laya-max-tokens" not in raw.headers
    assert raw.parse().usage.completion_tokens == 2


def test_prompt_longer_than_the_window_is_refused_with_both_numbers(limited: Serving) -> None:
    for fields in ({}, {"stream": True}, {"max_tokens": 1}):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 250 tokens") as refused:
            ask(limited, "small", prompt_of(400), **fields)
        error: Any = refused.value.body
        assert refused.value.code == "context_length_exceeded"
        assert error["max_seq_len"] == 250
        assert error["prompt_tokens"] > 390
        assert str(error["prompt_tokens"]) in error["message"]
        assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.BadRequestError) as refused:
        sdk(limited).completions.create(model="small", prompt=["short", prompt_of(400)], max_tokens=1)
    assert refused.value.param == "prompt"
    assert busy_slots(limited, "small") == 0


def test_template_that_adds_more_than_was_measured_is_refused_by_the_engine_all_the_same(limited: Serving) -> None:
    assert ask(limited, "wordy", max_tokens=2).parse().usage.completion_tokens == 2
    turns = [*user("a"), {"role": "assistant", "content": "b"}] * 2 + user("c")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as refused:
        ask(limited, "wordy", messages=turns, max_tokens=2)
    error: Any = refused.value.body
    assert refused.value.code == "context_length_exceeded"
    assert error["max_seq_len"] == 512 and error["prompt_tokens"] > 600


def test_defaults_of_the_config_hold_where_the_request_does_not_say(limited: Serving) -> None:
    client = sdk(limited)
    likeliest = ask(limited, "small", max_tokens=3).parse().choices[0].message.content
    for _ in range(2):
        answer = client.chat.completions.create(model="set", messages=user("Name three colours."))
        assert answer.choices[0].message.content == likeliest
        assert answer.usage is not None and answer.usage.completion_tokens == 3
    answer = client.chat.completions.create(model="set", messages=user(prompt_of(200)), extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 3  # also where the prompt was counted
    said = client.chat.completions.create(
        model="set", messages=user("Hi"), max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert said.usage is not None and said.usage.completion_tokens == 5


def test_models_not_loaded_tell_their_window_too(limited: Serving) -> None:
    windows = {model.id: model.to_dict()["max_model_len"] for model in sdk(limited).models.list().data}
    assert (windows["small"], windows["whole"], windows["pool"]) == (250, 256, 384)


def test_whole_only_model_answers_a_streaming_client_in_one_event(limited: Serving) -> None:
    whole = ask(limited, "whole", max_tokens=8).parse()
    client = sdk(limited)
    fields: dict[str, Any] = {"model": "whole", "messages": user("Name three colours."), "temperature": 0}
    usage_too = {"include_usage": True}
    chunks = list(client.chat.completions.create(**fields, max_tokens=8, stream=True, stream_options=usage_too))
    assert len(chunks) == 2
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.content == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].finish_reason == "length"
    assert chunks[1].choices == [] and chunks[1].usage is not None
    assert chunks[1].usage.completion_tokens == 8
    assert len(list(client.chat.completions.create(**fields, max_tokens=8, stream=True))) == 1
    texts = list(client.completions.create(model="whole", prompt="Once", max_tokens=3, stream=True, temperature=0))
    assert [chunk.choices[0].finish_reason for chunk in texts] == ["length"]


def test_whole_only_stream_is_valid_on_the_wire(limited: Serving) -> None:
    body = {"model": "whole", "messages": user("Hi"), "max_tokens": 2, "stream": True}
    with plain(limited) as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    event, done, rest = response.text.split("\n\n")
    assert json.loads(event.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert (done, rest) == ("data: [DONE]", "")


def test_shared_pool_gives_a_ceiling_and_says_it(limited: Serving) -> None:
    raw = ask(limited, "pool", extra_body={"ignore_eos": True})
    assert raw.headers["x-laya-max-tokens"] == "5"
    assert raw.parse().usage.completion_tokens == 5
    with sdk(limited).chat.completions.with_streaming_response.create(
        model="pool", messages=user("Hi"), stream=True, extra_body={"ignore_eos": True}
    ) as streamed:
        assert streamed.headers["x-laya-max-tokens"] == "5"
        assert streamed.read().count(b'"content":"') == 5


def test_request_that_the_pool_can_never_hold_is_refused(limited: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="the pool of 'pool' holds 448") as refused:
        ask(limited, "pool", n=2, max_tokens=300)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 384"):
        ask(limited, "pool", prompt_of(450))


def test_many_requests_share_a_pool_and_none_overflows_it(limited: Serving) -> None:
    def one(index: int) -> Any:
        return ask(limited, "pool", prompt_of(110, seed=f"s{index}"), max_tokens=12).parse()

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(one, range(8)))
    assert all(answer.choices[0].finish_reason in ("length", "stop") for answer in answers)
    assert sum(answer.usage.total_tokens for answer in answers) > 2 * 512  # more than the pool would have held
    until(lambda: is_idle(limited, "pool"))
