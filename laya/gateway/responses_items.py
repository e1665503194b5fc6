"""Owns: the items of a conversation as the Responses API has them: which are taken, their ids, their chat messages.

Items come from requests, which may be wrong, and from the store, which holds what was read here. Pure.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from laya.errors import InvalidRequest, NotSupported, nearest
from laya.gateway.fields import without_nulls

Item: TypeAlias = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_SYSTEM = ("system", "developer")
_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("type", "id", "role", "content", "status", "phase"),
    "function_call": ("type", "id", "call_id", "name", "arguments", "status"),
    "function_call_output": ("type", "id", "call_id", "output", "name", "status"),
    "reasoning": ("type", "id", "summary", "content", "encrypted_content", "status"),
}
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_PARTS: dict[str, tuple[str, ...]] = {
    "input_text": ("type", "text"),
    "output_text": ("type", "text", "annotations", "logprobs"),
    "refusal": ("type", "refusal"),
    "input_image": ("type", "image_url", "detail"),
    "input_audio": ("type", "input_audio"),
}
_TEXT_OF = {"input_text": "text", "output_text": "text", "refusal": "refusal"}


def new_id(prefix: str) -> str:
    """An id that nobody guesses: who knows one of a response is not its owner yet, but need not find any."""
    return f"{prefix}_{os.urandom(24).hex()}"


def read_items(given: str | Sequence[Any]) -> list[Item]:
    """The items of a request's `input`, each whole and with an id. Raises InvalidRequest, NotSupported."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("'input' is empty.", param="input")
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _item(given: Any, where: str) -> Item:
    item = _fields(given, where)
    kind = item.setdefault("type", "message")
    if kind not in _FIELDS:
        raise NotSupported(
            f"'{where}.type' is {kind!r}: this server takes {', '.join(_FIELDS)} as input.", param=f"{where}.type"
        )
    _check_known(item, _FIELDS[kind], where, f"an input of type '{kind}'")
    item.setdefault("id", new_id(_PREFIXES[kind]))
    if kind == "message":
        _need(item, "role", str, where)
        if item["role"] not in _ROLES:
            raise InvalidRequest(
                f"'{where}.role' is {item['role']!r}: it is one of {', '.join(_ROLES)}.", param=f"{where}.role"
            )
        item["content"] = _content(item, where)
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            _need(item, name, str, where)
    elif kind == "function_call_output":
        _need(item, "call_id", str, where)
        item["output"] = _output(item.get("output"), f"{where}.output")
    item.setdefault("status", "completed")
    return item


def _fields(given: Any, where: str) -> Item:
    """An object without its nulls, which say the same as nothing."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"'{where}' is {_shown(given)}: it is an object.", param=where)
    return without_nulls(given)


def _check_known(item: Item, known: Iterable[str], where: str, what: str) -> None:
    for name in item:
        if name not in known:
            close = nearest(name, known)
            hint = f" Did you mean '{close}'?" if close else ""
            raise InvalidRequest(f"'{where}.{name}' is not known in {what}.{hint}", param=f"{where}.{name}")


def _need(item: Item, name: str, kind: type, where: str) -> None:
    if name not in item:
        raise InvalidRequest(f"'{where}.{name}' is missing.", param=f"{where}.{name}")
    if not isinstance(item[name], kind):
        raise InvalidRequest(
            f"'{where}.{name}' is {_shown(item[name])}: it is a {kind.__name__}.", param=f"{where}.{name}"
        )


def _content(item: Item, where: str) -> list[Item]:
    content, place = item.get("content"), f"{where}.content"
    if isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        return [{"type": kind, "text": content} | ({"annotations": []} if kind == "output_text" else {})]
    if not isinstance(content, list):
        raise InvalidRequest(f"'{place}' is {_shown(content)}: it is a text or a list of parts.", param=place)
    return [_part(part, f"{place}[{index}]", _PARTS) for index, part in enumerate(content)]


def _part(given: Any, where: str, allowed: Iterable[str]) -> Item:
    part = _fields(given, where)
    _need(part, "type", str, where)
    kind = part["type"]
    if kind not in allowed:
        raise NotSupported(
            f"'{where}.type' is {kind!r}: this server takes {', '.join(allowed)} here.", param=f"{where}.type"
        )
    _check_known(part, _PARTS[kind], where, f"a part of type '{kind}'")
    if kind in _TEXT_OF:
        _need(part, _TEXT_OF[kind], str, where)
    elif kind == "input_image":
        _need(part, "image_url", str, where)
    else:
        _need(part, "input_audio", dict, where)
    return part


def _output(given: Any, where: str) -> Any:
    if isinstance(given, list):
        return [_part(part, f"{where}[{index}]", ("input_text",)) for index, part in enumerate(given)]
    if not isinstance(given, str):
        raise InvalidRequest(f"'{where}' is {_shown(given)}: it is a text or a list of texts.", param=where)
    return given


def _shown(value: Any) -> str:
    text = repr(value)
    return "missing" if value is None else text if len(text) <= 60 else text[:57] + "..."


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[Item]:
    """A conversation as chat messages. Raises InvalidRequest for a result whose call is nowhere.

    What the system says first becomes one message, as most templates know no second one. Reasoning of turns before is
    not shown to the model, as templates drop it too. Calls of one turn become one message with what was said.
    """
    messages: list[Item] = [{"role": "system", "content": instructions}] if instructions else []
    calls: set[str] = set()
    for item in items:
        kind = item["type"]
        if kind == "message":
            role = "system" if item["role"] in _SYSTEM else item["role"]
            messages.append({"role": role, "content": _chat_content(item["content"])})
        elif kind == "function_call":
            calls.add(item["call_id"])
            _add_call(messages, item)
        elif kind == "function_call_output":
            if item["call_id"] not in calls:
                raise InvalidRequest(
                    f"No tool call found for function call output with call_id {item['call_id']}.", param="input"
                )
            output = item["output"]
            text = output if isinstance(output, str) else "".join(part["text"] for part in output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    return _with_one_system(messages)


def _with_one_system(messages: list[Item]) -> list[Item]:
    """The messages, the texts of the system that they begin with in one; each is copied once, however many they are."""
    texts = [each["content"] for each in itertools.takewhile(_is_system_text, messages)]
    if len(texts) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :]]


def _is_system_text(message: Item) -> bool:
    return message["role"] == "system" and isinstance(message["content"], str)


def _add_call(messages: list[Item], item: Item) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _chat_content(parts: list[Item]) -> str | list[Item]:
    """Texts alone are one text, which every template takes."""
    if all(part["type"] in _TEXT_OF for part in parts):
        return "\n".join(str(part[_TEXT_OF[part["type"]]]) for part in parts)
    return [_chat_part(part) for part in parts]


def _chat_part(part: Item) -> Item:
    if part["type"] in _TEXT_OF:
        return {"type": "text", "text": part[_TEXT_OF[part["type"]]]}
    if part["type"] == "input_audio":
        return part
    image = {"url": part["image_url"]} | ({"detail": part["detail"]} if "detail" in part else {})
    return {"type": "image_url", "image_url": image}
