"""Owns: what a request of the Responses API may say, and the chat request it comes to.

What this server does not do is refused by name, never passed over; what is taken without an effect is said in
docs/api.md. Knows no store and no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from laya.errors import InvalidRequest, NotSupported
from laya.gateway.fields import read_fields, without_nulls
from laya.gateway.responses_items import Item, messages_of, read_items
from laya.gateway.tool_choice import function_tool

LOGPROBS = "message.output_text.logprobs"
_TYPES = {"tools": ["function (a tool that the client runs)"]}
_INSTEAD = {
    "background": "send it again without 'background', and read its answer as a stream if it takes long",
    "conversation": "use 'previous_response_id'",
    "prompt": "send the prompt itself as 'instructions' and 'input'",
    "max_tool_calls": "it is for tools that a server runs, and this one runs none",
    "context_management": "use 'truncation'",
    "moderation": "this server moderates nothing",
    "prompt_cache_options": "engines keep their cache by themselves",
}


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the client runs."""

    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Format(msgspec.Struct, forbid_unknown_fields=True):
    """What form the text of the answer has."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class Text(msgspec.Struct, forbid_unknown_fields=True):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class Create(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[Any] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: Literal[False] | None = None
    keep_alive: float | str | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the turn is stored: unless the request says no."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def read_create(body: bytes) -> tuple[Create, list[Item]]:
    """A request and its input items. Raises InvalidRequest, NotSupported naming the field and the value."""
    asked = read_fields(body, Create, "/v1/responses", instead=_INSTEAD, types=_TYPES)
    _check_format(asked)
    return asked, read_items(asked.input)


def _check_format(asked: Create) -> None:
    form = asked.text.format if asked.text is not None else None
    if form is not None and form.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(form, name) is None:
                raise InvalidRequest(f"'text.format.{name}' is missing.", param=f"text.format.{name}")


def chat_of(asked: Create, history: list[Item], items: list[Item], *, session: str | None) -> dict[str, Any]:
    """The chat request. `history`: the items of the turns before; `session`: keeps a conversation at one engine."""
    body: dict[str, Any] = {
        "messages": messages_of(asked.instructions, [*history, *items]),
        "model": asked.model,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "max_completion_tokens": asked.max_output_tokens,
        "response_format": _response_format(asked),
        "parallel_tool_calls": asked.parallel_tool_calls if asked.tools else None,
        "user": asked.safety_identifier or asked.user,
        "prompt_cache_key": asked.prompt_cache_key or session,
    }
    if asked.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        effort = asked.reasoning.effort
        body["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if asked.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= _tools(asked)
    return without_nulls(body)


def _response_format(asked: Create) -> dict[str, Any] | None:
    form = asked.text.format if asked.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": form.name, "schema": form.schema, "description": form.description, "strict": form.strict}
    return {"type": "json_schema", "json_schema": without_nulls(schema)}


def _tools(asked: Create) -> dict[str, Any]:
    """Tools and the choice among them. A named tool is the only one told, and required, which every engine knows."""
    tools, choice = asked.tools or [], asked.tool_choice
    if isinstance(choice, dict):
        names, mode = _allowed(choice)
        known = {tool.name for tool in tools}
        for name in names:
            if name not in known:
                hint = f" 'tools' has: {', '.join(tool.name for tool in tools)}." if tools else " 'tools' is empty."
                raise InvalidRequest(f"'tool_choice' names the tool {name!r}, which is not there.{hint}",
                                     param="tool_choice")  # fmt: skip
        tools, choice = [tool for tool in tools if tool.name in names], mode
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest(f"'tool_choice' is {choice!r}: it is none, auto, required or a tool.", param="tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("'tool_choice' is 'required' and 'tools' is empty.", param="tool_choice")
    if not tools:
        return {}
    return {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": choice or "auto"}


def _chat_tool(tool: Tool) -> dict[str, Any]:
    return function_tool(tool.name, tool.description, tool.parameters, tool.strict)


def _allowed(choice: dict[str, Any]) -> tuple[set[str], str]:
    """The names that a choice of tools allows, and how: `auto` or `required`."""
    kind = choice.get("type")
    if kind == "function" and isinstance(choice.get("name"), str):
        return {choice["name"]}, "required"
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        names = {str(tool.get("name")) for tool in choice["tools"] if isinstance(tool, dict)}
        if names and choice.get("mode") in ("auto", "required"):
            return names, choice["mode"]
        raise InvalidRequest(
            "'tool_choice' of type 'allowed_tools' has a 'mode' (auto or required) and 'tools' with names.",
            param="tool_choice",
        )
    if kind in ("function", "allowed_tools"):
        raise InvalidRequest(f"'tool_choice' of type {kind!r} does not say which.", param="tool_choice")
    raise NotSupported(
        f"'tool_choice.type' is {kind!r}: this server takes 'function' and 'allowed_tools'.", param="tool_choice.type"
    )
