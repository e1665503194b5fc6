"""Owns: the content blocks of Anthropic's Messages API: which are taken, and the chat messages that they come to.

Blocks come from requests, which may be wrong. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from laya.errors import InvalidRequest
from laya.gateway.assemble import encode

Message: TypeAlias = dict[str, Any]
# Agents begin the system prompt with a line of accounts that changes with every request: kept, no prefix of two
# requests would be the same, and no engine's cache would serve.
_ACCOUNTS = "x-anthropic-billing-header:"


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Taken without an effect: engines keep prompts by themselves."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all blocks may have."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text", kw_only=True):
    text: str
    citations: list[Any] | None = None


class Base64Source(msgspec.Struct, tag="base64", forbid_unknown_fields=True):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(msgspec.Struct, tag="url", forbid_unknown_fields=True):
    url: str


class ImageBlock(Block, tag="image", kw_only=True):
    source: Base64Source | UrlSource


class PlainSource(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class DocumentBlock(Block, tag="document", kw_only=True):
    """A text with a title."""

    source: PlainSource
    title: str | None = None
    context: str | None = None


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class RedactedBlock(Block, tag="redacted_thinking", kw_only=True):
    data: str


AnyBlock: TypeAlias = (
    TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock
)


class MessageParam(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


def system_text(system: str | list[TextBlock] | None) -> str:
    """The system prompt in one piece."""
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(block.text for block in system if not block.text.startswith(_ACCOUNTS))


def chat_messages(system: str | list[TextBlock] | None, messages: list[MessageParam]) -> list[Message]:
    """The conversation as chat messages. Raises InvalidRequest for a result whose call is nowhere.

    Thinking of turns before is not shown to the model, as templates drop it too. Turns of one role that follow each
    other are one turn, as Anthropic has it and many templates demand.
    """
    text = system_text(system)
    out: list[Message] = [{"role": "system", "content": text}] if text else []
    calls: set[str] = set()
    for index, message in enumerate(messages):
        content = message.content
        blocks: Sequence[AnyBlock] = [TextBlock(text=content)] if isinstance(content, str) else content
        if message.role == "assistant":
            out.append(_assistant(blocks, calls, index))
            continue
        for place, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                _check_result(block, message.role, calls, f"messages[{index}].content[{place}]")
                out.append(_result(block))
        said = [block for block in blocks if not isinstance(block, ToolResultBlock)]
        if said:
            _check_said(said, message.role, index)
            out.append({"role": message.role, "content": _content(said)})
    return _joined(out)


def _joined(messages: list[Message]) -> list[Message]:
    """Turns of one role that follow each other and are text as one; each text is copied once, however many they are."""
    out: list[Message] = []
    for _, turns in itertools.groupby(messages, lambda each: each["role"] if _is_text(each) else id(each)):
        first, *more = turns
        out.append(first | {"content": "\n\n".join(each["content"] for each in (first, *more))} if more else first)
    return out


def _is_text(message: Message) -> bool:
    return message["role"] != "tool" and isinstance(message["content"], str) and "tool_calls" not in message


def _assistant(blocks: Sequence[AnyBlock], calls: set[str], index: int) -> Message:
    said = [block for block in blocks if not isinstance(block, (ToolUseBlock, ThinkingBlock, RedactedBlock))]
    for block in said:
        if not isinstance(block, TextBlock):
            raise InvalidRequest(
                f"'messages[{index}]' with the role 'assistant' has a block of type '{_type_of(block)}'; it may have "
                f"text, tool_use and thinking.",
                param=f"messages[{index}].content",
            )
    message: Message = {"role": "assistant", "content": _content(said) if said else ""}
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if uses:
        calls.update(use.id for use in uses)
        message["content"] = message["content"] or None
        message["tool_calls"] = [_call(use) for use in uses]
    return message


def _call(use: ToolUseBlock) -> Message:
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": encode(use.input).decode()}}


def _check_result(block: ToolResultBlock, role: str, calls: set[str], where: str) -> None:
    if role != "user":
        raise InvalidRequest(f"'{where}' is a tool_result; only a message of the user has one.", param=where)
    if block.tool_use_id not in calls:
        raise InvalidRequest(
            f"'{where}.tool_use_id' is '{block.tool_use_id}': no tool_use before it has this id.",
            param=f"{where}.tool_use_id",
        )


def _check_said(said: Sequence[AnyBlock], role: str, index: int) -> None:
    for block in said:
        if not isinstance(block, (TextBlock, ImageBlock, DocumentBlock)):
            raise InvalidRequest(
                f"'messages[{index}]' with the role '{role}' has a block of type '{_type_of(block)}', which is the "
                f"assistant's.",
                param=f"messages[{index}].content",
            )


def _type_of(block: AnyBlock) -> str:
    return str(block.__struct_config__.tag)


def _result(block: ToolResultBlock) -> Message:
    given = block.content
    content = given if isinstance(given, str) else _content(list(given or ()))
    if block.is_error and isinstance(content, str):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _content(blocks: list[Any]) -> str | list[Message]:
    """Texts alone are one text, which every template takes."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return "\n".join(_text(block) for block in blocks)
    return [_part(block) for block in blocks]


def _text(block: TextBlock | DocumentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    return "\n".join(text for text in (block.title, block.context, block.source.data) if text)


def _part(block: TextBlock | DocumentBlock | ImageBlock) -> Message:
    if not isinstance(block, ImageBlock):
        return {"type": "text", "text": _text(block)}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}
