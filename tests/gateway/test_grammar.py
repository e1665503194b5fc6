"""How large what an answer is held to may be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laya.errors import InvalidRequest
from laya.gateway.body import ParsedBody, parse_body
from laya.gateway.emptiness import ways_of_gbnf, ways_of_pattern
from laya.gateway.grammar import ALTERNATIVES_LIMIT, GRAMMAR_LIMIT_BYTES, alternatives
from laya.types import EndpointKind

WORDS = [f"w{n}" for n in range(20_000)]


def parse(**fields: Any) -> ParsedBody:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return parse_body(EndpointKind.CHAT, json.dumps(body | fields).encode())


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.http_status == 400
    return caught.value


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def tool(schema: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def enum_of(n_values: int) -> dict[str, Any]:
    return {"enum": WORDS[:n_values]}


def test_huge_response_format_is_refused_by_its_bytes() -> None:
    error = refusal(response_format=response_format(enum_of(20_000)))
    assert error.param == "response_format"
    assert "bytes" in error.message and str(GRAMMAR_LIMIT_BYTES) in error.message


@pytest.mark.parametrize(
    "schema",
    [
        enum_of(ALTERNATIVES_LIMIT + 1),
        {"anyOf": [{"const": n} for n in range(513)]},
        {"properties": {"a": {"items": {"oneOf": [enum_of(300), enum_of(300)]}}}},
        {"$defs": {"a": enum_of(600)}, "$ref": "#/$defs/a"},
        {"type": "string", "pattern": "|".join(WORDS[:600])},
        {"properties": {word: {} for word in WORDS[:600]}},
    ],
)
def test_schema_of_many_alternatives_is_refused(schema: dict[str, Any]) -> None:
    for name, value in (("response_format", response_format(schema)), ("json_schema", schema)):
        error = refusal(**{name: value})
        assert error.param == name and "alternatives" in error.message and "512" in error.message


def test_schema_inside_json_object_is_bounded_too() -> None:
    error = refusal(response_format={"type": "json_object", "schema": enum_of(600)})
    assert error.param == "response_format"


@pytest.mark.parametrize("text", ["root ::= " + " | ".join(["x"] * 600), "root ::= " + "[a]? " * 600, "#" * 40_000])
def test_huge_grammar_is_refused(text: str) -> None:
    assert refusal(grammar=text).param == "grammar"


def test_schemas_of_ordinary_size_pass() -> None:
    schema = {"type": "object", "properties": {"a": enum_of(500), "b": {"type": ["string", "null"]}}}
    assert parse(response_format=response_format(schema), grammar='root ::= "a" | "b"', json_schema=schema)
    assert parse(response_format={"type": "text"}, grammar="", json_schema={})


def test_tools_of_a_forced_call_are_bounded_together() -> None:
    by_count = [tool(enum_of(100), f"f{n}") for n in range(6)]
    by_bytes = [tool({"const": "x" * 20_000}, f"f{n}") for n in range(2)]
    for tools in (by_count, by_bytes):
        assert refusal(tools=tools, tool_choice="required").param == "tools"
        assert parse(tools=tools) and parse(tools=tools, tool_choice="auto")
        assert parse(tools=tools, tool_choice={"type": "function", "function": {"name": "f1"}})
    assert parse(tools=[tool({"description": "x" * 40_000})], tool_choice="required")  # words hold to nothing


@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_one_huge_tool_is_refused_however_it_is_chosen(choice: str | None) -> None:
    error = refusal(tools=[tool({}), tool(enum_of(600))], tool_choice=choice)
    assert error.param == ("tools" if choice == "required" else "tools[1]")
    error = refusal(tools=[tool({}, word) for word in WORDS[:600]], tool_choice=choice)
    assert error.param == "tools" and ("600 tools" in error.message or choice == "required")


def test_tools_that_are_never_called_are_not_bounded() -> None:
    assert parse(tools=[tool(enum_of(600))], tool_choice="none")


def test_deeply_nested_schema_is_refused() -> None:
    deep = b'{"anyOf":[' * 3000 + b"]}" * 3000
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],"json_schema":%b}' % deep
    with pytest.raises(InvalidRequest):
        parse_body(EndpointKind.CHAT, body)


@pytest.mark.parametrize(
    ("pattern", "ways"),
    [
        ("^[a-z]{1,64}@[a-z.]{1,255}$", 1),
        ("(a{0,30}){0,30}", 1_000_000),
        ("(a{0,30}){0,3}", 4),
        ("((a{0,1000}){0,1000}){0,1000}", 1_000_000),
        ("(?:a?|b?)?c", 3),
        (r"(\(\d{3}\))?[)(]?x+", 1),
        ("a?b?c?", 1),
        ("(a?)+(b*", 1),
        ("((a?)?)(x|(a?)?)", 4),
        (")}{", 1),
    ],
)
def test_ways_of_pattern_to_match_nothing(pattern: str, ways: int) -> None:
    assert ways_of_pattern(pattern) == ways


JSON_GBNF = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\] | "\\" ["\\/bfnrt])* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= ([ \t\n] ws)?
"""
DOUBLING = 'root ::= a a a a\na ::= b? b? b? b?\nb ::= c? c? c? c?\nc ::= d? d? d? d?\nd ::= "x"? "y"? "z"?'


