"""Owns: what an engine is sent for a request: the client's body with what Laya decides set in it.

Model, sampling defaults of the config, the ceiling of tokens, and a stream where the engine needs one. The rest is
passed on byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laya.gateway.body import CompletionHead, ParsedBody, RequestHead
from laya.gateway.engine_fields import look_back
from laya.gateway.known_fields import UNREAD_FIELDS
from laya.gateway.tool_choice import NOT_BESIDE_CALLS, fields_of

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange

# what Laya asks of every stream: usage and prefill progress, both taken out again before the client
_STREAM_FIELDS = {"stream": True, "stream_options": {"include_usage": True}}
_PROGRESS = {"return_progress": True}


def engine_body(exchange: Exchange, endpoint: Endpoint) -> bytes:
    """The client's body with what Laya decides set in it."""
    parsed, planned, pool = exchange.parsed, endpoint.planned, endpoint.pool
    assert parsed is not None and planned is not None and pool is not None
    is_plain = parsed.is_plain and endpoint.passes_plain and parsed.model == endpoint.model_id
    if is_plain and not parsed.wants_stream and parsed.max_tokens is None and exchange.prompt_tokens is None:
        return parsed.data  # nothing is to be set in it
    head = parsed.head
    model = pool.address.model or endpoint.model_id
    changes: dict[str, Any] = {"model": model}
    is_split = exchange.turns is not None and exchange.turns.is_split
    if exchange.turns is not None and is_split:
        changes[exchange.turns.field] = exchange.turns.prompts_now()
    if not parsed.generates:  # of a list that goes in turns, the best are known when all are ranked
        return parsed.edited(changes, drop=("keep_alive", "top_n") if is_split else ("keep_alive",))
    for name, value in endpoint.settings.defaults.items():
        if name not in parsed.fields:
            changes[name] = value
    if not endpoint.is_llamacpp:
        return _for_others(exchange, endpoint, parsed, changes)
    if isinstance(head, RequestHead):
        changes |= look_back(head, changes, planned.max_seq_len)
    drop: tuple[str, ...] = ("max_completion_tokens", "n_predict")
    if not parsed.is_plain:
        drop += UNREAD_FIELDS
    if parsed.forced is not None:
        changes = {name: value for name, value in changes.items() if name not in NOT_BESIDE_CALLS}
        changes |= fields_of(parsed.forced)
        drop += NOT_BESIDE_CALLS
    is_rewritten = parsed.rewrites_calls or parsed.n_top_logprobs is not None or is_split
    if parsed.wants_stream or is_rewritten or not pool.address.cancels_whole:
        changes |= _STREAM_FIELDS | _PROGRESS
    if endpoint.slots is not None:
        changes |= endpoint.slots.fields_for(exchange, endpoint.live)
    max_tokens = parsed.max_tokens
    if max_tokens is None and planned.is_pool_short:
        max_tokens = endpoint.settings.default_max_tokens
        if exchange.prompt_tokens is not None:
            max_tokens = min(max_tokens, planned.max_seq_len - exchange.prompt_tokens)
        line = b"x-laya-max-tokens: %d\r\n" % max_tokens
        if line not in exchange.extra_headers:  # a list of prompts comes here once for each turn
            exchange.extra_headers.append(line)
    elif max_tokens is None and exchange.prompt_tokens is not None:
        max_tokens = planned.max_seq_len - exchange.prompt_tokens
    if max_tokens is not None:
        changes["max_tokens"] = max_tokens
    if parsed.n_top_logprobs == 0 and parsed.forced is None:
        # the engine takes 0 for none at all, and nothing for 20; the extra one is dropped again
        changes["logprobs" if isinstance(head, CompletionHead) else "top_logprobs"] = 1
    return parsed.edited(changes, drop=drop)


def _for_others(exchange: Exchange, endpoint: Endpoint, parsed: ParsedBody, changes: dict[str, Any]) -> bytes:
    """For an engine that knows OpenAI's API and may refuse what is not in it: the rest goes as the client said it."""
    assert endpoint.pool is not None
    if parsed.wants_stream or "prompt" in changes or not endpoint.pool.address.cancels_whole:
        changes |= _STREAM_FIELDS
    drop: tuple[str, ...] = ("keep_alive",)
    if exchange.has_default_length and parsed.max_tokens is not None:
        changes["max_tokens"] = parsed.max_tokens
    elif endpoint.settings.engine == "vllm" and (parsed.max_tokens or 0) > _window(endpoint):
        # vLLM itself lowers what the prompt leaves no room for, and refuses only what is above its whole window
        changes["max_tokens"] = _window(endpoint)
        drop += ("max_completion_tokens",)
        exchange.extra_headers.append(b"x-laya-max-tokens: %d\r\n" % _window(endpoint))
    return parsed.edited(changes, drop=drop)


def _window(endpoint: Endpoint) -> int:
    assert endpoint.planned is not None
    return endpoint.planned.max_seq_len
