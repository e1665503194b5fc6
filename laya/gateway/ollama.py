"""Owns: Ollama's API on every engine: chats, completions and embeddings, whole or as lines of JSON.

What a request may say is `ollama_request.py`, how an answer is told `ollama_answer.py`, models `ollama_models.py`. What
Ollama does to its own store is told to be a verb of `laya` here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from laya.errors import Forbidden, InvalidRequest, ModelNotFound, NotSupported
from laya.gateway.desk import reply
from laya.gateway.endpoint import Endpoint
from laya.gateway.envelopes import ollama_body
from laya.gateway.fields import read_fields
from laya.gateway.fleet import Fleet
from laya.gateway.inner import Inner, InnerExchange, Piece
from laya.gateway.keep_alive import keep, seconds_of
from laya.gateway.ollama_answer import Answer, Line, line_bytes, now_text, ns, waited_ns
from laya.gateway.ollama_models import Names, OllamaModels
from laya.gateway.ollama_request import (
    Asked,
    Chat,
    Embed,
    EmbedOne,
    Generate,
    chat_of,
    chat_of_generate,
    completion_of,
    read_chat,
    read_generate,
)
from laya.gateway.tokens import Tokenizers
from laya.types import EndpointKind

_VERBS = {
    "/api/pull": "`laya pull MODEL` fetches a model",
    "/api/push": "`laya` publishes no models",
    "/api/create": "name a file under `models` in config.yaml, or drop it into models_dir; `laya list` shows it",
    "/api/copy": "give the model another name with `aliases` in config.yaml",
    "/api/delete": "`laya rm MODEL` removes a model",
    "/api/blobs/{path:path}": "drop the file into models_dir; `laya list` shows it",
}
IGNORED = "x-laya-ignored"


class OllamaApi:
    """The handlers."""

    def __init__(self, inner: Inner, fleet: Fleet, tokenizers: Tokenizers) -> None:
        self._inner = inner
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._names = Names(fleet)
        self._models = OllamaModels(fleet, self._names)

    def routes(self) -> list[Route]:
        verbs = [Route(path, self.elsewhere, methods=["POST", "DELETE", "HEAD"], name=path) for path in _VERBS]
        return [
            *self._models.routes(),
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/embeddings", self.embed_one, methods=["POST"]),
            *verbs,
        ]

    async def elsewhere(self, request: Request) -> Response:
        path = next(path for path in _VERBS if request.url.path.startswith(path.partition("{")[0]))
        raise NotSupported(f"{request.url.path} is not part of this server: {_VERBS[path]}.")

    async def chat(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.CHAT, self._chat)

    async def generate(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.CHAT, self._generate)

    async def embed(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.EMBEDDING, self._embed)

    async def embed_one(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.EMBEDDING, self._embed_one)

    async def _chat(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = read_chat(body)
        if not asked.messages:
            return await self._load(exchange, asked)
        return await self._answer(exchange, asked, chat_of(asked))

    async def _generate(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = read_generate(body)
        if not asked.prompt and not asked.images:
            return await self._load(exchange, asked)
        if not asked.raw:
            return await self._answer(exchange, asked, chat_of_generate(asked))
        exchange.kind = EndpointKind.COMPLETION
        return await self._answer(exchange, asked, completion_of(asked))

    async def _answer(self, exchange: InnerExchange, asked: Chat | Generate, body: dict[str, Any]) -> Response:
        headers = await self._settle(exchange, asked)
        exchange.may_trim = asked.truncate is True
        pieces = await exchange.ask_stream(body | {"model": self._names.of(asked.model)})
        answer = Answer(asked)
        if asked.stream:
            lines = self._lines(answer, exchange, pieces)
            return StreamingResponse(lines, headers=headers, media_type="application/x-ndjson")
        async for piece in pieces:
            if not isinstance(piece, bytes):
                answer.add(piece)
        answer.calls()
        return reply(answer.whole(exchange), headers=headers)

    async def _lines(
        self, answer: Answer, exchange: InnerExchange, pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                if not isinstance(piece, bytes) and (lines := answer.add(piece)):  # a line has no comments
                    yield _written(lines)
            yield _written([*answer.calls(), answer.last(exchange)])
        except Exception as error:
            yield line_bytes(ollama_body(exchange.broken(error)))

    async def _load(self, exchange: InnerExchange, asked: Chat | Generate) -> Response:
        """A request without a prompt: have the model ready, or with `keep_alive: 0` have it go."""
        await self._settle(exchange, asked)
        seconds = seconds_of(asked.keep_alive) if asked.keep_alive is not None else None
        if seconds == 0 and exchange.key is not None and exchange.key.role != "admin":
            raise Forbidden(f"'{asked.model}' is others' too: only an admin's key unloads it by 'keep_alive': 0.")
        if seconds != 0:
            exchange.endpoint = await self._tokenizers.endpoint_for(exchange, self._names.of(asked.model))
        said: Line = {"message": {"role": "assistant", "content": ""}} if isinstance(asked, Chat) else {"response": ""}
        head = {"model": asked.model, "created_at": now_text()}
        return reply(head | said | {"done": True, "done_reason": "unload" if seconds == 0 else "load"})

    async def _settle(self, exchange: InnerExchange, asked: Asked) -> dict[str, str]:
        """What holds for the model from now on, and what the answer's head says of the request.

        Raises what refuses the name, the key, or more context than the model is served with.
        """
        keep_s = None if asked.keep_alive is None else seconds_of(asked.keep_alive)
        try:
            endpoint = self._names.find(exchange.header_model or asked.model, exchange.key)
        except ModelNotFound:
            return {}  # a pool, or what the rules know; if neither, routing says so
        options = asked.options
        if options is not None and options.num_ctx is not None:
            await self._check_window(endpoint, options.num_ctx)
        keep(self._fleet.replicas(endpoint), keep_s, exchange.key, self._fleet.config.server.max_keep_alive)
        ignored = options.without_effect() if options is not None else []
        return {IGNORED: ", ".join(f"options.{name}" for name in ignored)} if ignored else {}

    async def _check_window(self, endpoint: Endpoint, num_ctx: int) -> None:
        window = await self._fleet.window(endpoint)
        if window is not None and num_ctx > window:
            raise InvalidRequest(
                f"'options.num_ctx' is {num_ctx}: '{endpoint.model_id}' is served with {window} tokens (max_seq_len), "
                f"and a request does not change that. Leave num_ctx out, or serve it with --max-seq-len {num_ctx}.",
                param="options.num_ctx",
                max_seq_len=window,
            )

    async def _embed(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = read_fields(body, Embed, "/api/embed")
        headers = await self._settle(exchange, asked)
        if not asked.input:
            return reply({"model": asked.model, "embeddings": []}, headers=headers)
        vectors, n_tokens = await self._vectors(exchange, asked.model, asked.input, asked.dimensions)
        figures = {"load_duration": waited_ns(exchange), "prompt_eval_count": n_tokens}
        figures["total_duration"] = ns(exchange.dispatcher.fleet.now_s() - exchange.arrived_s)
        return reply({"model": asked.model, "embeddings": vectors} | figures, headers=headers)

    async def _embed_one(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = read_fields(body, EmbedOne, "/api/embeddings")
        headers = await self._settle(exchange, asked)
        vectors, _ = await self._vectors(exchange, asked.model, asked.prompt, None)
        return reply({"embedding": vectors[0]}, headers=headers)

    async def _vectors(
        self, exchange: InnerExchange, model: str, texts: str | list[str], dimensions: int | None
    ) -> tuple[list[Any], int]:
        """The embeddings in the order of the texts, and the tokens of all of them."""
        body: dict[str, Any] = {"model": self._names.of(model), "input": texts, "encoding_format": "float"}
        answer = await exchange.ask_whole(body | ({"dimensions": dimensions} if dimensions is not None else {}))
        data = sorted(answer["data"], key=lambda each: int(each["index"]))
        return [each["embedding"] for each in data], int((answer.get("usage") or {}).get("prompt_tokens") or 0)


def _written(lines: list[Line]) -> bytes:
    return b"".join(line_bytes(line) for line in lines)
