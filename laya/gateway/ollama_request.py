"""Owns: what a request of Ollama's API may say, and the request of this server's own API that it comes to.

What this server does not do is refused by name, never passed over; options that only decide how a model is loaded are
taken and told to be without effect, since the plan decides that. Knows no engine.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Annotated, Any, Literal

import msgspec

from laya.errors import InvalidRequest
from laya.gateway.answer_format import schema_alone
from laya.gateway.assemble import encode
from laya.gateway.body import Fraction, Penalty, Seed, Temperature
from laya.gateway.engine_fields import Share, Window
from laya.gateway.fields import read_fields, shown, without_nulls

_AS_IT_IS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "repeat_penalty", "repeat_last_n",
    "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
_OF_LOADING = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "penalize_newline", "num_keep", "tfs_z",
)  # fmt: skip
_INSTEAD = {
    "template": "set `chat_template` of the model in the config",
    "context": "send the turns before as messages of /api/chat",
    "suffix": "put what comes after into the prompt, in the form that the model knows",
    "width": "this server makes no images",
    "height": "this server makes no images",
    "steps": "this server makes no images",
    "shift": "no context is shifted; 'truncate': true drops the oldest turns of a chat",
}
_NOTHING: tuple[Any, ...] = ("", [])  # clients send empty texts and lists for what nobody said


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Ollama's options. Ranges are checked where they are acted on."""

    num_ctx: Annotated[int, msgspec.Meta(ge=1)] | None = None
    num_predict: Annotated[int, msgspec.Meta(le=2**31 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    seed: Seed | None = None
    stop: list[str] | str | None = None
    repeat_penalty: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    repeat_last_n: Window | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Annotated[int, msgspec.Meta(ge=0, le=2)] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    numa: bool | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: int | None = None
    penalize_newline: bool | None = None
    tfs_z: float | None = None

    def without_effect(self) -> list[str]:
        """Those that are said and change nothing."""
        return [name for name in _OF_LOADING if getattr(self, name) is not None]


class Function(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    function: Function
    id: str | None = None
    type: Literal["function"] | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all requests to a model may say."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    options: Options | None = None
    keep_alive: float | str | None = None


class Generating(Asked, forbid_unknown_fields=True, kw_only=True):
    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: Literal[False] | None = None


class Chat(Generating, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[Message] = []
    tools: list[dict[str, Any]] | None = None


class Generate(Generating, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class Embed(Asked, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed. A text that is too long is refused, whatever `truncate` says."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


class EmbedOne(Asked, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings, the older form."""

    prompt: str


def read_chat(body: bytes) -> Chat:
    return read_fields(body, Chat, "/api/chat", instead=_INSTEAD, nothing=_NOTHING)


def read_generate(body: bytes) -> Generate:
    return read_fields(body, Generate, "/api/generate", instead=_INSTEAD, nothing=_NOTHING)


def chat_of(asked: Chat) -> dict[str, Any]:
    """The chat request of /api/chat."""
    body = {"messages": _messages(asked.messages), "tools": asked.tools or None}
    return without_nulls(body | _common(asked))


def chat_of_generate(asked: Generate) -> dict[str, Any]:
    """The chat request of /api/generate: one turn."""
    system = [Message(role="system", content=asked.system)] if asked.system else []
    turn = Message(role="user", content=asked.prompt, images=asked.images)
    return without_nulls({"messages": _messages([*system, turn])} | _common(asked))


def completion_of(asked: Generate) -> dict[str, Any]:
    """The completion of /api/generate with `raw`: no template."""
    for name in ("system", "images", "think"):
        if getattr(asked, name):
            raise InvalidRequest(f"'{name}' has no place in a prompt that is 'raw'.", param=name)
    logprobs = {"logprobs": asked.top_logprobs or 0 if asked.logprobs else None, "top_logprobs": None}
    body = _common(asked)
    given = body.pop("response_format")  # of chats alone
    schema = schema_alone(given) if given else None
    return without_nulls({"prompt": asked.prompt, "json_schema": schema} | body | logprobs)


def _common(asked: Generating) -> dict[str, Any]:
    options = asked.options or Options()
    body: dict[str, Any] = {name: getattr(options, name) for name in _AS_IT_IS}
    body |= {
        "model": asked.model,
        "max_tokens": _most_tokens(options),
        "response_format": _response_format(asked.format),
        "logprobs": asked.logprobs,
        "top_logprobs": asked.top_logprobs if asked.logprobs else None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if asked.think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": asked.think is not False}
        if isinstance(asked.think, str):
            body["chat_template_kwargs"]["reasoning_effort"] = asked.think
    return body


def _most_tokens(options: Options) -> int | None:
    """`num_predict`: -1 and -2 are as many as the context holds."""
    if options.num_predict in (None, -1, -2):
        return None
    assert options.num_predict is not None
    if options.num_predict < 1:
        raise InvalidRequest(
            f"'options.num_predict' is {options.num_predict}: it is 1 or more, or -1 for no limit.",
            param="options.num_predict",
        )
    return options.num_predict


def _response_format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given, "strict": True}}
    if given and given != "json":
        raise InvalidRequest(f"'format' is {shown(given)}: it is \"json\" or a JSON schema.", param="format")
    return {"type": "json_object"} if given else None


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Chat messages. Results follow their calls in order where no id says whose they are."""
    out: list[dict[str, Any]] = []
    waiting = _Waiting([])
    for message in messages:
        told: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.tool_calls:
            calls = [_call(call, len(out), index) for index, call in enumerate(message.tool_calls)]
            waiting = _Waiting(calls)
            told |= {"tool_calls": calls, "content": told["content"] or None}
        elif message.role == "tool":
            told["tool_call_id"] = message.tool_call_id or waiting.take(message.tool_name)
        out.append(told)
    return out


def _call(call: Call, place: int, index: int) -> dict[str, Any]:
    arguments = encode(call.function.arguments).decode()
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or f"call_{place}_{index}", "type": "function", "function": function}


class _Waiting:
    """The calls of a message that have no result so far. To take one costs the same, however many there are."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._ids = OrderedDict(enumerate(call["id"] for call in calls))  # by their place
        self._places: defaultdict[str, deque[int]] = defaultdict(deque)  # by their name, taken ones among them
        for place, call in enumerate(calls):
            self._places[call["function"]["name"]].append(place)

    def take(self, name: str | None) -> str:
        """The id of the next one of this name, or of any name."""
        places = self._ids if name is None else self._places.get(name, deque())
        while isinstance(places, deque) and places and places[0] not in self._ids:
            places.popleft()
        place = next(iter(places), None)
        return self._ids.pop(place) if place is not None else f"call_{name or 'unknown'}"


def _content(message: Message) -> str | list[dict[str, Any]]:
    if not message.images:
        return message.content or ""
    images = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message.images]
    return [*([{"type": "text", "text": message.content}] if message.content else []), *images]


_MAGIC = {"/9j/": "jpeg", "iVBORw0KGgo": "png", "R0lGOD": "gif", "UklGR": "webp"}  # in base64


def _data_url(image: str) -> str:
    kind = next((kind for start, kind in _MAGIC.items() if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{image}"
