"""Owns: what a request of Anthropic's Messages API may say, and the chat request it comes to.

What this server does not do is refused by name, never passed over; what is taken without an effect is said in
docs/api.md. Knows no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from laya.errors import InvalidRequest, NotSupported
from laya.gateway.fields import read_fields, without_nulls
from laya.gateway.messages_blocks import AnyBlock, CacheControl, MessageParam, TextBlock, chat_messages
from laya.gateway.tool_choice import function_tool

_THINKING_EDITS = "clear_thinking_"
_INSTEAD = {
    "container": "this server runs no code; offer a tool of your own",
    "mcp_servers": "this server calls no other; offer their tools as 'tools', and call them yourself",
    "inference_geo": "this server is where it is",
    "fallbacks": "name pools of models in the config (routing.pools)",
    "thread": "send the whole conversation",
}
# SDKs that would have a server hold a conversation go on without that where an error says so in these words
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_Asked = TypeVar("_Asked", bound="Prompt")


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the client runs."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: list[dict[str, Any]] | None = None


class AutoChoice(msgspec.Struct, tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(msgspec.Struct, tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, tag="none", forbid_unknown_fields=True):
    pass


class Thinks(msgspec.Struct, tag="enabled", forbid_unknown_fields=True):
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)]
    display: Literal["summarized", "omitted"] | None = None


class ThinksAdaptively(msgspec.Struct, tag="adaptive", forbid_unknown_fields=True):
    display: Literal["summarized", "omitted"] | None = None


class ThinksNot(msgspec.Struct, tag="disabled", forbid_unknown_fields=True):
    pass


class Format(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class Edit(msgspec.Struct):
    type: str


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[Edit] = []


class Prompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], msgspec.Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Thinks | ThinksAdaptively | ThinksNot | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None


class Create(Prompt, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: dict[str, Any] | None = None
    keep_alive: float | str | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the client wants to read what the model thinks: unless it says no."""
        thinking = self.thinking
        return not isinstance(thinking, ThinksNot) and (thinking is None or thinking.display != "omitted")


_TYPES = {
    "content": [str(kind.__struct_config__.tag) for kind in get_args(AnyBlock)],
    "system": ["text"],
    "source": ["base64 or url of an image", "text of a document (no PDF)"],
    "tools": ["custom (a tool that the client runs)"],
    "tool_choice": ["auto", "any", "tool", "none"],
    "thinking": ["enabled", "adaptive", "disabled"],
    "format": ["json_schema"],
}


def read_create(body: bytes) -> Create:
    """A request. Raises InvalidRequest, NotSupported naming the field and the value."""
    asked = _read(body, Create, "/v1/messages")
    if asked.stop_sequences and any(not text.strip() for text in asked.stop_sequences):
        raise InvalidRequest("'stop_sequences' has one without a character to see.", param="stop_sequences")
    if isinstance(asked.thinking, Thinks) and asked.thinking.budget_tokens >= asked.max_tokens:
        raise InvalidRequest(
            f"'thinking.budget_tokens' is {asked.thinking.budget_tokens}: it is less than max_tokens "
            f"({asked.max_tokens}).",
            param="thinking.budget_tokens",
        )
    _check_edits(asked)
    return asked


def read_prompt(body: bytes) -> Prompt:
    """A request to count. Raises as `read_create`."""
    asked = _read(body, Prompt, "/v1/messages/count_tokens")
    _check_edits(asked)
    return asked


def _read(body: bytes, kind: type[_Asked], api: str) -> _Asked:
    try:
        return read_fields(body, kind, api, instead=_INSTEAD, types=_TYPES)
    except NotSupported as error:
        if error.param == "thread":
            error.details["details"] = _NO_THREADS
        raise


def _check_edits(asked: Prompt) -> None:
    """Thinking of turns before never reaches the model, so to clear it is done already."""
    for index, edit in enumerate(asked.context_management.edits if asked.context_management else ()):
        if not edit.type.startswith(_THINKING_EDITS):
            where = f"context_management.edits[{index}].type"
            raise NotSupported(
                f"'{where}' is '{edit.type}': this server edits no conversation; leave out what is too old.",
                param=where,
            )


def chat_of(asked: Prompt) -> dict[str, Any]:
    """The chat request; what decides its length, and where it is a `Create` what decides the answer."""
    body: dict[str, Any] = {"messages": chat_messages(asked.system, asked.messages), "model": asked.model}
    if not body["messages"]:
        raise InvalidRequest("'messages[0].content' is empty, and so are all others.", param="messages[0].content")
    body |= _tools(asked)
    output = asked.output_config or OutputConfig()
    kwargs: dict[str, Any] = {"reasoning_effort": output.effort} if output.effort else {}
    if asked.thinking is not None:
        kwargs["enable_thinking"] = not isinstance(asked.thinking, ThinksNot)
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    if output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(asked, Create):
        body |= _sampling(asked)
    return without_nulls(body)


def _sampling(asked: Create) -> dict[str, Any]:
    """Always a stream, so that a stop sequence is found as it comes; see `messages_turn.py`."""
    return {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "user": asked.metadata.user_id if asked.metadata else None,
        "keep_alive": asked.keep_alive,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings_per_token": True if asked.stop_sequences else None,
    }


def _tools(asked: Prompt) -> dict[str, Any]:
    """Tools and the choice among them. A named tool is the only one told, and required, which every engine knows."""
    tools, choice = asked.tools or [], asked.tool_choice
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            names = ", ".join(tool.name for tool in asked.tools or ()) or "none"
            raise InvalidRequest(
                f"'tool_choice.name' is '{choice.name}', which is not in 'tools'; there are: {names}.",
                param="tool_choice.name",
            )
    if isinstance(choice, AnyChoice) and not tools:
        raise InvalidRequest("'tool_choice.type' is 'any' and 'tools' is empty.", param="tool_choice.type")
    if not tools:
        return {}
    forced = isinstance(choice, (AnyChoice, ToolChoice))
    mode = "required" if forced else "none" if isinstance(choice, NoChoice) else "auto"
    body: dict[str, Any] = {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": mode}
    if isinstance(choice, (AutoChoice, AnyChoice, ToolChoice)) and choice.disable_parallel_tool_use is not None:
        body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return body


def _chat_tool(tool: Tool) -> dict[str, Any]:
    return function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
