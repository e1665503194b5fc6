"""Owns: how many tokens a prompt has, as far as it matters: whether it fits the context and what max_tokens may be.

A token never covers less than a byte, so the bytes of a body bound its tokens. Where the bound does not settle the
question, the engine's own tokenizer is asked, and the answer is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from laya.errors import ContextLengthExceeded, InvalidRequest
from laya.gateway.body import ChatHead, CompletionHead, EmbeddingHead, MessageHead, ParsedBody, RerankHead, parse_body
from laya.gateway.decision import DecisionHead, longest_text
from laya.gateway.known_fields import UNREAD_FIELDS
from laya.gateway.trim import answer_tokens, fewest_dropped
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange


class _Part(msgspec.Struct):
    type: str | None = None


_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGES = msgspec.json.Decoder(list[MessageHead])
# of a chat's body: what is no part of its prompt, and may be large
NOT_OF_THE_PROMPT = ("stream", "stream_options", "n", "stop", "logit_bias", "user", "prompt_cache_key", *UNREAD_FIELDS)
# of a chat: with these its template may write more than was measured
TEMPLATE_FIELDS = ("tools", "functions", "chat_template_kwargs", "reasoning_effort", "response_format")
_MARKS = 16  # tokens that a tokenizer puts before and after a text
_ENVELOPE_BYTES = 256  # of a body, around its messages
_PART = msgspec.json.Decoder(_Part)
BYTES_A_TOKEN_MOST = 32  # of text, on average over a whole prompt: what packs more is no text
COUNTED_BYTES_LEAST = 4096 * BYTES_A_TOKEN_MOST  # so a coding agent's first request is, however small the window


def prompt_bound_tokens(parsed: ParsedBody, endpoint: Endpoint) -> int:
    """Of one prompt, with what this engine's chat template may add to it."""
    head = parsed.head
    if isinstance(head, CompletionHead | EmbeddingHead):
        template_tokens = _MARKS  # text is taken as it is
    elif isinstance(head, ChatHead) and all(getattr(head, name) is None for name in TEMPLATE_FIELDS):
        template_tokens = endpoint.plain_template_tokens
    else:
        template_tokens = endpoint.template_tokens
    return parsed.prompt_bound_tokens + template_tokens


def must_count(exchange: Exchange, endpoint: Endpoint) -> bool:
    """Whether the bound from the prompt's bytes does not settle that it fits, so that tokens must be counted."""
    parsed, planned = exchange.parsed, endpoint.planned
    assert parsed is not None and planned is not None
    if exchange.prompt_tokens is not None or not endpoint.is_llamacpp:
        return False  # known, or nobody could be asked: the engine itself says what is too long
    bound = prompt_bound_tokens(parsed, endpoint)
    if not parsed.generates:
        return bound > planned.n_ubatch
    if _may_trim(exchange, endpoint) and bound + _for_answer(parsed, endpoint) > planned.max_seq_len:
        return True
    if planned.is_pool_short:
        return True  # promising a shared pool bytes for tokens would leave most of it empty
    if parsed.max_tokens is None:
        # the engine's own end of context is ours only where its slot is not padded
        return bound > planned.max_seq_len or planned.slot_tokens != planned.max_seq_len
    return bound + parsed.max_tokens > planned.max_seq_len


def refuse_hopeless(exchange: Exchange, endpoint: Endpoint) -> None:
    """Raise ContextLengthExceeded for a text that no tokenizer brings into the context.

    The engine is not asked: reading a text takes it many times the text's bytes, which nobody planned.
    """
    parsed, planned = exchange.parsed, endpoint.planned
    assert parsed is not None and planned is not None
    if endpoint.settings.mmproj is not None:
        return  # images are many bytes and few tokens
    limit = planned.max_seq_len if parsed.generates else planned.n_ubatch
    counted_bytes = max(limit * BYTES_A_TOKEN_MOST, COUNTED_BYTES_LEAST)
    if len(parsed.data) <= counted_bytes or _may_trim(exchange, endpoint):
        return
    if isinstance(parsed.head, ChatHead):
        n_bytes = sum(len(bytes(parsed.fields[name])) for name in ("messages", "tools") if name in parsed.fields)
    else:
        n_bytes = max((len(text) for text in _texts_of(parsed.head) if isinstance(text, str)), default=0)
    at_least = n_bytes // BYTES_A_TOKEN_MOST
    if at_least > limit:
        raise ContextLengthExceeded(limit, at_least, param=_param_of(parsed))


async def settle_length(exchange: Exchange, endpoint: Endpoint) -> None:
    """Count the prompt; lower max_tokens to what the context still holds. Raises ContextLengthExceeded."""
    parsed, planned = exchange.parsed, endpoint.planned
    assert parsed is not None and planned is not None
    if _may_trim(exchange, endpoint):
        n_tokens = await _trimmed(exchange, endpoint)
    else:
        n_tokens = await count_tokens(endpoint, parsed)
    exchange.prompt_tokens = n_tokens
    parsed = exchange.parsed  # a shorter one, where it was trimmed
    assert parsed is not None
    if not parsed.generates:
        if n_tokens > planned.n_ubatch:
            raise ContextLengthExceeded(planned.n_ubatch, n_tokens, param=_param_of(parsed))
        return
    room = planned.max_seq_len - n_tokens
    if room <= 0:
        raise ContextLengthExceeded(planned.max_seq_len, n_tokens, param=_param_of(parsed))
    if parsed.max_tokens is not None and parsed.max_tokens > room:
        exchange.extra_headers.append(b"x-laya-max-tokens: %d\r\n" % room)
        parsed.max_tokens = room


