"""What a request body may say, what a wrong one is told, and that the edit leaves alone what it does not mean."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.errors import InvalidRequest
from laya.gateway.body import ParsedBody, parse_body
from laya.gateway.body_errors import ELEMENTS_LIMIT
from laya.types import MIB, EndpointKind

CHAT, COMPLETION, EMBEDDING, RERANK, DECISION = EndpointKind
MESSAGES = [{"role": "user", "content": "hi"}]
VALID: dict[EndpointKind, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": MESSAGES},
    COMPLETION: {"model": "m", "prompt": "hi"},
    EMBEDDING: {"model": "m", "input": "hi"},
    RERANK: {"model": "m", "query": "hi", "documents": ["a", "b"]},
    DECISION: {"model": "m", "state": "hi", "questions": {"q": {"type": "noul", "instructions": "Hi?"}}},
}


def parse(kind: EndpointKind = CHAT, **fields: Any) -> ParsedBody:
    return parse_body(kind, json.dumps(VALID[kind] | fields).encode())


def refusal(kind: EndpointKind, data: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(kind, data)
    assert caught.value.http_status == 400
    return caught.value


WRONG = [
    (CHAT, "temperature", -1, "'temperature' is -1: Expected 'float' >= 0.0."),
    (CHAT, "temperature", 2.1, "'temperature' is 2.1: Expected 'float' <= 2.0."),
    (CHAT, "temperature", "hot", "'temperature' is \"hot\": Expected 'float | null', got 'str'."),
    (CHAT, "top_p", 1.5, "'top_p' is 1.5: Expected 'float' <= 1.0."),
    (CHAT, "frequency_penalty", -2.5, "'frequency_penalty' is -2.5: Expected 'float' >= -2.0."),
    (CHAT, "presence_penalty", 3, "'presence_penalty' is 3: Expected 'float' <= 2.0."),
    (CHAT, "max_tokens", 0, "'max_tokens' is 0: Expected 'int' >= 1."),
    (CHAT, "max_tokens", -1, "'max_tokens' is -1: Expected 'int' >= 1."),
    (CHAT, "max_tokens", 2**31, "'max_tokens' is 2147483648: Expected 'int' <= 2147483647."),
    (CHAT, "max_tokens", 1.5, "'max_tokens' is 1.5: Expected 'int | null', got 'float'."),
    (CHAT, "max_completion_tokens", 0, "'max_completion_tokens' is 0: Expected 'int' >= 1."),
    (CHAT, "n", 0, "'n' is 0: Expected 'int' >= 1."),
    (CHAT, "n", 129, "'n' is 129: Expected 'int' <= 128."),
    (CHAT, "stream", "yes", "'stream' is \"yes\": Expected 'bool | null', got 'str'."),
    (CHAT, "stream_options", 1, "'stream_options' is 1: Expected 'object | null', got 'int'."),
    (CHAT, "seed", "x", "'seed' is \"x\": Expected 'int | null', got 'str'."),
    (CHAT, "stop", 5, "'stop' is 5: Expected 'str | array | null', got 'int'."),
    (CHAT, "model", 5, "'model' is 5: Expected 'str | null', got 'int'."),
    (CHAT, "user", 5, "'user' is 5: Expected 'str | null', got 'int'."),
    (CHAT, "messages", "hi", "'messages' is \"hi\": Expected 'array', got 'str'."),
    (CHAT, "messages", [], "'messages' is []: Expected 'array' of length >= 1."),
    (CHAT, "messages", None, "'messages' is null: Expected 'array', got 'null'."),
    (CHAT, "messages", ["hi"], "'messages[0]' is \"hi\": Expected 'object', got 'str'."),
    (CHAT, "logprobs", 5, "'logprobs' is 5: Expected 'bool | null', got 'int'."),
    (CHAT, "top_logprobs", 21, "'top_logprobs' is 21: Expected 'int' <= 20."),
    (CHAT, "tools", [{"type": "function"}], '\'tools[0].function\' is missing in {"type": "function"}.'),
    (CHAT, "tools", [{"type": "function", "function": {}}], "'tools[0].function.name' is missing in {}."),
    (CHAT, "tools", ["f"], "'tools[0]' is \"f\": Expected 'object', got 'str'."),
    (CHAT, "tools", [{"type": "f"}], "'tools[0].type' is \"f\": Invalid enum value 'f'."),
    (CHAT, "logit_bias", {"5": 1, "a": "b"}, "'logit_bias.a' is \"b\": Expected 'float', got 'str'."),
    (CHAT, "logit_bias", {"a[0].b": True}, "'logit_bias.a[0].b' is true: Expected 'float', got 'bool'."),
    (CHAT, "tools", [{"type": "a - at `$.b"}], "'tools[0].type' is \"a - at `$.b\": Invalid enum value 'a - at '$.b'."),
    (CHAT, "tools", {}, "'tools' is {}: Expected 'array | null', got 'object'."),
    (CHAT, "response_format", "json", "'response_format' is \"json\": Expected 'object | null', got 'str'."),
    (COMPLETION, "prompt", 5, "'prompt' is 5: Expected 'str | array', got 'int'."),
    (COMPLETION, "prompt", "", "'prompt' is missing or empty."),
    (COMPLETION, "prompt", [], "'prompt' is missing or empty."),
    (COMPLETION, "prompt", [4294967301], "'prompt[0]' is 4294967301: Expected 'int' <= 2147483647."),
    (COMPLETION, "prompt", [1, 2**63], "'prompt[1]' is 9223372036854775808: Expected 'int' <= 2147483647."),
    (COMPLETION, "prompt", [[1], [-1]], "'prompt[1][0]' is -1: Expected 'int' >= 0."),
    (COMPLETION, "prompt", [""], "'prompt[0]' is empty."),
    (COMPLETION, "prompt", ["a", []], "'prompt[1]' is empty."),
    (COMPLETION, "prompt", [1, "a"], "'prompt' has token ids beside texts or lists: say one list of ids."),
    (COMPLETION, "prompt", [[1], 2], "'prompt' has token ids beside texts or lists: say one list of ids."),
    (COMPLETION, "stop", "", "'stop' has an empty text, which every answer begins with: leave it out."),
    (CHAT, "stop", ["a", ""], "'stop' has an empty text, which every answer begins with: leave it out."),
    (COMPLETION, "logprobs", 21, "'logprobs' is 21: Expected 'int' <= 20."),
    (COMPLETION, "echo", True, "'echo' is not supported: engines here give no logprobs of the prompt."),
    (COMPLETION, "suffix", "x", "'suffix' is not supported on this endpoint."),
    (COMPLETION, "best_of", 3, "'best_of' (3) above 'n' is not supported."),
    (EMBEDDING, "input", "", "'input' is missing or empty."),
    (EMBEDDING, "input", ["a", ""], "'input[1]' is empty."),
    (EMBEDDING, "input", [2**31], "'input[0]' is 2147483648: Expected 'int' <= 2147483647."),
    (EMBEDDING, "dimensions", 0, "'dimensions' is 0: Expected 'int' >= 1."),
    (RERANK, "documents", [], "'documents' is []: Expected 'array' of length >= 1."),
    (RERANK, "top_n", 0, "'top_n' is 0: Expected 'int' >= 1."),
]


@pytest.mark.parametrize(("kind", "field", "value", "message"), WRONG)
def test_parse_body_wrong_field_names_it_and_its_value(
    kind: EndpointKind, field: str, value: Any, message: str
) -> None:
    error = refusal(kind, json.dumps(VALID[kind] | {field: value}).encode())
    assert error.message == message
    assert error.param is not None and error.param.replace(".", "[").partition("[")[0] == field


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "alien", "content": "x"}, "'messages[1].role' is \"alien\": Invalid enum value 'alien'."),
        ({"content": "x"}, '\'messages[1].role\' is missing in {"content": "x"}.'),
        ({"role": "user"}, "messages[1] with role 'user' has no content."),
        ({"role": "tool", "content": None}, "messages[1] with role 'tool' has no content."),
        ({"role": "assistant"}, "messages[1] with role 'assistant' has no content."),
        ({"role": "assistant", "tool_calls": []}, "messages[1] with role 'assistant' has no content."),
        ({"role": "user", "content": 5}, "'messages[1].content' is 5: Expected 'str | array | null', got 'int'."),
    ],
)
def test_parse_body_wrong_message_is_named_by_its_index(message: dict[str, Any], text: str) -> None:
    error = refusal(CHAT, json.dumps(VALID[CHAT] | {"messages": [*MESSAGES, message]}).encode())
    assert error.message == text
    assert error.param is not None and error.param.startswith("messages[1]")


def test_parse_body_assistant_with_tool_calls_needs_no_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert parse(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}]).n_seqs == 1


def test_parse_body_assistant_with_a_function_call_needs_no_content() -> None:
    call = {"name": "f", "arguments": "{}"}
    assert parse(messages=[*MESSAGES, {"role": "assistant", "function_call": call}]).n_seqs == 1


@pytest.mark.parametrize("kind", list(EndpointKind))
def test_parse_body_missing_content_is_named(kind: EndpointKind) -> None:
    names = {CHAT: "messages", COMPLETION: "prompt", EMBEDDING: "input", RERANK: "documents", DECISION: "questions"}
    required = names[kind]
    error = refusal(kind, b'{"model": "m", "query": "q"}')
    assert error.message == f"'{required}' is missing or empty." and error.param == required


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b'{"a":}',
        b"{} x",
        b"nope",
        b"\xef\xbb\xbf{}",
        b"\x00",
        b'{"user": "\xff"}',
        b'{"user": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"x": %b}' % DEEP,
        b'{"tools": %b}' % DEEP,
        # the first fault is a field's, and what follows is not even JSON
        b'{"temperature": 5',
        b'{"temperature": 5, "x": %b}' % DEEP,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_parse_body_not_json_is_said(data: bytes) -> None:
    error = refusal(CHAT, data)
    assert error.message.startswith(("The request body is not valid JSON", "The request body is nested too deeply"))


@pytest.mark.parametrize("data", [b"[]", b"null", b"5", b'"x"'])
def test_parse_body_wrong_shape_is_said(data: bytes) -> None:
    assert "The request body has the wrong shape: Expected 'object'" in refusal(CHAT, data).message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (b'"temperature": 1e999', "'temperature' is 1e999: Number out of range."),
        (b'"seed": 12e999', "'seed' is 12e999: Number out of range."),
        (b'"seed": %b' % (b"9" * 6000), f"'seed' is {'9' * 57}...: Integer value out of range."),
        (b'"temperature": 5, "seed": 1e999', "'temperature' is 5: Expected 'float' <= 2.0."),
        (b'"temperature": 5, "user": "\xff"', "'temperature' is 5: Expected 'float' <= 2.0."),
    ],
)
def test_parse_body_bad_number_is_named_as_it_was_written(fields: bytes, message: str) -> None:
    assert refusal(CHAT, b"{%b}" % fields).message == message


def test_parse_body_long_wrong_value_is_cut() -> None:
    error = refusal(CHAT, json.dumps(VALID[CHAT] | {"temperature": "x" * 5000}).encode())
    assert len(error.message) < 200 and "xxx..." in error.message


@pytest.mark.parametrize(
    ("kind", "start", "element", "end"),
    [
        (CHAT, b'{"messages":[{"role":"user","content":"a"}],"logit_bias":[', b"0", b"]}"),
        (CHAT, b'{"messages":[{"role":"user","content":[', b"0", b"]}]}"),
        (COMPLETION, b'{"prompt":[', b"[1]", b"]}"),
        (COMPLETION, b'{"prompt":[', b"1", b"]}"),
        (RERANK, b'{"query":"a","documents":[', b"{}", b"]}"),
    ],
)
def test_parse_body_of_countless_elements_is_refused(
    kind: EndpointKind, start: bytes, element: bytes, end: bytes
) -> None:
    assert parse_body(kind, start + b",".join([element] * 1000) + end).n_seqs
    error = refusal(kind, start + b",".join([element] * (ELEMENTS_LIMIT + 2)) + end)
    assert error.message == "The request body has more than 524288 elements."


@pytest.mark.parametrize(("kind", "field"), [(COMPLETION, "prompt"), (EMBEDDING, "input"), (RERANK, "documents")])
def test_parse_body_of_too_many_texts_is_refused(kind: EndpointKind, field: str) -> None:
    assert parse(kind, **{field: ["a"] * 2048}).n_seqs in (1, 2048)
    error = refusal(kind, json.dumps(VALID[kind] | {field: ["a"] * 2049}).encode())
    assert error.message == f"'{field}' has 2049 texts; one request takes 2048." and error.param == field
    if kind != RERANK:
        assert parse(kind, **{field: list(range(5000))}).n_seqs == 1  # one text of so many tokens


def test_parse_body_of_too_many_answers_is_refused() -> None:
    error = refusal(COMPLETION, json.dumps({"prompt": ["a"] * 1000, "n": 3}).encode())
    assert error.message == "'n' times the prompts is 3000; one request takes 2048."


def test_parse_body_of_long_text_may_have_commas() -> None:
    assert parse(messages=[{"role": "user", "content": "one, two, three, " * 100_000}]).n_seqs == 1


@pytest.mark.parametrize("kind", list(EndpointKind))
def test_forget_keeps_what_the_answer_needs(kind: EndpointKind) -> None:
    parsed = parse(kind, **({"logprobs": 1} if kind == COMPLETION else {}))
    before = (type(parsed.head), parsed.n_seqs, parsed.wants_stream, parsed.max_tokens, parsed.head.model)
    parsed.forget()
    assert (type(parsed.head), parsed.n_seqs, parsed.wants_stream, parsed.max_tokens, parsed.head.model) == before
    assert parsed.data == b"" and getattr(parsed.head, "logprobs", 1) in (1, None)


@given(st.binary(max_size=200))
def test_parse_body_any_bytes_parse_or_are_refused(data: bytes) -> None:
    for kind in EndpointKind:
        try:
            parse_body(kind, data)
        except InvalidRequest:
            continue


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc\"é", max_size=4), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
KNOWN_FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "input", "query", "documents", "n", "max_tokens", "stop", "stream", "seed", "tools"]
)


@given(st.dictionaries(KNOWN_FIELDS, JSON_VALUES, max_size=6), st.sampled_from(list(EndpointKind)))
def test_parse_body_any_json_parses_or_is_refused(body: dict[str, Any], kind: EndpointKind) -> None:
    data = json.dumps(body).encode()
    try:
        assert parse_body(kind, data).n_seqs >= 1
    except InvalidRequest as error:
        told = error.message
    else:
        return
    assert told.endswith(".")


def raw_fields(data: bytes) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items()}


@given(st.dictionaries(st.text("xyz_é", min_size=1, max_size=5), JSON_VALUES, max_size=5), st.booleans(), st.booleans())
def test_edited_leaves_other_fields_byte_for_byte(extra: dict[str, Any], ascii_only: bool, spaced: bool) -> None:
    separators = (" , ", " :  ") if spaced else (",", ":")
    data = json.dumps(extra | VALID[CHAT] | {"n": 1}, ensure_ascii=ascii_only, separators=separators).encode()
    edited = parse_body(CHAT, data).edited({"model": "other", "stream": True}, drop=("n",))
    before, after = raw_fields(data), raw_fields(edited)
    assert (after.pop("model"), after.pop("stream")) == (b'"other"', b"true")
    del before["model"], before["n"]
    assert after == before


def test_edited_unusual_json_is_kept_as_it_was_written() -> None:
    messages = b'[ {"role":"user","content":"\\u4f60 \\/ \\n \xe4\xbd\xa0"} ]'
    data = b'{"messages":%b,"temperature":1.50e0,"top_k":0040.0}'.replace(b"0040.0", b"40.00") % messages
    edited = parse_body(CHAT, data).edited({"model": "m"})
    assert edited == data[:-1] + b',"model":"m"}'


def test_parse_body_duplicate_keys_last_one_counts_everywhere() -> None:
    data = b'{"messages":[{"role":"user","content":"a"}],"model":"a","n":7,"model":"b","n":2}'
    parsed = parse_body(CHAT, data)
    assert parsed.head.model == "b" and parsed.n_seqs == 2
    assert raw_fields(parsed.edited({}))["n"] == b"2"


def test_parse_body_of_a_mebibyte_is_bounded_by_its_bytes() -> None:
    parsed = parse(messages=[{"role": "user", "content": "x" * MIB}])
    assert MIB < parsed.prompt_bound_tokens < MIB + 200
    assert bytes(parsed.fields["messages"]) in parsed.edited({"stream": True})


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=50), min_size=1, max_size=5), st.booleans())
def test_prompt_bound_is_never_below_the_texts_bytes(texts: list[str], ascii_only: bool) -> None:
    body = VALID[CHAT] | {"messages": [{"role": "user", "content": text} for text in texts]}
    parsed = parse_body(CHAT, json.dumps(body, ensure_ascii=ascii_only).encode())
    assert parsed.prompt_bound_tokens >= sum(len(text.encode()) for text in texts) + 16 * len(texts)


@pytest.mark.parametrize(
    ("kind", "fields", "n_seqs"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": None}, 1),
        (COMPLETION, {"n": 3}, 3),
        (COMPLETION, {"prompt": ["a", "b"]}, 2),
        (COMPLETION, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETION, {"prompt": [1, 2, 3]}, 1),
        (COMPLETION, {"prompt": [[1, 2], [3]]}, 2),
        (EMBEDDING, {"input": ["a", "b"]}, 1),
        (EMBEDDING, {"input": [1, 2]}, 1),
        (RERANK, {"documents": ["a", {"text": "b"}]}, 1),
    ],
)
def test_n_seqs_counts_choices_and_prompts(kind: EndpointKind, fields: dict[str, Any], n_seqs: int) -> None:
    assert parse(kind, **fields).n_seqs == n_seqs


def test_prompt_bound_of_token_ids_is_never_below_their_number() -> None:
    ids = list(range(1000))
    assert parse(COMPLETION, prompt=ids).prompt_bound_tokens >= 1000
    assert parse_body(COMPLETION, b'{"prompt":[%b]}' % b",".join([b"1"] * 1000)).prompt_bound_tokens >= 1000


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6),
     ({"max_tokens": 5, "max_completion_tokens": 6}, 6), ({"max_tokens": None}, None)],
)  # fmt: skip
def test_max_tokens_takes_the_newer_field_first(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert parse(**fields).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "session"),
    [({}, None), ({"user": "u"}, "u"), ({"prompt_cache_key": "k"}, "k"), ({"user": "u", "prompt_cache_key": "k"}, "k")],
)
def test_session_is_the_cache_key_else_the_user(fields: dict[str, Any], session: str | None) -> None:
    assert parse(**fields).session == session


def test_wants_usage_event_only_when_asked() -> None:
    assert not parse(stream=True).wants_usage_event
    assert not parse(stream=True, stream_options={}).wants_usage_event
    assert parse(stream=True, stream_options={"include_usage": True}).wants_usage_event


def test_nulls_stand_for_absent_fields() -> None:
    nulls = dict.fromkeys(["stream", "n", "max_tokens", "temperature", "top_p", "stop", "seed", "tools", "logprobs"])
    parsed = parse(**nulls)
    assert not parsed.wants_stream and parsed.n_seqs == 1 and parsed.max_tokens is None


def test_half_of_a_character_is_named() -> None:
    for said in (rb"a\ud800b", rb"\uDBFF"):
        error = refusal(CHAT, b'{"messages":[{"role":"user","content":"%b"}]}' % said)
        assert "is half of a surrogate pair" in error.message
    assert parse_body(CHAT, rb'{"messages":[{"role":"user","content":"\ud83d\ude00"}]}').n_seqs == 1
