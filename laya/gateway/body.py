"""Owns: what a request body may say: its fields, their ranges, and the edit that turns it into the engine's body.

A body is decoded twice and never fully: once into a typed head that validates the fields Laya acts on (messages stay
undecoded but for their roles), once as `dict[str, Raw]` so that top-level fields are replaced without re-encoding the
rest. Knows nothing of sockets, models or engines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from laya.errors import InvalidRequest, LayaError, NotSupported
from laya.gateway.answer_format import Format
from laya.gateway.body_errors import check_elements, explained, not_json
from laya.gateway.decision import DecisionHead, check_decision
from laya.gateway.engine_fields import EngineFields, check_engine_fields
from laya.gateway.grammar import ToolHead, check_gbnf, check_tools
from laya.gateway.keep_alive import seconds_of
from laya.gateway.known_fields import not_done, not_read
from laya.gateway.tool_choice import ForcedCalls, allowed_alone, forced_calls, read_choice
from laya.routing import MOST_PREFIX_BYTES, prefix_blocks
from laya.types import EndpointKind

Raw: TypeAlias = msgspec.Raw

Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # what an engine holds one in: a larger one would wrap
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # an engine reads what is larger as no whole number
Texts: TypeAlias = str | list[str | TokenId | list[TokenId]]
ChoiceCount = Annotated[int, msgspec.Meta(ge=1, le=128)]
Role = Literal["system", "user", "assistant", "tool", "developer", "function"]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class MessageHead(msgspec.Struct):
    role: Role
    content: str | list[Raw] | None = None
    tool_calls: list[Raw] | None = None
    function_call: dict[str, Raw] | None = None


class RequestHead(EngineFields):
    """Fields that every generating endpoint shares."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: ChoiceCount | None = None
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | list[Raw] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    response_format: dict[str, Raw] | None = None
    keep_alive: float | str | None = None


class ChatHead(RequestHead):
    messages: Annotated[list[MessageHead], msgspec.Meta(min_length=1)] = msgspec.field(default_factory=list)
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[ToolHead] | None = None
    tool_choice: str | dict[str, Raw] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Raw] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None


class CompletionHead(RequestHead):
    prompt: Texts = ""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class EmbeddingHead(msgspec.Struct):
    input: Texts = ""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: TokenCount | None = None
    user: str | None = None
    keep_alive: float | str | None = None


class RerankHead(msgspec.Struct):
    query: str = ""
    documents: Annotated[list[str | dict[str, Raw]], msgspec.Meta(min_length=1)] = msgspec.field(default_factory=list)
    model: str | None = None
    top_n: TokenCount | None = None
    user: str | None = None
    keep_alive: float | str | None = None


Head: TypeAlias = ChatHead | CompletionHead | EmbeddingHead | RerankHead | DecisionHead

_DECODERS: dict[EndpointKind, msgspec.json.Decoder[Any]] = {
    EndpointKind.CHAT: msgspec.json.Decoder(ChatHead),
    EndpointKind.COMPLETION: msgspec.json.Decoder(CompletionHead),
    EndpointKind.EMBEDDING: msgspec.json.Decoder(EmbeddingHead),
    EndpointKind.RERANK: msgspec.json.Decoder(RerankHead),
    EndpointKind.DECISION: msgspec.json.Decoder(DecisionHead),
}
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ENCODER = msgspec.json.Encoder()
_REQUIRED = {
    EndpointKind.CHAT: "messages",
    EndpointKind.COMPLETION: "prompt",
    EndpointKind.EMBEDDING: "input",
    EndpointKind.RERANK: "documents",
    EndpointKind.DECISION: "questions",
}
TEXTS_LIMIT = 2048  # prompts, inputs or documents of one request, as at OpenAI
_LARGE = {
    EndpointKind.CHAT: ("messages", "tools", "logit_bias", "stop"),
    EndpointKind.COMPLETION: ("prompt", "logit_bias", "stop"),
    EndpointKind.EMBEDDING: ("input",),
    EndpointKind.RERANK: ("query", "documents"),
    EndpointKind.DECISION: ("state", "questions"),
}


