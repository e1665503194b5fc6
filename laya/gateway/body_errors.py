"""Owns: what is wrong with a request body, in words: the field, the value that stands there, and why not."""

from __future__ import annotations

import json
import re
from typing import Any, TypeAlias

import msgspec

from laya.errors import InvalidRequest

Raw: TypeAlias = msgspec.Raw
# Decoded, a list of small things takes some thirty times its bytes. So many commas are more than any context holds.
ELEMENTS_LIMIT = 2**19
# Of one object. Engines look each member up among those before it: 90,000 take them half a minute.
MEMBERS_LIMIT = 4096
ALL_MEMBERS_LIMIT = 2**16  # of all objects together: more take the gateway a third of a second to tell apart
_MEMBER = re.compile(rb'(?<!\\)(?:\\\\)*"\s*:')  # a quote within a string has a backslash before it
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_MISSING = re.compile(r"Object missing required field '(.*)'")
_HALF_CHARACTER = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_PLACE = " - at `$"  # what msgspec puts behind a reason, which may quote a value that has the same in it


def check_elements(data: bytes) -> None:
    """Raise InvalidRequest for what has more elements than are decoded."""
    if len(data) > ELEMENTS_LIMIT and data.count(b",") > ELEMENTS_LIMIT:
        raise InvalidRequest(f"The request body has more than {ELEMENTS_LIMIT} elements.")
    if len(data) > MEMBERS_LIMIT and (n_colons := data.count(b":")) > MEMBERS_LIMIT:
        if n_colons > ALL_MEMBERS_LIMIT and len(_MEMBER.findall(data)) > ALL_MEMBERS_LIMIT:
            raise InvalidRequest(f"The request body has objects with more than {ALL_MEMBERS_LIMIT} members in all.")
        try:
            _MEMBERS.decode(data.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise not_json(error) from None


def _check_members(members: list[tuple[str, Any]]) -> None:
    """Raise InvalidRequest for an object that has too many."""
    if len(members) > MEMBERS_LIMIT:
        raise InvalidRequest(
            f"The request body has an object with {len(members)} members, '{members[0][0][:60]}' the first; "
            f"one object takes {MEMBERS_LIMIT}."
        )


# with each member of an object, also where one is said again; numbers are not read, as Python refuses very long ones
_MEMBERS = json.JSONDecoder(
    object_pairs_hook=_check_members, strict=False, parse_int=len, parse_float=len, parse_constant=len
)


def not_json(error: Exception, data: bytes = b"") -> InvalidRequest:
    """For what the decoder could not read at all. data: the body, where it is at hand."""
    if isinstance(error, RecursionError):
        return InvalidRequest("The request body is nested too deeply.")
    half = _HALF_CHARACTER.search(data)
    if half is not None:
        said = half.group().decode()
        return InvalidRequest(f"The request body is not valid JSON: {said} is half of a surrogate pair, no character.")
    return InvalidRequest(f"The request body is not valid JSON: {error}.")


def explained(error: msgspec.ValidationError, data: bytes) -> InvalidRequest:
    """msgspec names the place; users also want the value that stands there."""
    text, has_place, path = str(error).rpartition(_PLACE)
    if not has_place:
        return InvalidRequest(f"The request body has the wrong shape: {path.replace('`', chr(39))}.")
    reason, where = text.replace("`", "'"), path.removesuffix("`").lstrip(".")
    missing = _MISSING.match(reason)
    try:
        if where == "logit_bias[...]":
            key, value = _wrong_bias(data)
            where = f"logit_bias.{key}"
        else:
            value = _value_at(data, where)
    except (msgspec.DecodeError, RecursionError) as fault:  # the decoder stopped at the field, before a worse fault
        return not_json(fault)
    if missing:
        where = f"{where}.{missing.group(1)}"
        return InvalidRequest(f"'{where}' is missing in {value}.", param=where)
    return InvalidRequest(f"'{where}' is {value}: {reason}.", param=where)


def _wrong_bias(data: bytes) -> tuple[str, str]:
    """The first member of logit_bias whose value is no number: the decoder does not say which."""
    for key, raw in _FIELDS.decode(_FIELDS.decode(data)["logit_bias"]).items():
        if type(msgspec.json.decode(raw)) not in (int, float):
            return key, _shown(raw)
    return "...", "not right"


def _value_at(data: bytes, where: str) -> str:
    """The JSON at a place such as `messages[0].role`, as it was written. Raises DecodeError, RecursionError."""
    raw: Any = data
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", where):
        raw = msgspec.json.decode(raw, type=list[Raw])[int(index)] if index else _FIELDS.decode(raw)[name]
    return _shown(raw)


def _shown(raw: Any) -> str:
    text = bytes(raw).decode(errors="replace")
    return text if len(text) <= 60 else text[:57] + "..."
