"""Owns: turning written values into the structs of `schema`, and the messages about unknown keys and wrong types."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import inspect

from laya.config.api_key import ApiKey
from laya.config.document import Document, KeyPath, dotted, shown
from laya.config.foreign import foreign_key
from laya.config.key_entries import key_entries
from laya.config.model_limits import ModelLimits
from laya.config.ray import RayConfig
from laya.config.request_log import RequestLogConfig
from laya.config.routing import RoutingConfig
from laya.config.schema import Config, MemoryConfig, ModelConfig
from laya.config.server import ServerConfig
from laya.config.settings import ModelSettings, SamplingDefaults
from laya.config.store import StoreConfig
from laya.config.traces import TracesConfig
from laya.config.units import MAX_BYTES, check_budget, parse_bytes, parse_cache, parse_duration, parse_limit
from laya.errors import ConfigError, nearest

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_PARSERS = {
    "bytes": parse_bytes,
    "duration": parse_duration,
    "budget": check_budget,
    "limit": parse_limit,
    "cache": parse_cache,
}
_UNIT_WORDS = {
    "bytes": "bytes or an amount such as 16MiB",
    "duration": "seconds or a time such as 5m",
    "cache": "bytes, an amount such as 256MiB, or auto",
    "limit": "bytes or an amount such as 6GiB",
    "budget": "a share such as 80% or an amount such as 12GiB",
}
_WORDS = {inspect.BoolType: "true or false", inspect.StrType: "text", inspect.NoneType: "null"}
_EMPTY: dict[type, type] = {inspect.ListType: list, inspect.DictType: dict}
_SECTIONS = {
    "server": ServerConfig, "memory": MemoryConfig, "routing": RoutingConfig, "store": StoreConfig,
    "request_log": RequestLogConfig, "traces": TracesConfig, "ray": RayConfig, "limits": ModelLimits,
    "defaults": SamplingDefaults,
}  # fmt: skip
_SHORT_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmM]|[eE]\+?(\d))")  # 4k, 1e3
_WITHOUT_POINT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d\d?")  # 1e-3
MAX_NAMED_KEYS = 12
MAX_INTEGER = 2**32 - 1  # what llama.cpp's context sizes and seeds are held in


def to_struct(struct: type[_Struct], document: Document, path: KeyPath = (), data: Any = None) -> _Struct:
    """The mapping at `path` as a struct. Raises ConfigError naming the key, its value and what is expected."""
    data = document.data if data is None and not path else data
    if not isinstance(data, dict):
        shown = "a value" if path[:2] == ("server", "api_keys") else document.value(path, data)
        raise document.error(path, f"{dotted(path)}: expected keys with values, got {shown}")
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    values = {}
    for key, value in data.items():
        if key not in fields:
            raise _unknown_key(struct, document, (*path, key), data)
        values[key] = _value(fields[key].type, document, (*path, key), value)
    missing = [name for name, field in fields.items() if field.required and name not in values]
    if missing:
        raise document.error(path, f"{dotted(path)}: {missing[0]} is missing" if path else f"{missing[0]} is missing")
    try:
        return struct(**values)
    except ValueError as error:  # of values that do not go together; its first word is the key of one of them
        told = (*path, *str(error).partition(" ")[0].split("."))
        start = f"{dotted(path)}." if told[:-1] == path else f"{dotted(path)}: "
        raise document.error(told if told in document.lines else path, f"{start if path else ''}{error}") from None


def _value(annotation: Any, document: Document, path: KeyPath, value: Any) -> Any:
    kinds = _alternatives(inspect.type_info(annotation))
    for kind in map(_bare, kinds):
        if isinstance(kind, inspect.StructType):
            return to_struct(kind.cls, document, path, {} if value is None else value)
        if isinstance(kind, inspect.ListType) and isinstance(kind.item_type, inspect.StructType):
            read = _api_keys if kind.item_type.cls is ApiKey else _list_of
            return read(kind.item_type.cls, document, path, value)
        if isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.StructType):
            return _entries(kind.value_type.cls, document, path, value)
        if isinstance(kind, inspect.DictType) and unit_of(kind.value_type) and isinstance(value, dict):
            of_member = get_args(get_args(annotation)[0])[1]  # Annotated[dict[str, of_member], Meta(...)]
            return {name: _value(of_member, document, (*path, name), member) for name, member in value.items()}
    if value is None:  # a key whose members are all commented out
        value = next((_EMPTY[type(kind)]() for kind in map(_bare, kinds) if type(kind) in _EMPTY), None)
    try:
        parsed = _parse_unit(annotation, value)
        _check_size(annotation, parsed)
        return msgspec.convert(parsed, annotation)
    except msgspec.ValidationError:
        got = document.value(path, value)
        meant = "" if path in document.written else _meant(annotation, value)
        raise document.error(path, f"{document.key(path)}: expected {describe(annotation)}, got {got}{meant}") from None
    except ConfigError as error:
        reason = f"{document.value(path, value)} is not right here" if path in document.written else error.message
        raise document.error(path, f"{document.key(path)}: {reason}") from None


def _meant(annotation: Any, value: Any) -> str:
    """The right value that was most likely meant, as a hint behind the message; nothing where none is near."""
    if not isinstance(value, str):
        return ""
    kinds = [_bare(kind) for kind in _alternatives(inspect.type_info(annotation))]
    words = [word for kind in kinds if isinstance(kind, inspect.LiteralType) for word in kind.values]
    close = nearest(value.lower(), [word for word in words if isinstance(word, str)])
    number = _SHORT_NUMBER.fullmatch(value.strip())
    if number and any(isinstance(kind, inspect.IntType) for kind in kinds):
        scale = {"k": 1024, "m": 1024**2}.get(number[2].lower(), 10 ** int(number[3] or 0))
        close = str(round(float(number[1]) * scale))
    elif any(isinstance(kind, inspect.FloatType) for kind in kinds) and _WITHOUT_POINT.fullmatch(value.strip()):
        close = f"{Decimal(value):f}"  # to YAML a number with an exponent and no point is text
    return f": write {close}" if close else ""


def _entries(struct: type[_Struct], document: Document, path: KeyPath, value: Any) -> dict[str, _Struct]:
    if value is not None and not isinstance(value, dict):
        whose = "model names" if path == ("models",) else "names"
        raise document.error(
            path, f"{dotted(path)}: expected {whose} with their settings, got {document.value(path, value)}"
        )
    return {
        name: to_struct(struct, document, (*path, name), {} if entry is None else entry)
        for name, entry in (value or {}).items()
    }


def _list_of(struct: type[_Struct], document: Document, path: KeyPath, value: Any) -> list[_Struct]:
    if value is not None and not isinstance(value, list):
        raise document.error(path, f"{dotted(path)}: expected a list, got {document.value(path, value)}")
    return [to_struct(struct, document, (*path, index), entry or {}) for index, entry in enumerate(value or [])]


def _api_keys(struct: type[_Struct], document: Document, path: KeyPath, value: Any) -> list[_Struct]:
    return [to_struct(struct, document, where, entry) for where, entry in key_entries(document, path, value)]


def _parse_unit(annotation: Any, value: Any) -> Any:
    """`16MiB` and `5m` as the number they stand for, where the key takes an amount or a time."""
    unit = unit_of(inspect.type_info(annotation))
    if unit and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _PARSERS[unit](value)
    return value


def _check_size(annotation: Any, value: Any) -> None:
    """Raises ConfigError for a number that no machine and no engine could take, wherever it stands in a value."""
    if isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _check_size(annotation, part)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"expected a number, got {value}")
    elif isinstance(value, int):
        largest = MAX_BYTES if unit_of(inspect.type_info(annotation)) else MAX_INTEGER
        if abs(value) > largest:
            raise ConfigError(f"{shown(value)} is too large: at most {largest}")


def unit_of(info: inspect.Type) -> str | None:
    """The unit a key's type, or a member of its union, is marked with."""
    return _mark(info, "unit")


