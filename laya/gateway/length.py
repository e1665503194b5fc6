"""Owns: how many tokens a prompt has, as far as it matters: whether it fits the context and what max_tokens may be.

A token never covers less than a byte, so the bytes of a body bound its tokens. Where the bound does not settle the
question, the engine's own tokenizer is asked, and the answer is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from laya.errors import ContextLengthExceeded, InvalidRequest
from laya.gateway.body import ChatHead, CompletionHead, EmbeddingHead, ParsedBody, RerankHead

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange


BYTES_A_TOKEN_MOST = 32  # of text, on average over a whole prompt: what packs more is no text


def must_count(exchange: Exchange, endpoint: Endpoint) -> bool:
    """Whether the bound from the prompt's bytes does not settle that it fits, so that tokens must be counted."""
    parsed, planned = exchange.parsed, endpoint.planned
    assert parsed is not None and planned is not None
    if exchange.prompt_tokens is not None:
        return False
    bound = parsed.prompt_bound_tokens + endpoint.template_bytes
    if not parsed.generates:
        return bound > planned.n_ubatch
    if planned.kv_unified:
        return True  # promising a shared pool bytes for tokens would leave most of it empty
    if parsed.max_tokens is None:
        # the engine's own end of context is ours only where its slot is not padded
        return bound > planned.max_seq_len or planned.slot_tokens != planned.max_seq_len
    return bound + parsed.max_tokens > planned.max_seq_len


def refuse_hopeless(exchange: Exchange, endpoint: Endpoint) -> None:
    """Raise ContextLengthExceeded for a text that no tokenizer brings into the context.

    The engine is not asked: reading a text takes it some sixty times the text's bytes, which nobody planned.
    """
    parsed, planned = exchange.parsed, endpoint.planned
    assert parsed is not None and planned is not None
    if endpoint.settings.mmproj is not None:
        return  # images are many bytes and few tokens
    limit = planned.max_seq_len if parsed.generates else planned.n_ubatch
    if len(parsed.data) <= limit * BYTES_A_TOKEN_MOST:
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
    exchange.prompt_tokens = n_tokens = await _count_tokens(endpoint, parsed)
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


async def _count_tokens(endpoint: Endpoint, parsed: ParsedBody) -> int:
    """Exact prompt tokens of one sequence (of the longest, where there are several prompts)."""
    pool = endpoint.pool
    assert pool is not None
    head = parsed.head
    if isinstance(head, ChatHead):
        body = parsed.edited({}, drop=("stream", "n"))
        status, answer = await pool.fetch("POST", "/v1/chat/completions/input_tokens", body)
        if status != 200:
            raise InvalidRequest(_message_of(answer))
        return int(msgspec.json.decode(answer)["input_tokens"])
    counts = [0]
    for text in _texts_of(head):
        if not isinstance(text, str):
            counts.append(len(text))
            continue
        request = msgspec.json.encode({"content": text, "add_special": True})
        status, answer = await pool.fetch("POST", "/tokenize", request)
        if status != 200:
            raise InvalidRequest(_message_of(answer))
        counts.append(len(msgspec.json.decode(answer)["tokens"]))
    return max(counts)


def _texts_of(head: object) -> list[Any]:
    """The prompts of a body that is not a chat: strings to be counted, or lists of token ids."""
    if isinstance(head, CompletionHead):
        given: Any = head.prompt
    elif isinstance(head, EmbeddingHead):
        given = head.input
    else:
        assert isinstance(head, RerankHead)
        return [head.query + (text if isinstance(text, str) else str(text)) for text in head.documents]
    if isinstance(given, str):
        return [given]
    return [given] if given and isinstance(given[0], int) else list(given)


def _message_of(answer: bytes) -> str:
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "the engine could not read the prompt"


def _param_of(parsed: ParsedBody) -> str:
    """The field of the body that is too long."""
    if isinstance(parsed.head, ChatHead):
        return "messages"
    return "prompt" if parsed.generates else "input"
