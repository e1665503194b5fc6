"""Owns: how a request that the native core recognised whole becomes an exchange: what the parser's callbacks come to.

What the core did not recognise becomes one piece by piece, in `protocol.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.gateway.exchange import Exchange
from laya.gateway.heads import new_request_id
from laya.types import EndpointKind

if TYPE_CHECKING:
    from laya.gateway.protocol import LayaProtocol

_KINDS = {kind.value: kind for kind in EndpointKind}


def _exchange(connection: LayaProtocol, kind: EndpointKind, request_id: bytes | None) -> Exchange:
    exchange = Exchange(connection, connection.dispatcher, kind, http_1_0=False, keep_alive=True)
    exchange.request_id = request_id or new_request_id()
    exchange.body_complete = exchange.started = True
    connection.take_turn(exchange)
    return exchange


def begin_plain(
    connection: LayaProtocol,
    kind: int,
    body: bytes,
    host: bytes | None,
    authorization: bytes | None,
    request_id: bytes | None,
    session: str | None,
) -> None:
    """A plain request, head and body; its body is still to be read."""
    exchange = _exchange(connection, _KINDS[kind], request_id)
    exchange.header_session = session
    exchange.body = body
    exchange.dispatcher.arrive(exchange, authorization, [(b"host", host)] if host is not None else [])
    exchange.begin()


def go_straight(
    connection: LayaProtocol,
    data: bytes,
    index: int,
    request: bytes,
    routed_tokens: int,
    promised_tokens: int,
    route_s: float,
    host: bytes | None,
    authorization: bytes | None,
    request_id: bytes | None,
    wants_usage: bool | None,
) -> None:
    """A plain request that the native lane took: parsed, checked and routed to the endpoint of this index."""
    exchange = _exchange(connection, EndpointKind.CHAT, request_id)
    exchange.taken = data
    dispatcher = exchange.dispatcher
    dispatcher.arrive(exchange, authorization, [(b"host", host)] if host is not None else [])
    dispatcher.express.note(exchange, authorization, host, is_plain=not wants_usage)
    if exchange.early_error is None:
        dispatcher.dispatch_taken(exchange, index, request, routed_tokens, promised_tokens, route_s, wants_usage)
    else:
        dispatcher.fleet.health.give_back(dispatcher.fleet.endpoints[index], 1, routed_tokens)
        exchange.fail(exchange.early_error)