def _mark(info: inspect.Type, name: str) -> str | None:
    for kind in (info, *_alternatives(info)):
        if isinstance(kind, inspect.Metadata) and kind.extra and name in kind.extra:
            return str(kind.extra[name])
    return None


def _unknown_key(
    struct: type[msgspec.Struct], document: Document, path: KeyPath, siblings: dict[str, Any]
) -> ConfigError:
    key, known = str(path[-1]), struct.__struct_fields__
    is_ours = struct.__module__.split(".")[:2] == __name__.split(".")[:2]  # else of another file than config.yaml
    beside = {name: document.written.get((*path[:-1], name), value) for name, value in siblings.items()}
    foreign = foreign_key(path, beside, in_model=issubclass(struct, ModelSettings), top_level=struct is Config)
    if foreign:
        return document.error(path, foreign)
    for section, owner in _SECTIONS.items():
        if issubclass(struct, ModelSettings) and key in owner.__struct_fields__:
            return document.error(path, f"{key} belongs under `{section}:`")
    if is_ours and struct is not Config and key in Config.__struct_fields__:
        return document.error(path, f"{dotted(path)}: {key} belongs at the top level")
    if struct is Config and key in ModelConfig.__struct_fields__:
        return document.error(path, f"{key} belongs to one model, under `models:`")
    close = nearest(key.replace("-", "_").lower(), known)
    names = ", ".join(known) if len(known) <= MAX_NAMED_KEYS or not is_ours else "`laya config example` shows them all"
    hint = f"Did you mean {close}?" if close else f"Keys here: {names}."
    return document.error(path, f"{document.key(path)} is not a key here. {hint}")


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The members of a union, each with its own metadata; a plain type alone."""
    bare = _bare(kind)
    return list(bare.types) if isinstance(bare, inspect.UnionType) else [kind]


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def describe(annotation: Any) -> str:
    """A type in the words of messages and docs, e.g. `a whole number >= 1 or auto`."""
    info = inspect.type_info(annotation)
    unit = unit_of(info)
    kinds = _alternatives(info)
    words = _UNIT_WORDS[unit] if unit else _mark(info, "words")
    return words or " or ".join(_describe(_bare(kind)) for kind in kinds)


def _describe(kind: inspect.Type) -> str:
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return ("a whole number" if isinstance(kind, inspect.IntType) else "a number") + _bounds(kind)
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(str(value) for value in kind.values)
    if isinstance(kind, inspect.ListType):
        item = _bare(kind.item_type)
        return "a list" if isinstance(item, inspect.StructType) else f"a list, each {_describe(item)}"
    if isinstance(kind, (inspect.DictType, inspect.StructType)):
        return "keys with values"
    return _WORDS[type(kind)]


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = [(">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt)]
    said = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(said)}" if said else ""