class ParsedBody:
    """A validated request body. `prompt_bound_tokens` is an upper bound: a token never covers less than a byte."""

    _fields: dict[str, Raw] | None = None
    is_plain = False  # only members that the native core knows: see plain.py
    generates = False  # chat and completions: tokens are generated; the others only read
    wants_stream = False
    wants_usage_event = False
    max_tokens: int | None = None
    keep_alive_s: float | None = None  # for its model, where it asks for that
    n_choices = 1  # of each prompt
    n_seqs = 1
    n_texts = 1  # of what is only read: they take turns, and one sequence
    takes_turns = False  # of them, or its embeddings are to be cut
    has_tools = False  # that may be called
    forced: ForcedCalls | None = None  # what the answer must call
    not_done: LayaError | None = None  # what llama.cpp would pass over in silence; other engines may do it
    rewrites_calls = False  # the engine's events are not what the client is told
    n_top_logprobs: int | None = None  # alternatives to each token; None: no logprobs were asked for

    def __init__(self, kind: EndpointKind, data: bytes, head: Head) -> None:
        self.kind = kind
        self.data = data
        self.head = head
        self.model = head.model
        self.prompt_bound_tokens = len(data)
        if head.keep_alive is not None:
            self.keep_alive_s = seconds_of(head.keep_alive)
        self.session = head.user  # the conversation this belongs to, as far as the body says
        if isinstance(head, RequestHead):
            self._read_generating(head)
        elif isinstance(head, EmbeddingHead | RerankHead):
            self.n_texts = _prompt_count(head.input) if isinstance(head, EmbeddingHead) else len(head.documents)
            self.takes_turns = self.n_texts > 1 or getattr(head, "dimensions", None) is not None

    def _read_generating(self, head: RequestHead) -> None:
        self.generates = True
        self.session = head.prompt_cache_key or head.user
        if head.stream:
            self.wants_stream = True
            self.wants_usage_event = bool(head.stream_options and head.stream_options.include_usage)
        self.max_tokens = head.max_tokens or head.most_tokens
        self.n_choices = self.n_seqs = head.n or 1
        if isinstance(head, ChatHead):
            self.max_tokens = head.max_completion_tokens or self.max_tokens
            self.prompt_bound_tokens += 16 * len(head.messages)
            if head.logprobs:
                self.n_top_logprobs = head.top_logprobs or 0
        elif isinstance(head, CompletionHead):
            self.n_top_logprobs = head.logprobs
            self.n_seqs *= _prompt_count(head.prompt)

    def prefix_blocks(self) -> bytes:
        """The chained hashes of the prompt's beginning, to find the engine that has it; none where nothing is kept.

        Of a chat they are made from the tools, which a template renders first, and the messages, as they came; of a
        completion from the prompt. No more than the first 64 KiB are hashed.
        """
        if not self.generates:
            return b""
        fields = self.fields
        text = _open_end(fields[_REQUIRED[self.kind]])
        return prefix_blocks(bytes(fields["tools"]) + text if "tools" in fields else text)

    @property
    def fields(self) -> dict[str, Raw]:
        if self._fields is None:
            try:
                self._fields = _FIELDS.decode(self.data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:  # in a field that nobody has read so far
                raise not_json(error) from None
        return self._fields

    def edited(self, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> bytes:
        """The body with top-level fields replaced or dropped; everything else is passed on byte for byte."""
        fields: dict[str, Any] = dict(self.fields)
        for name in drop:
            fields.pop(name, None)
        fields.update(changes)
        return _ENCODER.encode(fields)

    def replace(self, changes: dict[str, Any]) -> None:
        """Go on as if the client had said so."""
        self.data = self.edited(changes)
        self._fields = None

    def forget(self) -> None:
        """Let go of what is large: the engine has it."""
        self.data, self._fields = b"", None
        for name in _LARGE[self.kind]:
            setattr(self.head, name, None)


def _open_end(raw: Raw) -> bytes:
    """A JSON array or string without what closes it: what the conversation's next turn begins with."""
    return bytes(memoryview(raw)[: 2 * MOST_PREFIX_BYTES])[:-1].rstrip(b" \n\r\t")


def _prompt_count(prompt: str | list[Any]) -> int:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def parse_body(kind: EndpointKind, data: bytes) -> ParsedBody:
    """Decode and validate. Raises InvalidRequest that names the field and the value."""
    check_elements(data)
    try:
        head = _DECODERS[kind].decode(data)
    except msgspec.ValidationError as error:
        raise explained(error, data) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error, data) from None
    required = _REQUIRED[kind]
    if not getattr(head, required):
        raise InvalidRequest(f"'{required}' is missing or empty.", param=required)
    if isinstance(head, ChatHead):
        _check_messages(head.messages)
    else:
        n_texts = _prompt_count(getattr(head, required))
        if n_texts > TEXTS_LIMIT:
            raise InvalidRequest(f"'{required}' has {n_texts} texts; one request takes {TEXTS_LIMIT}.", param=required)
    if isinstance(head, CompletionHead | EmbeddingHead):
        _check_texts(required, getattr(head, required))
    if isinstance(head, CompletionHead):
        _check_completion(head)
    elif isinstance(head, DecisionHead):
        check_decision(head)
    parsed = ParsedBody(kind, data, head)
    if isinstance(head, RequestHead):
        _check_stop(head.stop)
        check_engine_fields(head)
        parsed.not_done = not_done(parsed.fields, head.__struct_fields__, is_chat=kind is EndpointKind.CHAT)
        _check_grammars(parsed, head)
    elif isinstance(head, (EmbeddingHead, RerankHead)):
        path = "/v1/embeddings" if isinstance(head, EmbeddingHead) else "/v1/rerank"
        parsed.not_done = not_read(parsed.fields, head.__struct_fields__, path)
    return parsed


def _check_texts(name: str, given: str | list[Any]) -> None:
    """A list is one of token ids, or of prompts that are texts or such lists themselves, none of them empty."""
    if isinstance(given, str):
        return
    n_ids = sum(isinstance(each, int) for each in given)
    if n_ids:
        if n_ids < len(given):
            raise InvalidRequest(f"'{name}' has token ids beside texts or lists: say one list of ids.", param=name)
        return
    for index, each in enumerate(given):
        if not each:
            raise InvalidRequest(f"'{name}[{index}]' is empty.", param=f"{name}[{index}]")


def _check_stop(stop: str | list[str] | None) -> None:
    if stop == "" or (isinstance(stop, list) and "" in stop):
        raise InvalidRequest("'stop' has an empty text, which every answer begins with: leave it out.", param="stop")


def _check_grammars(parsed: ParsedBody, head: RequestHead) -> None:
    for name in ("response_format", "json_schema"):
        if getattr(head, name) is not None:
            held = Format(name, parsed.fields[name])
            parsed.not_done = held.not_held or parsed.not_done
            if held.is_changed:
                parsed.replace({name: held.value})
    if head.grammar:
        check_gbnf("grammar", head.grammar)
    if isinstance(head, ChatHead):
        _read_tools(parsed, head)


def _read_tools(parsed: ParsedBody, head: ChatHead) -> None:
    """Which tools may or must be called. Those that a choice leaves out where calls are free are not told."""
    if head.functions or head.function_call:
        raise NotSupported("'functions' and 'function_call' are not supported: use 'tools' and 'tool_choice'.",
                           param="functions")  # fmt: skip
    raw_choice = parsed.fields["tool_choice"] if head.tool_choice is not None else None
    mode, names = read_choice(raw_choice, head.tools or [])
    if not head.tools or mode == "none":
        return
    parsed.has_tools = True
    parsed.rewrites_calls = mode == "required" or bool(head.stop)
    if mode == "required":
        for name in ("grammar", "json_schema"):
            if getattr(head, name):
                raise InvalidRequest(f"'{name}' can't be kept to where 'tool_choice' asks for a call.", param=name)
        # several only where a client says so: a small model that may go on repeats itself
        may_be_several = bool(head.parallel_tool_calls) and (names is None or len(names) > 1)
        parsed.forced = forced_calls(parsed.fields["tools"], names, parallel=may_be_several)
        return
    if names is not None:
        told = allowed_alone(parsed.fields["tools"], names)
        parsed.replace({"tools": told, "tool_choice": "auto"})
    check_tools(parsed.fields["tools"])


def _check_messages(messages: list[MessageHead]) -> None:
    for index, message in enumerate(messages):
        if message.content is None and (
            message.role != "assistant" or not (message.tool_calls or message.function_call)
        ):
            raise InvalidRequest(
                f"messages[{index}] with role '{message.role}' has no content.", param=f"messages[{index}].content"
            )


def _check_completion(head: CompletionHead) -> None:
    if head.echo:
        raise InvalidRequest("'echo' is not supported: engines here give no logprobs of the prompt.", param="echo")
    if head.suffix:
        raise InvalidRequest("'suffix' is not supported on this endpoint.", param="suffix")
    n_answers = (head.n or 1) * _prompt_count(head.prompt)
    if n_answers > TEXTS_LIMIT:
        raise InvalidRequest(f"'n' times the prompts is {n_answers}; one request takes {TEXTS_LIMIT}.", param="n")
    if head.best_of is not None and head.best_of > (head.n or 1):
        raise InvalidRequest(f"'best_of' ({head.best_of}) above 'n' is not supported.", param="best_of")
