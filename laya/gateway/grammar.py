"""Owns: how large what an answer is held to may be: JSON schemas, GBNF grammars, tools.

An engine turns each of these into a grammar and follows all of its alternatives at every token, for the whole
vocabulary, while every other request of the model waits. So their bytes and their alternatives are bounded before the
engine sees them. Knows raw JSON fields and nothing of the rest of a body.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from laya.errors import InvalidRequest
from laya.gateway.emptiness import backwards_in_gbnf, backwards_in_pattern, ways_of_gbnf, ways_of_pattern

# An enum of 500 values takes the default model about a second on two cores, one of 2000 ten, one of 20000 minutes.
GRAMMAR_LIMIT_BYTES = 32 * 1024
ALTERNATIVES_LIMIT = 512
EMPTY_WAYS_LIMIT = 32  # see laya.gateway.emptiness
_CHOICES = frozenset({"enum", "anyOf", "oneOf", "allOf", "type"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_BOUNDS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
_REPEATS = "|?*{"  # each is a place where a grammar or a pattern may go more than one way


class FunctionHead(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, msgspec.Raw] | None = None


class ToolHead(msgspec.Struct):
    type: Literal["function"]
    function: FunctionHead


def check_schema(name: str, raw: msgspec.Raw) -> None:
    """Refuse a schema (or what contains one) that is too large. Raises InvalidRequest naming the field and the size."""
    _check_size(name, bytes(raw))
    _check_count(name, alternatives(_decoded(name, raw), name))


def check_gbnf(name: str, text: str) -> None:
    """The same for a grammar in llama.cpp's own notation."""
    _check_size(name, text.encode())
    _check_count(name, _ways(text))
    _check_repeats(name, backwards_in_gbnf(text))
    try:
        n_empty = ways_of_gbnf(text)
    except RecursionError:
        raise InvalidRequest(f"'{name}' has rules nested too deeply.", param=name) from None
    _check_empty(name, n_empty)


def check_tools(raw: msgspec.Raw) -> None:
    """Bound tools that may be called, each by itself, since it is tried only when called."""
    tools: Any = _decoded("tools", raw)
    if len(tools) > ALTERNATIVES_LIMIT:
        raise InvalidRequest(
            f"'tools' has {len(tools)} tools; one request may call {ALTERNATIVES_LIMIT} at most.", param="tools"
        )
    for index, tool in enumerate(tools):
        _check_count(f"tools[{index}]", alternatives(tool, f"tools[{index}]"))


def alternatives(schema: Any, name: str = "schema") -> int:
    """Alternatives of a decoded schema, all of its places together. Raises InvalidRequest for a bad pattern.

    The properties of an object count where they alone are too many.
    """
    total = 0
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
            continue
        if not isinstance(node, dict):
            continue
        _check_bounds(name, node)
        for key, value in node.items():
            if isinstance(value, list) and key in _CHOICES:
                total += len(value)
            elif isinstance(value, dict) and key in _NAMED and len(value) > ALTERNATIVES_LIMIT:
                total += len(value)  # each property that may be left out is an alternative to the ones after it
            elif key == "pattern" and isinstance(value, str):
                _check_size(name, value.encode())
                _check_repeats(name, backwards_in_pattern(value))
                _check_empty(name, ways_of_pattern(value))
                total += _ways(value)
            if isinstance(value, (dict, list)):
                waiting.append(value)
    return total


def _ways(text: str) -> int:
    return sum(text.count(mark) for mark in _REPEATS)


def _decoded(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"'{name}' is nested too deeply or no valid JSON.", param=name) from None


def _check_size(name: str, data: bytes) -> None:
    if len(data) > GRAMMAR_LIMIT_BYTES:
        raise InvalidRequest(
            f"'{name}' has {len(data)} bytes; an answer can be held to {GRAMMAR_LIMIT_BYTES} bytes at most.", param=name
        )


def _check_count(name: str, n_alternatives: int) -> None:
    if n_alternatives > ALTERNATIVES_LIMIT:
        raise InvalidRequest(
            f"'{name}' has {n_alternatives} alternatives (enum, anyOf, |, ? and the like); an answer can be held to "
            f"{ALTERNATIVES_LIMIT} at most.",
            param=name,
        )


def _check_bounds(name: str, node: dict[str, Any]) -> None:
    """An engine that counts down from the most to the least would never end."""
    for least_name, most_name in _BOUNDS:
        least, most = node.get(least_name), node.get(most_name)
        if isinstance(least, (int, float)) and isinstance(most, (int, float)) and least > most:
            raise InvalidRequest(
                f"'{name}' has {least_name} {least} above {most_name} {most}: nothing can be both.", param=name
            )


def _check_repeats(name: str, backwards: str | None) -> None:
    if backwards is not None:
        raise InvalidRequest(f"'{name}' has the repeat {backwards[:40]}: its least is above its most.", param=name)


def _check_empty(name: str, n_ways: int) -> None:
    if n_ways > EMPTY_WAYS_LIMIT:
        raise InvalidRequest(
            f"'{name}' repeats what can be empty, as in (a?){{9}}: it can match nothing in more than "
            f"{EMPTY_WAYS_LIMIT} ways, which the engine would all try at every token.",
            param=name,
        )