def _may_trim(exchange: Exchange, endpoint: Endpoint) -> bool:
    return (endpoint.settings.overflow == "trim" or exchange.may_trim) and exchange.kind == EndpointKind.CHAT


def _for_answer(parsed: ParsedBody, endpoint: Endpoint) -> int:
    assert endpoint.planned is not None
    return answer_tokens(parsed.max_tokens, endpoint.settings.default_max_tokens, endpoint.planned.max_seq_len)


async def _trimmed(exchange: Exchange, endpoint: Endpoint) -> int:
    """Drop the oldest turns as far as need be, and say so; gives the tokens that are left.

    Raises ContextLengthExceeded where what must stay is more than any tokenizer brings into the context.
    """
    parsed, planned = exchange.parsed, endpoint.planned
    assert parsed is not None and planned is not None
    raw = _RAW_LIST.decode(parsed.fields["messages"])
    sizes = [len(bytes(message)) for message in raw]
    pool = endpoint.pool
    assert pool is not None
    rest_bytes = _counted_bytes(parsed) - sum(sizes)  # tools
    most_bytes = max(0, pool.counting.most_bytes - rest_bytes - len(sizes) - _ENVELOPE_BYTES)
    limit_bytes = min(planned.max_seq_len * BYTES_A_TOKEN_MOST, most_bytes)

    def without(dropped: Sequence[int]) -> dict[str, Any]:
        gone = set(dropped)
        return {"messages": [message for index, message in enumerate(raw) if index not in gone]}

    async def count(dropped: Sequence[int]) -> int:
        n_bytes = sum(sizes) - sum(sizes[index] for index in dropped)
        if n_bytes > planned.max_seq_len * BYTES_A_TOKEN_MOST and endpoint.settings.mmproj is None:
            return n_bytes // BYTES_A_TOKEN_MOST  # the engine is not asked for what is hopeless
        return await count_tokens(endpoint, parsed, without(dropped))

    dropped, n_tokens = await fewest_dropped(
        _MESSAGES.decode(parsed.fields["messages"]),
        sizes,
        limit_bytes=limit_bytes,
        limit_tokens=planned.max_seq_len - _for_answer(parsed, endpoint),
        count=count,
    )
    if dropped:
        trimmed = exchange.parsed = parse_body(exchange.kind, parsed.edited(without(dropped)))
        trimmed.max_tokens = parsed.max_tokens
        exchange.extra_headers.append(b"x-laya-trimmed: %d\r\n" % len(dropped))
    return n_tokens


async def count_tokens(endpoint: Endpoint, parsed: ParsedBody, changes: dict[str, Any] | None = None) -> int:
    """Exact prompt tokens of one sequence (of the longest, where there are several prompts).

    Raises InvalidRequest for more text than the engine is given to count.
    """
    pool = endpoint.pool
    assert pool is not None
    head, counting = parsed.head, pool.counting
    if isinstance(head, ChatHead):
        body = parsed.edited(changes or {}, drop=NOT_OF_THE_PROMPT)
        n_bytes = len(body)
        if endpoint.settings.mmproj is not None and n_bytes > counting.most_bytes:
            n_bytes -= _image_bytes(parsed)
        counting.check(n_bytes, "The prompt", param="messages")
        status, answer = await counting.ask("/v1/chat/completions/input_tokens", body, n_bytes)
        if status != 200:
            raise InvalidRequest(message_of(answer))
        return int(msgspec.json.decode(answer)["input_tokens"])
    counts = [0]
    for text in _texts_of(head):
        if not isinstance(text, str):
            counts.append(len(text))
            continue
        request = msgspec.json.encode({"content": text, "add_special": True})
        counting.check(len(request), "The text", param=_param_of(parsed))
        status, answer = await counting.ask("/tokenize", request, len(request))
        if status != 200:
            raise InvalidRequest(message_of(answer))
        counts.append(len(msgspec.json.decode(answer)["tokens"]))
    return max(counts)


def _counted_bytes(parsed: ParsedBody) -> int:
    return sum(len(name) + len(bytes(raw)) for name, raw in parsed.fields.items() if name not in NOT_OF_THE_PROMPT)


def _image_bytes(parsed: ParsedBody) -> int:
    """Of the parts of messages that are no text."""
    parts = (
        bytes(part)
        for message in _MESSAGES.decode(parsed.fields["messages"])
        if isinstance(message.content, list)
        for part in message.content
    )
    return sum(len(part) for part in parts if _PART.decode(part).type in ("image_url", "input_audio"))


def _texts_of(head: object) -> list[Any]:
    """The prompts of a body that is not a chat: strings to be counted, or lists of token ids."""
    if isinstance(head, CompletionHead):
        given: Any = head.prompt
    elif isinstance(head, EmbeddingHead):
        given = head.input
    elif isinstance(head, DecisionHead):
        return [longest_text(head)]
    else:
        assert isinstance(head, RerankHead)
        return [head.query + (text if isinstance(text, str) else str(text)) for text in head.documents]
    if isinstance(given, str):
        return [given]
    return [given] if given and isinstance(given[0], int) else list(given)


def message_of(answer: bytes) -> str:
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "the engine could not read the prompt"


def _param_of(parsed: ParsedBody) -> str:
    """The field of the body that is too long."""
    if isinstance(parsed.head, ChatHead):
        return "messages"
    if isinstance(parsed.head, DecisionHead):
        return "state"
    return "prompt" if parsed.generates else "input"
