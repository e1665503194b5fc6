"""Owns: OpenAI's Responses API on every engine: a request becomes a chat, the chat's answer a response, and a finished
turn is kept before its client is told that it is complete.

What a request may say is `responses_request.py`, how an answer is told `responses_turn.py`, where turns are kept
`responses_kept.py`. A response belongs to the key that made it; for any other key it is not there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.errors import InvalidRequest, NotSupported
from laya.gateway.assemble import encode
from laya.gateway.desk import reply
from laya.gateway.fields import whole_number
from laya.gateway.inner import Inner, InnerExchange, Piece, sse
from laya.gateway.responses_items import Item
from laya.gateway.responses_kept import KeptResponses, owner_of
from laya.gateway.responses_request import LOGPROBS, Create, chat_of, read_create
from laya.gateway.responses_turn import Event, Turn, event_text, told_again
from laya.gateway.roles import key_of
from laya.gateway.tokens import Tokenizers
from laya.store import KeptTurn
from laya.types import EndpointKind

MOST_LISTED = 100
_ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
_DOCUMENT = msgspec.json.Decoder(dict[str, Any])


class _Place:
    """Where a turn stands: what it goes on from, what it brought, whose it is."""

    def __init__(self, exchange: InnerExchange, asked: Create, items: list[Item], before: list[KeptTurn]) -> None:
        self.exchange = exchange
        self.items = items
        self.owner = owner_of(exchange.key)
        self.previous_id = asked.previous_response_id
        self.root_id = before[0].root_id if before else None
        self.history: list[Item] = []
        for turn in before:
            self.history += _ITEMS.decode(turn.input)
            self.history += _DOCUMENT.decode(turn.document)["output"]


class ResponsesApi:
    """The handlers."""

    def __init__(self, inner: Inner, kept: KeptResponses, tokenizers: Tokenizers) -> None:
        self._inner = inner
        self._tokenizers = tokenizers
        self._kept = kept

    def routes(self) -> list[Route]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count, methods=["POST"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(one + "/input_items", self.input_items, methods=["GET"]),
            Route(one + "/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.CHAT, self._answer)

    async def count(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.CHAT, self._count)

    async def _count(self, exchange: InnerExchange, body: bytes) -> Response:
        """How many tokens the prompt of such a request has, the conversation before it included."""
        asked, items = read_create(body)
        place = await self._place(exchange, asked, items)
        n_tokens = await self._tokenizers.count(exchange, chat_of(asked, place.history, items, session=None))
        return reply({"object": "response.input_tokens", "input_tokens": n_tokens})

    async def _place(self, exchange: InnerExchange, asked: Create, items: list[Item]) -> _Place:
        previous_id = asked.previous_response_id
        before = await self._kept.until(previous_id, owner_of(exchange.key)) if previous_id is not None else []
        return _Place(exchange, asked, items, before)

    async def _answer(self, exchange: InnerExchange, body: bytes) -> Response:
        asked, items = read_create(body)
        place, turn = await self._place(exchange, asked, items), Turn(asked)
        exchange.may_trim = asked.truncation == "auto"
        chat = chat_of(asked, place.history, items, session=place.root_id or (turn.id if asked.is_kept else None))
        if asked.keep_alive is not None:
            chat["keep_alive"] = asked.keep_alive
        if asked.stream:
            exchange.ends_later = asked.is_kept
            return sse(self._events(turn, place, await exchange.ask_stream(chat)))
        turn.add_whole(await exchange.ask_whole(chat))
        turn.finish()
        await self._keep(turn, place)
        return Response(encode(turn.as_dict()), media_type="application/json")

    async def _events(self, turn: Turn, place: _Place, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        yield _written(turn.begin())
        try:
            async for piece in pieces:
                out = piece if isinstance(piece, bytes) else _written(turn.add(piece))
                if out:
                    yield out
            yield _written(turn.finish())
            await self._keep(turn, place)
            place.exchange.finish("served")
        except Exception as error:
            fault = place.exchange.dispatcher.fault(f"response {turn.id}", error)
            place.exchange.fail(fault)
            turn.fail(fault)
        yield event_text(turn.last())

    async def _keep(self, turn: Turn, place: _Place) -> None:
        if not turn.asked.is_kept:
            return
        kept = KeptTurn(
            id=turn.id,
            owner=place.owner,
            previous_id=place.previous_id,
            root_id=place.root_id or turn.id,
            created_s=turn.created_s,
            document=encode(turn.as_dict()).decode(),
            input=msgspec.json.encode(place.items).decode(),
        )
        await self._kept.keep(kept)

    async def retrieve(self, request: Request) -> Response:
        _known_query(request, "include", "include[]", "stream", "starting_after", "include_obfuscation")
        streams, *_ = (_one_of(request, name, "false", "true") for name in ("stream", "include_obfuscation"))
        kept = await self._find(request)
        if streams != "true":
            return Response(kept.document, media_type="application/json")
        after = _whole(request, "starting_after", -1, least=-1, most=2**31)
        events = [event for event in told_again(_DOCUMENT.decode(kept.document)) if event["sequence_number"] > after]
        return Response(_written(events), media_type="text/event-stream")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._kept.drop(response_id, owner_of(key_of(request)))
        return reply({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """The items that this response's request brought, newest first; those before are its previous response's."""
        _known_query(request, "after", "limit", "order", "include", "include[]")
        limit, order = _whole(request, "limit", 20, least=1, most=MOST_LISTED), _one_of(request, "order", "desc", "asc")
        items = _ITEMS.decode((await self._find(request)).input)
        if order == "desc":
            items.reverse()
        after = request.query_params.get("after")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest(
                    f"'after' is '{after}': no input item of this response has this id.", param="after"
                )
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        listed = {"object": "list", "data": page, "first_id": first_id, "last_id": last_id}
        return reply(listed | {"has_more": len(items) > limit})

    async def compact(self, request: Request) -> Response:
        raise NotSupported(
            "This server compacts no conversations. 'truncation': \"auto\" of a response drops the oldest turns where "
            "they are too long; or ask for a summary and begin a conversation with it."
        )

    async def cancel(self, request: Request) -> Response:
        kept = await self._find(request)
        raise InvalidRequest(
            f"Response '{kept.id}' is finished, and only a background response can be cancelled, which this server "
            f"does not make. To stop an answer that is on its way, close its connection.",
            param="response_id",
        )

    async def _find(self, request: Request) -> KeptTurn:
        return await self._kept.find(request.path_params["response_id"], owner_of(key_of(request)))


def _written(events: list[Event]) -> bytes:
    return b"".join(event_text(event) for event in events)


def _known_query(request: Request, *names: str) -> None:
    for name, value in request.query_params.multi_items():
        if name not in names:
            raise InvalidRequest(f"'{name}' is not a parameter here; there are: {', '.join(names)}.", param=name)
        if name.startswith("include") and name != "include_obfuscation" and value != LOGPROBS:
            raise InvalidRequest(f"'{name}' is '{value}': this server includes {LOGPROBS} alone.", param=name)


def _one_of(request: Request, name: str, default: str, other: str) -> str:
    said = request.query_params.get(name, default)
    if said not in (default, other):
        raise InvalidRequest(f"'{name}' is '{said}': expected {default} or {other}.", param=name)
    return said


def _whole(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    number = whole_number(text)
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"'{name}' is '{text}': expected {max(least, 0)} to {most}.", param=name)
    return number