def test_ordinary_grammar_passes_and_one_of_nested_options_is_refused() -> None:
    assert ways_of_gbnf(JSON_GBNF) == 1
    assert parse(grammar=JSON_GBNF)
    for text in (DOUBLING, 'root ::= (("a"{0,1000}){0,1000}){0,1000}'):
        error = refusal(grammar=text)
        assert error.param == "grammar" and "can be empty" in error.message
    assert refusal(json_schema={"type": "string", "pattern": "(a{0,99}){0,99}"}).param == "json_schema"


@pytest.mark.parametrize(
    "text", ["[" * 30_000, '"' * 30_001, "\n" * 30_000, "(" * 30_000, "{" + " " * 30_000, "a-" * 15_000]
)
def test_what_is_never_closed_is_read_once(text: str) -> None:
    assert ways_of_gbnf("root ::= " + text) == ways_of_pattern(text) == 1


def test_chain_of_rules_is_refused_or_passes() -> None:
    chain = "\n".join(f"r{n} ::= r{n + 1}" for n in range(1500))
    assert refusal(grammar=chain).param == "grammar"
    assert ways_of_gbnf("root ::= root | root2\nroot2 ::= root?") == 1


@example("{\n}")
@given(st.text('ab(){}|?*+,09 ."[]\\\n:=#-'))
def test_any_text_has_its_ways(text: str) -> None:
    assert ways_of_pattern(text) >= 1 and ways_of_gbnf("root ::= " + text) >= 1


FORM = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "json"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "json_schema"}, FORM),
        ({"type": "json_schema", "schema": {"type": "object"}}, FORM),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, FORM),
        (response_format(5), FORM),
        (response_format(False), FORM),
        (response_format(None), FORM),
        ({"type": "json_object", "schema": 5}, "response_format.schema"),
    ],
)
def test_format_that_holds_to_nothing_is_refused(given: dict[str, Any], param: str) -> None:
    assert refusal(response_format=given).param == param


@pytest.mark.parametrize("given", [{"type": "text"}, {"type": "json_object"}, {"type": "json_object", "schema": {}}])
def test_formats_without_a_schema_pass_as_they_came(given: dict[str, Any]) -> None:
    parsed = parse(response_format=given)
    assert parsed.not_done is None and json.loads(parsed.data)["response_format"] == given


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a{2,1}$"},
        {"type": "string", "pattern": "^(a|b){3,0}$"},
        {"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 1}}},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"type": "integer", "minimum": 5, "maximum": 1},
    ],
)
def test_bounds_the_wrong_way_round_are_refused(schema: dict[str, Any]) -> None:
    """The engine would count from the one to the other until its memory is full."""
    assert refusal(response_format=response_format(schema)).param == "response_format"
    assert refusal(json_schema=schema).param == "json_schema"
    for choice, param in (("auto", "tools[0]"), ("required", "tools")):
        assert refusal(tools=[tool(schema)], tool_choice=choice).param == param


def test_backwards_repeat_of_a_grammar_is_refused() -> None:
    assert refusal(grammar='root ::= "a"{2, 1}').param == "grammar"
    assert parse(grammar='root ::= "{2,1}" [{2,1}] "a"{1,2} "b"{2,} "c"{03,12}')


@pytest.mark.parametrize(
    ("pattern", "held"),
    [
        (r"^\d{3}$", "^[0-9]{3}$"),
        (r"^[\w.-]+@\w+$", "^[A-Za-z0-9_.-]+@[A-Za-z0-9_]+$"),
        (r"^[\w-.]\W$", r"^[A-Za-z0-9_\x2d.][^A-Za-z0-9_\x22\x5c\x01-\x1f]$"),
        (r"^\-\/\.$", r"^\x2d\x2f\.$"),
        (r"^[[\]]a+?b$", r"^[\x5b\x5d]a+b$"),
        ("^a|b$", "^a|b$"),
        (r"^.[^\n][ \t]\s$", r"^[^\x22\x5c\x01-\x1f][^\x22\x5c\x01-\x1f][ ][ ]$"),
        ('^"$', None), (r"^\\$", None), (r"^\n$", None), (r"^[\t]$", None),
        ("[[", None), ("a", None), ("^a", None), ("a$", None), ("^", None), ("", None), (r"^a\$", None), ("^[a$", None),
        ("^(?=a)b$", None), ("^(?i)a$", None), (r"^\ba$", None), (r"^(a)\1$", None), (r"^\p{L}$", None),
        ("^a$b$", None),
        (r"^[\D]$", None), (r"^[a-\d]$", None), ("^a++$", None),
    ],
)  # fmt: skip
def test_patterns_come_in_the_engines_notation_or_are_told(pattern: str, held: str | None) -> None:
    schema = {"properties": {"pattern": {"type": "string", "pattern": pattern}}, "const": {"pattern": "["}}
    for fields in ({"response_format": response_format(schema)}, {"json_schema": schema}):
        parsed = parse(**fields)
        if held is None:
            assert parsed.not_done is not None and json.dumps(pattern)[1:-1] in parsed.not_done.message
        else:
            assert parsed.not_done is None
            assert json.dumps(pattern) == json.dumps(held) or json.dumps(held).encode() in parsed.data
            assert b'"const":{"pattern":"["}' in parsed.data.replace(b" ", b"")


def test_alternatives_counts_all_places() -> None:
    assert alternatives({"enum": [1, 2], "anyOf": [{"type": ["a", "b"]}, {"pattern": "a|b?"}], "items": [{}]}) == 8
    assert alternatives({"properties": {"enum": {"type": "string"}}}) == 0
    assert alternatives(5) == 0
