"""The whole answer put together from a stream is the one the engine would have given whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.gateway.assemble import Assembler, UsageSum
from laya.gateway.sse import AnswerReader, StreamFilter

from .scripted_engine import DONE, META, delta, event, hello_events, progress, usage

CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
]


def assembled(*events: bytes, chat: bool = True, n_top_logprobs: int | None = None, **how: Any) -> dict[str, Any]:
    reader = AnswerReader(how.get("usage") or UsageSum())
    assembler = Assembler(chat=chat, n_top_logprobs=n_top_logprobs)
    for body in reader.feed(b"".join(events)):
        assembler.add(body)
    if reader.usage_event is not None:
        assembler.add(reader.usage_event | {"choices": []})
    if how.get("as_event"):
        return assembler.answer_as_event()
    return assembler.answer(reader.usage.as_dict())


def call_delta(index: int, arguments: str, **first: Any) -> bytes:
    function: dict[str, Any] = {"arguments": arguments}
    if "name" in first:
        function["name"] = first.pop("name")
    return delta(tool_calls=[{"index": index, **first, "function": function}])


def test_answer_equals_the_whole_one() -> None:
    timings = {"prompt_ms": 4.5, "predicted_n": 2}
    events = hello_events()
    events[-2] = usage(9, 2, timings=timings)
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "logprobs": None}
    assert assembled(*events) == META | {
        "object": "chat.completion",
        "choices": [choice | {"finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "timings": timings,
    }


def test_answer_tool_calls_are_put_together_by_index() -> None:
    answer = assembled(
        delta(role="assistant", content=None),
        call_delta(0, "", id="call_1", type="function", name="weather"),
        call_delta(0, '{"city": '),
        call_delta(1, "{", id="call_2", type="function", name="time"),
        call_delta(0, '"Paris"}'),
        call_delta(1, "}"),
        delta("tool_calls"),
        usage(),
        DONE,
    )
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_answer_text_beside_tool_calls_is_kept() -> None:
    message = assembled(delta(content="Wait."), call_delta(0, "{}", id="c", name="f"), DONE)["choices"][0]["message"]
    assert message["content"] == "Wait." and message["tool_calls"][0]["function"]["name"] == "f"


def test_answer_reasoning_is_a_field_of_its_own() -> None:
    answer = assembled(delta(reasoning_content="Let me "), delta(reasoning_content="think"), delta(content="4"), DONE)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "Let me think",
    }


def test_answer_logprobs_are_those_of_all_events() -> None:
    tokens = [{"token": token, "logprob": -1.0, "bytes": [1], "top_logprobs": []} for token in "ab"]
    answer = assembled(delta(content="a", logprobs=tokens[:1]), delta(content="b", logprobs=tokens[1:]), DONE)
    assert answer["choices"][0]["logprobs"] == {"content": tokens, "refusal": None}


def test_answer_choices_interleaved_come_in_order() -> None:
    answer = assembled(
        delta(content="b", index=1),
        delta(content="a", index=0),
        delta("length", index=1),
        delta(content="A", index=0),
        delta("stop", index=0),
        usage(9, 3),
        usage(9, 4),
        DONE,
    )
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["aA", "b"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (9, 7)


def test_answer_empty_stream_has_no_choices() -> None:
    assert assembled(progress(9, 9), DONE)["choices"] == []


def test_answer_empty_text_is_a_string() -> None:
    assert assembled(delta(role="assistant", content=None), delta("stop"), DONE)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
    }


def test_answer_as_event_is_a_chunk_with_everything_in_it() -> None:
    body = assembled(delta(content="Hi"), call_delta(0, "{}", id="c", name="f"), delta("stop"), DONE, as_event=True)
    assert body["object"] == "chat.completion.chunk" and "usage" not in body
    choice = body["choices"][0]
    assert choice["delta"]["content"] == "Hi" and choice["finish_reason"] == "stop"
    assert choice["delta"]["tool_calls"][0]["index"] == 0


# completions
def text_event(said: str, index: int = 0, reason: str | None = None, logprobs: Any = None) -> bytes:
    return event(
        {"choices": [{"index": index, "text": said, "finish_reason": reason, "logprobs": logprobs}]}, chat=False
    )


def test_answer_completion_has_its_own_form() -> None:
    answer = assembled(text_event("Once "), text_event("more"), text_event("", reason="length"), usage(), chat=False)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"text": "Once more", "index": 0, "logprobs": None, "finish_reason": "length"}]


def test_answer_completion_prompts_of_a_list_are_choices() -> None:
    data = [b"data: null\n\n", text_event("b", 1), text_event("a", 0), usage(3, 1), usage(4, 1), DONE]
    answer = assembled(*data, chat=False, usage=UsageSum(2, 1))
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b"]
    assert answer["usage"]["prompt_tokens"] == 7


TOKENS = st.lists(
    st.tuples(st.integers(0, 2), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)), max_size=12
)


@given(TOKENS, st.one_of(st.none(), st.integers(0, 3)))
def test_completion_streamed_is_the_whole_one_in_pieces(tokens: list[tuple[int, str]], n_top: int | None) -> None:
    """What a streaming client puts together is what a client of the whole answer gets."""
    events = []
    for index, token in tokens:
        top = [{"token": f"{token}{rank}", "logprob": -float(rank)} for rank in range(max(n_top or 0, 1))]
        entry = {"token": token, "logprob": -0.25, "bytes": list(token.encode()), "top_logprobs": top}
        events.append(text_event(token, index, logprobs={"content": [entry]} if n_top is not None else None))
    data = b"".join([*events, usage(3, len(tokens)), DONE])
    answer = assembled(data, chat=False, n_top_logprobs=n_top)

    stream = StreamFilter(UsageSum(), wants_usage=False, n_top_logprobs=n_top)
    bodies = [json.loads(part.removeprefix(b"data: ")) for part in stream.feed(data).split(b"\n\n") if part]
    assert stream.done
    for choice in answer["choices"]:
        pieces = [body["choices"][0] for body in bodies if body["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        if n_top is None:
            assert choice["logprobs"] is None
            continue
        for name, whole in choice["logprobs"].items():
            parts = [piece["logprobs"][name] for piece in pieces]
            assert (None if parts[0] is None else [entry for part in parts for entry in part]) == whole


@pytest.mark.parametrize(
    ("n_prompts", "n_choices", "figures", "expected"),
    [
        (1, 1, [(9, 2)], (9, 2)),
        (1, 3, [(9, 2), (9, 3), (9, 4)], (9, 9)),
        (1, 3, [(9, 9)], (9, 9)),
        (2, 1, [(9, 2), (7, 3)], (16, 5)),
        (2, 2, [(9, 2), (7, 3), (7, 1), (9, 1)], (16, 7)),
        (2, 2, [(16, 7)], (16, 7)),
        (1, 1, [], (0, 0)),
    ],
)
def test_usage_sum_counts_each_prompt_once(
    n_prompts: int, n_choices: int, figures: list[tuple[int, int]], expected: tuple[int, int]
) -> None:
    total = UsageSum(n_prompts, n_choices)
    for prompt, completion in figures:
        total.add({"prompt_tokens": prompt, "completion_tokens": completion})
    body = total.as_dict()
    assert (body["prompt_tokens"], body["completion_tokens"]) == expected
    assert body["total_tokens"] == sum(expected)


def test_usage_sum_of_choices_does_not_call_the_first_ones_work_cached() -> None:
    total = UsageSum(1, 2)
    for cached in (0, 8):
        total.add({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}})
    assert total.as_dict()["prompt_tokens_details"] == {"cached_tokens": 0}


def test_usage_sum_takes_odd_figures_as_none() -> None:
    total = UsageSum()
    total.add({"prompt_tokens": None, "prompt_tokens_details": None})
    assert total.as_dict()["total_tokens"] == 0
