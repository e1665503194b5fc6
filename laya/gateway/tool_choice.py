"""Owns: which tools an answer may or must call, and the JSON schema of an answer that must.

Engines tell tools to a model by its chat template, and few hold it to `required` or to a named tool. So an answer that
must call is held to the schema of its calls, as structured output is; `tool_events` makes calls of its text. Where a
call is free (`auto`), the engine's own way stays. Knows the fields of a chat body, and no engine.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import msgspec

from laya.errors import InvalidRequest, nearest
from laya.gateway.grammar import ToolHead, check_schema

Mode: TypeAlias = Literal["none", "auto", "required"]
CALLS_MOST = 8  # of one answer
# what is about the text of an answer: there is none, and engines refuse some of it beside tools
NOT_BESIDE_CALLS = ("grammar", "json_schema", "stop", "logprobs", "top_logprobs", "n_probs", "parallel_tool_calls")
_MODES = ("none", "auto", "required")
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum"})
_WORDS = frozenset({"title", "description", "default", "examples", "$comment"})  # for readers, no rules


class _Named(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    function: _Named


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[_NamedTool]


class _Choice(msgspec.Struct):
    type: str = "function"
    function: _Named | None = None
    allowed_tools: _Allowed | None = None


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A tool as a chat's `tools` have it."""
    said = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


class ForcedCalls(msgspec.Struct, frozen=True):
    """What an answer is held to. is_list: an array of calls; else it is one call."""

    schema: bytes
    is_list: bool


def read_choice(raw: msgspec.Raw | None, tools: list[ToolHead]) -> tuple[Mode, set[str] | None]:
    """The mode, and the names of the tools it is about (None: all). Raises InvalidRequest."""
    if raw is None:
        return "auto", None
    choice = msgspec.json.decode(raw)
    mode: Mode
    names: list[str] | None = None
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequest(f"'tool_choice' is '{choice}': it is none, auto, required or a tool.",
                                 param="tool_choice")  # fmt: skip
        mode = cast(Mode, choice)
    else:
        mode, names = _named(choice)
    known = [tool.function.name for tool in tools]
    in_tools = set(known)
    if not known and (mode == "required" or names):
        raise InvalidRequest("'tool_choice' asks for a call and 'tools' is empty.", param="tool_choice")
    for name in names or ():
        if name not in in_tools:
            close = nearest(name, known)
            hint = f" Did you mean '{close}'?" if close else f" There are: {', '.join(known)}."
            raise InvalidRequest(f"'tool_choice' names the tool '{name}', which is not in 'tools'.{hint}",
                                 param="tool_choice")  # fmt: skip
    return mode, None if names is None else set(names)


def _named(choice: Any) -> tuple[Mode, list[str]]:
    try:
        read = msgspec.convert(choice, _Choice)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"'tool_choice' has the wrong shape: {error}.", param="tool_choice") from None
    if read.type == "function" and read.function is not None:
        return "required", [read.function.name]
    if read.type == "allowed_tools" and read.allowed_tools is not None and read.allowed_tools.tools:
        return read.allowed_tools.mode, [tool.function.name for tool in read.allowed_tools.tools]
    raise InvalidRequest(
        f"'tool_choice.type' is '{read.type}': this server takes 'function', with its name in 'function', and "
        "'allowed_tools', with a mode and tools.",
        param="tool_choice",
    )


def allowed_alone(raw: msgspec.Raw, names: set[str]) -> list[msgspec.Raw]:
    """The tools of these names, as they came."""
    each = msgspec.json.decode(raw, type=list[msgspec.Raw])
    heads = msgspec.json.decode(raw, type=list[ToolHead])
    return [tool for tool, head in zip(each, heads, strict=True) if head.function.name in names]


def forced_calls(raw: msgspec.Raw, names: set[str] | None, *, parallel: bool) -> ForcedCalls:
    """What an answer is held to that must call one of the tools in `raw`. Raises InvalidRequest for too large ones."""
    try:
        data = msgspec.json.encode(_composed(msgspec.json.decode(raw), names, parallel=parallel))
    except RecursionError:
        raise InvalidRequest("'tools' is nested too deeply.", param="tools") from None
    check_schema("tools", msgspec.Raw(data))
    return ForcedCalls(data, parallel)


def _composed(tools: list[dict[str, Any]], names: set[str] | None, *, parallel: bool) -> dict[str, Any]:
    each_function = ((index, tool["function"]) for index, tool in enumerate(tools))
    offered = [(index, each) for index, each in each_function if names is None or each["name"] in names]
    calls = [_call(each, index) for index, each in offered]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if parallel:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": CALLS_MOST}
    defs = {name: each for index, function in offered for name, each in _defs(function, index).items()}
    if defs:
        schema["$defs"] = defs
    return schema


def fields_of(forced: ForcedCalls) -> dict[str, Any]:
    """What an engine is asked for: it tells the model of the tools, and leaves what is called to the schema."""
    schema = {"name": "calls", "strict": True, "schema": msgspec.Raw(forced.schema)}
    return {"tool_choice": "none", "response_format": {"type": "json_schema", "json_schema": schema}}


def _call(function: dict[str, Any], index: int) -> dict[str, Any]:
    """The schema of a call: the name first, so that a stream can tell it before the arguments come."""
    arguments = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": _inlined(arguments, index)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _defs(function: dict[str, Any], index: int) -> dict[str, Any]:
    """The definitions of one tool, under names that no other tool's have."""
    parameters = function.get("parameters") or {}
    found: dict[str, Any] = {}
    for place in ("$defs", "definitions"):
        schemas = parameters.get(place)
        if isinstance(schemas, dict):
            found |= {f"tool{index}-{name}": _bare(schema, index) for name, schema in schemas.items()}
    return found


def _inlined(schema: dict[str, Any], index: int) -> Any:
    return _bare({name: each for name, each in schema.items() if name not in ("$defs", "definitions")}, index)


def _bare(node: Any, index: int) -> Any:
    """A schema without its words, its references led to where the tool's definitions are."""
    if isinstance(node, list):
        return [_bare(each, index) for each in node]
    if not isinstance(node, dict):
        return node
    bare: dict[str, Any] = {}
    for key, value in node.items():
        if key in _MAPS and isinstance(value, dict):
            bare[key] = {name: _bare(each, index) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str):
            bare[key] = _led(value, index)
        elif key in _VALUES:
            bare[key] = value
        elif key not in _WORDS:
            bare[key] = _bare(value, index)
    return bare


def _led(ref: str, index: int) -> str:
    for start in ("#/$defs/", "#/definitions/"):
        if ref.startswith(start) and "/" not in ref[len(start) :]:
            return f"#/$defs/tool{index}-{ref[len(start) :]}"
    raise InvalidRequest(
        f"'tools[{index}].function.parameters' refers to '{ref}': where a call is forced, only '#/$defs/NAME' is "
        "followed.",
        param="tools",
    )
