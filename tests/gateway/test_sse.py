"""An engine's events: cut anywhere they give the same; what is Laya's own stays here; the end says how it ended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.gateway.assemble import UsageSum
from laya.gateway.sse import EVENT_LIMIT_BYTES, AnswerReader, StreamFilter, event_bytes

from .scripted_engine import DONE, delta, event, hello_events, progress, usage

TOKEN = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [{"token": "Hi", "logprob": -0.5}]}


def stream_filter(**fields: Any) -> StreamFilter:
    return StreamFilter(**{"usage": UsageSum(), "wants_usage": False} | fields)


def filtered(data: bytes, cuts: list[int], **fields: Any) -> tuple[bytes, StreamFilter]:
    """What the client gets of a stream that arrives in these pieces."""
    stream = stream_filter(**fields)
    out = b""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if start != end:
            out += stream.feed(data[start:end])
    return out, stream


def contents(data: bytes) -> list[Any]:
    """The JSON of every event, and [DONE]."""
    payloads = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [payload.decode() if payload == b"[DONE]" else json.loads(payload) for payload in payloads]


def text(data: bytes) -> str:
    events = [body for body in contents(data) if body != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for body in events for choice in body["choices"])


TRICKY = [
    progress(3, 9),
    progress(9, 9),
    delta(role="assistant", content=None),
    delta(content='"usage": {"prompt_tokens": 1}'),
    delta(content="data: [DONE]"),
    delta(content='data: null "error": "prompt_progress"'),
    delta(content='{"error": {"message": "no"}}\n\ndata: [DONE]\n\n'),
    delta(content="日本語 😀 \u2028"),
    delta(reasoning_content="hm"),
    delta("stop"),
    usage(9, 6),
    DONE,
]
FOR_CLIENT = b"".join(TRICKY[2:10])


@given(st.lists(st.integers(0, len(b"".join(TRICKY))), max_size=12).map(sorted))
def test_filter_split_anywhere_gives_the_same(cuts: list[int]) -> None:
    out, stream = filtered(b"".join(TRICKY), cuts)
    assert out == FOR_CLIENT
    assert stream.done and stream.error is None and stream.end() == DONE
    assert (stream.prefill_done, stream.prefill_total) == (9, 9)
    assert stream.usage.as_dict()["total_tokens"] == 15


def test_filter_split_at_every_byte_gives_the_same() -> None:
    data = b"".join(TRICKY)
    for cut in range(len(data) + 1):
        out, stream = filtered(data, [cut])
        assert (out, stream.done) == (FOR_CLIENT, True), cut
    assert filtered(data, list(range(1, len(data))))[0] == FOR_CLIENT


@given(st.lists(st.integers(0, len(b"".join(TRICKY))), max_size=12).map(sorted))
def test_answer_reader_split_anywhere_gives_the_same(cuts: list[int]) -> None:
    data = b"".join(TRICKY)
    reader = AnswerReader(UsageSum())
    events = [
        event
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
        for event in reader.feed(data[start:end])
    ]
    assert events == contents(FOR_CLIENT)
    assert reader.done


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 400))
def test_filter_passes_any_text_unchanged(said: str, cut: int) -> None:
    data = b"".join([delta(role="assistant", content=None), delta(content=said), delta(content="end"), usage(), DONE])
    out, stream = filtered(data, [min(cut, len(data))])
    assert text(out) == said + "end"
    assert stream.done and stream.error is None


def test_filter_coalesced_events_are_taken_apart() -> None:
    stream = stream_filter()
    assert stream.feed(b"".join(hello_events())) == b"".join(hello_events()[1:5])
    assert stream.done and stream.started


def test_filter_holds_back_what_is_not_whole() -> None:
    stream = stream_filter()
    first = delta(content="a")
    assert stream.feed(first) == first
    second = delta(content="b")
    assert stream.feed(second[:-1]) == b""
    assert stream.feed(second[-1:] + first[:10]) == second
    assert stream.feed(first[10:]) == first


@pytest.mark.parametrize("wants_usage", [False, True])
def test_filter_usage_event_is_for_who_asked(wants_usage: bool) -> None:
    out, stream = filtered(b"".join(hello_events()), [], wants_usage=wants_usage)
    assert b'"usage"' not in out
    last = contents(stream.end())
    assert last[-1] == "[DONE]"
    assert len(last) == 1 + wants_usage
    if wants_usage:
        assert last[0]["choices"] == [] and last[0]["id"] == "chatcmpl-1"
        assert last[0]["usage"] == {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@pytest.mark.parametrize(("total", "prompt_tokens"), [(UsageSum(1, 2), 9), (UsageSum(2, 1), 16)])
def test_filter_usage_of_all_choices_is_one_event(total: UsageSum, prompt_tokens: int) -> None:
    data = b"".join([delta(content="a"), delta(content="b", index=1), usage(9, 2), usage(7, 5), DONE])
    out, stream = filtered(data, [], wants_usage=True, usage=total)
    assert len(contents(out)) == 2
    said = contents(stream.end())[0]["usage"]
    assert (said["prompt_tokens"], said["completion_tokens"]) == (prompt_tokens, 7)
    assert said["total_tokens"] == prompt_tokens + 7


def test_filter_usage_beside_a_choice_leaves_the_choice() -> None:
    figures = {"prompt_tokens": 3, "completion_tokens": 1}
    both = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": figures})
    out, stream = filtered(delta(content="a") + both + DONE, [])
    assert contents(out)[1]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in contents(out)[1]
    assert stream.usage.prompt_tokens == 3


def test_filter_empty_usage_of_each_event_is_no_usage() -> None:
    piece = event({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": None})
    out, stream = filtered(piece + piece + usage(4, 2) + DONE, [])
    assert text(out) == "aa" and stream.usage.completion_tokens == 2


def test_filter_null_event_and_comments_are_dropped() -> None:
    data = b"data: null\n\n: ping\n\n" + delta(content="a") + DONE
    out, stream = filtered(data, [])
    assert out == delta(content="a") and stream.done and stream.error is None


def test_filter_null_event_after_the_first_token_is_dropped() -> None:
    out, _ = filtered(delta(content="a") + b"data: null\n\n" + delta(content="b") + DONE, [len(delta(content="a"))])
    assert text(out) == "ab" and b"null\n" not in out


@pytest.mark.parametrize("error", [{"code": 500, "message": "no more"}, "no more"])
@pytest.mark.parametrize("before", [b"", delta(content="a")])
def test_filter_error_event_is_kept_from_the_client(error: Any, before: bytes) -> None:
    data = before + b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    out, stream = filtered(data, [len(before)])
    assert out == before
    assert stream.error is not None and stream.error["message"] == "no more" and not stream.done


@pytest.mark.parametrize("garbage", [b"data: {nope\n\n", b"data: [1]\n\n", b"data: 5\n\n", b'data: {"a":\xff}\n\n'])
def test_filter_event_that_is_not_json_is_an_error(garbage: bytes) -> None:
    _, stream = filtered(garbage, [])
    assert stream.error is not None and "not JSON" in stream.error["message"]


def test_filter_error_null_is_no_error() -> None:
    piece = event({"choices": [{"index": 0, "delta": {"content": "a"}}], "error": None})
    out, stream = filtered(piece + piece + DONE, [len(piece)])
    assert text(out) == "aa" and stream.error is None


def test_filter_without_done_is_not_done() -> None:
    out, stream = filtered(b"".join(hello_events()[:-1]), [])
    assert text(out) == "Hello" and not stream.done


def test_filter_half_an_event_at_the_end_is_not_sent() -> None:
    out, stream = filtered(delta(content="a") + b'data: {"choices"', [])
    assert out == delta(content="a") and not stream.done


@given(st.lists(st.integers(0, 1500), max_size=8).map(sorted))
def test_filter_carriage_returns_make_no_difference(cuts: list[int]) -> None:
    data = b"".join(hello_events()).replace(b"\n", b"\r\n")
    out, stream = filtered(data, [min(cut, len(data)) for cut in cuts])
    assert text(out) == "Hello" and stream.done
    assert contents(out) == contents(b"".join(hello_events()[1:5]))


@pytest.mark.parametrize("wants_done", [b"data:[DONE]\n\n", b"data: [DONE]\n\n", b"data:  [DONE] \n\n"])
def test_filter_space_after_the_colon_makes_no_difference(wants_done: bytes) -> None:
    first = delta(content="a").replace(b"data: ", b"data:")
    out, stream = filtered(first + first + wants_done, [len(first)])
    assert out.count(b'"a"') == 2 and stream.done and b"[DONE]" not in out


def test_filter_named_events_are_read() -> None:
    first = b"event: message\nid: 4\n" + delta(content="a")
    out, stream = filtered(first + first + b"event: end\n" + DONE, [len(first)])
    assert out == first + first and stream.done


def test_filter_event_without_end_is_bounded() -> None:
    stream = stream_filter()
    stream.feed(delta(content="a"))
    piece = b"x" * (EVENT_LIMIT_BYTES // 2)
    for _ in range(2):
        stream.feed(piece)
        assert stream.error is None
    stream.feed(piece)
    assert stream.error is not None and "no end" in stream.error["message"]


def test_event_bytes_is_one_event() -> None:
    assert event_bytes({"a": "x\n\ny"}) == b'data: {"a":"x\\n\\ny"}\n\n'


# completions: the engine gives logprobs in the chat form
def entries(*tokens: str) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": -0.5 - i, "top_logprobs": [{"token": token, "logprob": -0.5 - i}] * 2}
        for i, token in enumerate(tokens)
    ]


def piece(said: str, index: int = 0, logprobs: Any = None) -> bytes:
    choice = {"index": index, "text": said, "finish_reason": None, "logprobs": logprobs and {"content": logprobs}}
    return event({"choices": [choice]}, chat=False)


def test_filter_completion_logprobs_get_their_form_and_offsets() -> None:
    data = b"".join([piece("ab", logprobs=entries("a", "b")), piece("cd", logprobs=entries("cd")), piece(""), DONE])
    out, stream = filtered(data, [], n_top_logprobs=1)
    first, second, last = (body["choices"][0]["logprobs"] for body in contents(out))
    assert first == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"a": -0.5}, {"b": -1.5}],
        "text_offset": [0, 1],
    }
    assert second["text_offset"] == [2] and last is None
    assert stream.done


def test_filter_completion_logprobs_offsets_are_kept_for_each_choice() -> None:
    pieces = [piece("ab", 0, entries("ab")), piece("x", 1, entries("x")), piece("c", 0, entries("c"))]
    out, _ = filtered(b"".join([*pieces, piece("y", 1, entries("y"))]), [], n_top_logprobs=0)
    offsets = [body["choices"][0]["logprobs"]["text_offset"] for body in contents(out)]
    assert offsets == [[0], [0], [2], [1]]
    assert contents(out)[0]["choices"][0]["logprobs"]["top_logprobs"] is None
