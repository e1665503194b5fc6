"""Which calls a choice of tools asks for, the schema an answer is held to, and the calls read out of its text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from laya.errors import InvalidRequest, NotSupported
from laya.gateway.assemble import UsageSum
from laya.gateway.body import ParsedBody
from laya.gateway.plain import PlainBody, parse
from laya.gateway.tool_choice import CALLS_MOST
from laya.gateway.tool_events import CallAssembler, CallEvents, CallFilter, CallReader
from laya.types import EndpointKind

from .scripted_engine import DONE, delta, progress, usage

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def read(**fields: Any) -> ParsedBody:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return parse(EndpointKind.CHAT, json.dumps(body).encode())


def schema_of(**fields: Any) -> Any:
    forced = read(**fields).forced
    assert forced is not None
    return json.loads(forced.schema)


TOOLS = [tool("weather", CITY), tool("now")]


def test_a_call_is_held_to_the_tool_and_its_parameters() -> None:
    assert schema_of(tools=TOOLS, tool_choice=named("weather")) == {
        "type": "object",
        "properties": {"name": {"const": "weather"}, "arguments": CITY},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema_of(tools=TOOLS, tool_choice=named("now"))["properties"]["arguments"] == nothing


def test_required_is_one_call_of_any_tool_and_a_list_where_calls_may_be_parallel() -> None:
    several = schema_of(tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
    assert (several["type"], several["minItems"], several["maxItems"]) == ("array", 1, CALLS_MOST)
    one = schema_of(tools=TOOLS, tool_choice="required")
    assert several["items"] == one == schema_of(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [each["properties"]["name"]["const"] for each in one["anyOf"]] == ["weather", "now"]
    some = schema_of(tools=[*TOOLS, tool("other")], tool_choice=allowed("required", "now", "other"))
    assert [each["properties"]["name"]["const"] for each in some["anyOf"]] == ["now", "other"]


def test_words_are_left_out_of_a_schema_and_names_stay() -> None:
    inner = {"type": "string", "title": "T", "enum": ["a"], "default": "a"}
    parameters = {
        "title": "P",
        "type": "object",
        "properties": {"title": inner, "description": {"const": {"title": 1}}},
    }
    bare = schema_of(tools=[tool("f", parameters)], tool_choice=named("f"))["properties"]["arguments"]
    assert bare == {
        "type": "object",
        "properties": {"title": {"type": "string", "enum": ["a"]}, "description": {"const": {"title": 1}}},
    }


def test_definitions_of_two_tools_do_not_meet() -> None:
    def with_place(of: str) -> Any:
        place = {"type": of}
        return {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}

    schema = schema_of(
        tools=[tool("f", with_place("string")), tool("g", with_place("integer"))], tool_choice="required"
    )
    assert schema["$defs"] == {"tool0-Place": {"type": "string"}, "tool1-Place": {"type": "integer"}}
    refs = [each["properties"]["arguments"]["properties"]["at"]["$ref"] for each in schema["anyOf"]]
    assert refs == ["#/$defs/tool0-Place", "#/$defs/tool1-Place"]
    one = schema_of(tools=[tool("f", with_place("string")), tool("g", with_place("integer"))], tool_choice=named("g"))
    assert one["$defs"] == {"tool1-Place": {"type": "integer"}}  # nothing of the tool that can't be called
    with pytest.raises(InvalidRequest, match="#/properties/at"):
        read(tools=[tool("f", {"properties": {"b": {"$ref": "#/properties/at"}}})], tool_choice="required")


def test_schemas_that_are_none_are_no_fault_of_the_server() -> None:
    assert schema_of(tools=[tool("f", {"$defs": ["no", "names"], "properties": [1]})], tool_choice="required")
    deep = '{"not":' * 2000 + "true" + "}" * 2000
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool("f", {"a": "deep"})]})
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        parse(EndpointKind.CHAT, (body[:-1] + ', "tool_choice": "required"}').replace('"deep"', deep).encode())


def test_free_calls_are_the_engines_own_affair() -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": None}, {"parallel_tool_calls": True}):
        parsed = read(tools=TOOLS, **fields)
        assert parsed.forced is None and parsed.has_tools
    none = read(tools=TOOLS, tool_choice="none")
    assert none.forced is None and not none.has_tools
    assert not read(tool_choice="auto").has_tools
    one = read(tools=TOOLS, tool_choice=allowed("auto", "now"))
    assert one.forced is None
    assert json.loads(one.data)["tools"] == [TOOLS[1]]
    assert json.loads(one.data)["tool_choice"] == "auto"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice", "'must'"),
        ({"tools": TOOLS, "tool_choice": named("wether")}, "tool_choice", "Did you mean 'weather'"),
        ({"tools": TOOLS, "tool_choice": named("zzz")}, "tool_choice", "There are: weather, now"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "'function'"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "'custom'"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": 3}}}, "tool_choice", "wrong shape"),
        ({"tool_choice": "required"}, "tool_choice", "'tools' is empty"),
        ({"tools": [], "tool_choice": named("now")}, "tool_choice", "'tools' is empty"),
        ({"tools": TOOLS, "tool_choice": "required", "grammar": 'root ::= "a"'}, "grammar", "asks for a call"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        read(**fields)
    assert refused.value.param == param


def test_functions_of_before_are_refused_and_not_passed_over() -> None:
    with pytest.raises(NotSupported, match="'tools'"):
        read(functions=[{"name": "f"}])


def test_no_request_with_tools_is_plain() -> None:
    assert isinstance(read(), PlainBody)
    for fields in ({"tools": TOOLS}, {"tool_choice": "required", "tools": TOOLS}, {"parallel_tool_calls": True}):
        assert not isinstance(read(**fields), PlainBody)


ONE = '{\n "name": "f",\n "arguments": {"a": "x \\"}] \\\\", "b": [1, {"name": "n"}]}\n}'
TWO = f'[{ONE}, {{"name":"g","arguments":{{}}}}]'


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "is_list"), [(ONE, False), (TWO, True)])
def test_calls_are_read_however_the_text_is_cut(text: str, is_list: bool, step: int) -> None:
    reader = CallReader(is_list=is_list)
    deltas = [each for at in range(0, len(text), step) for each in reader.feed(text[at : at + step])]
    written = json.loads(text)
    calls = written if is_list else [written]
    for index, call in enumerate(calls):
        own = [each for each in deltas if each["index"] == index]
        assert own[0]["id"].startswith("call_") and own[0]["type"] == "function"
        assert own[0]["function"] == {"name": call["name"], "arguments": ""}
        assert not any("id" in each or "name" in each["function"] for each in own[1:])
        arguments = "".join(each["function"]["arguments"] for each in own)
        assert json.loads(arguments) == call["arguments"]
    assert len({each["id"] for each in deltas if "id" in each}) == len(calls) == reader.n_calls


def test_a_stream_tells_calls_as_openai_does() -> None:
    calls = CallFilter(UsageSum(), CallEvents(is_list=False), wants_usage=True)
    pieces = [
        delta(role="assistant", content=None),
        *(delta(content=each) for each in ONE),
        delta("stop"),
        usage(),
        DONE,
    ]
    out = calls.feed(b"".join([progress(9, 9), *pieces])) + calls.end()
    *events, done = out.decode().removesuffix("\n\n").split("\n\n")
    told = [json.loads(each.removeprefix("data: ")) for each in events]
    assert done == "data: [DONE]" and calls.done
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert told[1]["choices"][0]["delta"]["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert all("content" not in each["choices"][0]["delta"] for each in told[1:-1])
    assert [each["choices"][0]["finish_reason"] for each in told[:-1]] == [None] * (len(told) - 2) + ["tool_calls"]
    assert told[-1]["usage"]["completion_tokens"] == 2


def test_a_call_that_is_cut_off_says_length() -> None:
    whole = CallAssembler(CallEvents(is_list=True))
    for raw in (delta(content=TWO[:40]), delta("length")):
        whole.add(msgspec.json.decode(raw[6:]))
    (choice,) = whole.answer({})["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_choices_have_calls_of_their_own() -> None:
    whole = CallAssembler(CallEvents(is_list=False))
    for piece in (ONE[:10], ONE[10:]):
        for index in (0, 1):
            whole.add(msgspec.json.decode(delta(index=index, content=piece)[6:]))
    for index in (0, 1):
        whole.add(msgspec.json.decode(delta("stop", index=index)[6:]))
    choices = whole.answer({})["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2
    first, second = (choice["message"]["tool_calls"] for choice in choices)
    assert first[0]["function"] == second[0]["function"]
    assert first[0]["id"] != second[0]["id"]
