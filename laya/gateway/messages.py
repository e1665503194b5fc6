"""Owns: Anthropic's Messages API on every engine: a request becomes a chat, the chat's answer a message.

What a request may say is `messages_request.py`, how an answer is told `messages_turn.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.errors import InvalidRequest
from laya.gateway.desk import reply
from laya.gateway.envelopes import MESSAGES, anthropic_body
from laya.gateway.inner import Inner, InnerExchange, Piece, sse
from laya.gateway.messages_request import chat_of, read_create, read_prompt
from laya.gateway.messages_turn import PING, Event, Turn, event_text
from laya.gateway.tokens import Tokenizers
from laya.types import EndpointKind

_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")


class MessagesApi:
    """The handlers."""

    def __init__(self, inner: Inner, tokenizers: Tokenizers) -> None:
        self._inner = inner
        self._tokenizers = tokenizers

    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES, self.create, methods=["POST"]),
            Route(MESSAGES + "/count_tokens", self.count, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.CHAT, functools.partial(self._answer, request))

    async def count(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.CHAT, functools.partial(self._count, request))

    async def _count(self, request: Request, exchange: InnerExchange, body: bytes) -> Response:
        _check_version(request)
        asked = read_prompt(body)
        n_tokens = await self._tokenizers.count(exchange, chat_of(asked))
        return reply({"input_tokens": n_tokens}, headers=_id_of(exchange))

    async def _answer(self, request: Request, exchange: InnerExchange, body: bytes) -> Response:
        _check_version(request)
        asked = read_create(body)
        turn = Turn(asked)
        pieces = await exchange.ask_stream(chat_of(asked))
        if exchange.endpoint is not None:
            turn.model = exchange.endpoint.model_id
        if asked.stream:
            response: Response = sse(self._events(turn, exchange, pieces))
            response.headers.update(_id_of(exchange))
            return response
        turn.begin(_prompt_tokens(exchange))
        async for piece in pieces:
            if not isinstance(piece, bytes):
                turn.add(piece)
            if turn.stop_sequence is not None:
                exchange.enough(turn.prompt_tokens, turn.output_tokens)
                break
        turn.finish()
        return reply(turn.as_dict(), headers=_id_of(exchange))

    async def _events(self, turn: Turn, exchange: InnerExchange, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        yield _written(turn.begin(_prompt_tokens(exchange)))
        yield PING
        try:
            async for piece in pieces:
                out = PING if isinstance(piece, bytes) else _written(turn.add(piece))
                if out:
                    yield out
                if turn.stop_sequence is not None:
                    exchange.enough(turn.prompt_tokens, turn.output_tokens)
                    break
            yield _written(turn.finish())
        except Exception as error:
            yield event_text(anthropic_body(exchange.broken(error)))


def _written(events: list[Event]) -> bytes:
    return b"".join(event_text(event) for event in events)


def _prompt_tokens(exchange: InnerExchange) -> int:
    """As far as they are known before the answer's end."""
    return exchange.prompt_tokens or exchange.prefill_total


def _id_of(exchange: InnerExchange) -> dict[str, str]:
    return {"request-id": exchange.request_id.decode("latin-1")}


def _check_version(request: Request) -> None:
    """Clients name the day of the API that they were written for; all that is common to those days is spoken here."""
    version = request.headers.get("anthropic-version")
    if version is not None and not _VERSION.fullmatch(version):
        raise InvalidRequest(
            f"'anthropic-version' is '{version}': expected a date, such as 2023-06-01.", param="anthropic-version"
        )
