"""Owns: which way an engine's answer goes to the client: by what was asked for, and by what the engine knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.gateway.body import ChatHead
from laya.gateway.relay import AssembledAnswer, RawAnswer, Relay, StreamRelay, usage_of
from laya.gateway.relay_others import OtherAnswer, OtherStream, RemoteStream, WholeAnswer
from laya.gateway.sse import StreamFilter
from laya.gateway.tool_events import CallFilter, calls_of

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.exchange import Exchange
    from laya.types import EngineAddress


def relay_for(exchange: Exchange) -> Relay:
    """The way this exchange's answer goes."""
    parsed, endpoint = exchange.parsed, exchange.endpoint
    assert parsed is not None and endpoint is not None and endpoint.pool is not None
    if exchange.turns is not None and exchange.turns.is_rewritten:
        own_name = endpoint.model_id if endpoint.pool.address.renames else None
        streams = parsed.wants_stream and endpoint.settings.enable_streaming
        return exchange.turns.relay(streams=streams, own_name=own_name)
    if endpoint.pool.address.dialect == "openai":
        return relay_for_others(exchange, parsed, endpoint.pool.address)
    if not parsed.generates:
        return RawAnswer(exchange)
    if parsed.wants_stream and endpoint.settings.enable_streaming:
        usage, wants_usage = usage_of(parsed), parsed.wants_usage_event
        if (calls := calls_of(parsed)) is not None:
            return StreamRelay(exchange, CallFilter(usage, calls, wants_usage=wants_usage))
        n_top, is_chat = parsed.n_top_logprobs, isinstance(parsed.head, ChatHead)
        events = StreamFilter(usage, wants_usage=wants_usage, n_top_logprobs=n_top, is_chat=is_chat)
        return StreamRelay(exchange, events)
    is_rewritten = parsed.rewrites_calls or parsed.n_top_logprobs is not None
    if not parsed.wants_stream and not is_rewritten and endpoint.pool.address.cancels_whole:
        return RawAnswer(exchange)
    return AssembledAnswer(exchange)


def relay_for_others(exchange: Exchange, parsed: ParsedBody, address: EngineAddress) -> Relay:
    """The way of an answer in OpenAI's own words, as its engine holds to them itself: calls and logprobs pass as they
    are. Where the engine calls the model by another name, the client reads Laya's."""
    assert exchange.endpoint is not None
    own_name = exchange.endpoint.model_id if address.renames else None
    if parsed.generates and parsed.wants_stream and exchange.endpoint.settings.enable_streaming:
        wants_usage = parsed.wants_usage_event
        events = StreamFilter(usage_of(parsed), wants_usage=wants_usage, own_name=own_name)
        return RemoteStream(exchange, events) if address.is_remote else OtherStream(exchange, events)
    if not parsed.generates or (not parsed.wants_stream and address.cancels_whole):
        return RawAnswer(exchange) if own_name is None else WholeAnswer(exchange, own_name)
    return OtherAnswer(exchange, own_name)
