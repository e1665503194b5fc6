"""Owns: what `response_format` and `json_schema` may say, and the form in which an engine holds an answer to it.

A format that nothing is held to would be free text that its client takes for JSON, so it is refused by name. Knows raw
fields and nothing of the rest of a body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from laya.errors import InvalidRequest, NotSupported
from laya.gateway.fields import shown
from laya.gateway.grammar import check_schema
from laya.gateway.patterns import engine_pattern

_TYPES = ("text", "json_object", "json_schema")
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"const", "enum", "default", "example", "examples"})


class Format:
    """A decoded format. `value` goes to the engine; `not_held` is what llama.cpp would pass over in silence."""

    def __init__(self, name: str, raw: msgspec.Raw) -> None:
        check_schema(name, raw)
        self.value: Any = msgspec.json.decode(raw)
        self.is_changed = False
        self.not_held: NotSupported | None = None
        schema = _schema_of(self.value) if name == "response_format" else self.value
        for node in _schemas(schema):
            self._hold(name, node)

    def _hold(self, name: str, node: dict[str, Any]) -> None:
        pattern = node.get("pattern")
        if not isinstance(pattern, str):
            return
        held = engine_pattern(pattern)
        if held is None:
            self.not_held = NotSupported(
                f"'{name}' has the pattern {shown(pattern)}: an answer can be held to patterns of a whole text, "
                "^...$, without quotes, backslashes, line ends, look-around, back references, \\b and \\p.",
                param=name,
            )
        elif held != pattern:
            node["pattern"] = held
            self.is_changed = True


def schema_alone(response_format: dict[str, Any]) -> Any:
    """The schema of a format that passed, for an engine that takes no format; None for text."""
    if response_format["type"] == "text":
        return None
    return _schema_of(response_format) or {"type": "object"}


def _schema_of(given: dict[str, Any]) -> Any:
    """The schema in a response_format. Raises InvalidRequest where its form is not right."""
    kind = given.get("type")
    if kind not in _TYPES:
        said = f"is {shown(kind)}" if "type" in given else "is missing"
        raise InvalidRequest(
            f"'response_format.type' {said}: it is {', '.join(_TYPES[:-1])} or {_TYPES[-1]}.",
            param="response_format.type",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        where, schema = "response_format.schema", given.get("schema")
        if schema is None:
            return None
    else:
        where, holder = "response_format.json_schema.schema", given.get("json_schema")
        if not isinstance(holder, dict) or holder.get("schema") is None:
            raise InvalidRequest(
                f"'{where}' is missing: what the answer is held to; 'json_object' is any object.", param=where
            )
        schema = holder["schema"]
    if not isinstance(schema, dict):
        raise InvalidRequest(f"'{where}' is {shown(schema)}: it is a JSON schema, an object.", param=where)
    return schema


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that are in it, without what it holds as mere values."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in _NAMED and isinstance(value, dict):
                    waiting += value.values()
                elif key not in _DATA:
                    waiting.append(value)
