"""Owns: reading the body of a translated API: a JSON object of one type, in which nothing unknown is passed over.

What is wrong is told with the field and the value, what is not supported with what to do instead. Knows no API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from laya.errors import InvalidRequest, NotSupported, nearest
from laya.gateway.body_errors import check_elements

_T = TypeVar("_T", bound=msgspec.Struct)
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.S)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_TYPE_OF = re.compile(r"([^.\[\]]+)(?:\[\d+\])?\.type$")  # the field whose value, or whose items, have that type
_SHOWN_MOST = 60
_DIGITS_MOST = 18  # Python refuses to read numbers of thousands of digits, with an error of another kind
WHOLE_NUMBER_MOST = 10**_DIGITS_MOST - 1


def whole_number(text: str) -> int | None:
    """The whole number that a query parameter says, not negative; None where it says anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MOST else None


def read_fields(
    body: bytes,
    kind: type[_T],
    api: str,
    *,
    instead: Mapping[str, str] | None = None,
    types: Mapping[str, Sequence[str]] | None = None,
    nothing: Sequence[Any] = (),
) -> _T:
    """The body as a `kind`. Raises InvalidRequest, NotSupported.

    api: what its fields are fields of. instead: fields that are not supported, and what to do; `kind` may have such a
    field all the same, for the one value `false`. types: what the `type` of a field's value may be, by the field's
    name, to be told where it is another. nothing: values of `instead` fields that say the same as one left out.
    """
    check_elements(body)
    try:
        fields = _OBJECT.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request body is not a JSON object: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None
    instead = instead or {}
    said = without_nulls(fields)
    fields = {name: value for name, value in said.items() if name not in instead or value not in nothing}
    known = kind.__struct_fields__
    for name, value in fields.items():
        if name in instead and not (value is False and name in known):
            raise NotSupported(f"'{name}' is not supported here: {instead[name]}.", param=name)
        if name not in known:
            close = nearest(name, known)
            hint = f" Did you mean '{close}'?" if close else ""
            raise InvalidRequest(f"'{name}' is not a field of {api}.{hint}", param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), fields, api, types or {}) from None


def _explained(
    text: str, fields: dict[str, Any], api: str, types: Mapping[str, Sequence[str]]
) -> InvalidRequest | NotSupported:
    """msgspec names the place; users also want the value that stands there, and what was meant."""
    reason, has_place, place = text.rpartition(" - at `")  # the last one: a reason may quote what has the same in it
    if not has_place:
        reason, place = text, ""
    where = place.removesuffix("`").removeprefix("key in ").removeprefix("$").lstrip(".")
    if named := _UNKNOWN.match(reason) or _MISSING.match(reason):
        param = f"{where}.{named.group(1)}" if where else named.group(1)
        if _MISSING.match(reason):
            return InvalidRequest(f"'{param}' is missing.", param=param)
        return InvalidRequest(f"'{param}' is not a field of {api}.", param=param)
    value = shown(_value_at(fields, where))
    owner = _TYPE_OF.search(where)
    if owner and reason.startswith("Invalid") and owner.group(1) in types:
        known = ", ".join(types[owner.group(1)])
        return NotSupported(f"'{where}' is {value}: this server takes {known} here.", param=where)
    return InvalidRequest(f"'{where}' is {value}: {reason.replace('`', chr(39))}.", param=where)


def _value_at(fields: dict[str, Any], where: str) -> Any:
    """The value at a place such as `messages[0].role`; where the place ends inside of what has no names, that."""
    value: Any = fields
    for name, index in _STEP.findall(where):
        if index == "...":
            break
        value = value[int(index)] if index else value[name]
    return value


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is said: a null says the same as nothing."""
    return {name: value for name, value in fields.items() if value is not None}


def shown(value: Any) -> str:
    """A value as a message names it."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_MOST else text[: _SHOWN_MOST - 3] + "..."
