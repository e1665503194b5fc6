"""Owns: texts to tokens and back by a model's own tokenizer, and the engine that such small questions go to.

POST /tokenize and /detokenize take llama.cpp's fields and vLLM's, whichever is said, and answer in the form of those,
whichever of the two engines has the model; `Tokenizers` is what other APIs count by. The model is loaded for it where
it is not.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.errors import EngineFailed, InvalidRequest, LayaError, NotSupported
from laya.gateway.body import parse_body
from laya.gateway.desk import reply
from laya.gateway.endpoint import Endpoint
from laya.gateway.fields import read_fields
from laya.gateway.fleet import Fleet
from laya.gateway.inner import Inner, InnerExchange
from laya.gateway.length import count_tokens, message_of
from laya.gateway.pool import UpstreamPool
from laya.types import EndpointKind

_TOKEN = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_TOKENS_MOST = 2**20
_PIECES_SHARE = 3  # with its pieces, a token takes the engine so much more


class Tokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: `content` as llama.cpp has it, `prompt` or `messages` as vLLM does."""

    model: str | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[_TOKEN], msgspec.Meta(max_length=_TOKENS_MOST)]
    model: str | None = None


class NotTaken(InvalidRequest):
    """The engine does not take what it was asked; in its words."""


class Tokenizers:
    """A model's engine, for what is no request of inference."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def endpoint_for(self, exchange: InnerExchange, name: str | None) -> Endpoint:
        """The endpoint of the model that a request means, loaded. Raises what refuses the name, the key or the load."""
        fleet, key = self._fleet, exchange.key
        name = exchange.header_model or name
        if name is None:
            raise InvalidRequest(f"'model' is missing. This server has: {fleet.names_text()}.", param="model")
        if key is not None and not key.may_use(name, fleet.roster.id_of(name), fleet.roster.id_of):
            raise key.forbidden_model(name)
        first = fleet.find(name)
        group = fleet.replicas(first)
        endpoint = next((each for each in group if each.pool is not None), first)
        if endpoint.pool is None:
            await fleet.room.take_turn(endpoint, lambda: not exchange.disconnected)
        if not endpoint.is_llamacpp and not _is_vllm(endpoint):
            raise NotSupported(f"The engine of '{endpoint.model_id}' has no tokenizer that Laya knows how to ask.",
                               param="model")  # fmt: skip
        return endpoint

    async def ask(
        self, exchange: InnerExchange, endpoint: Endpoint, path: str, body: dict[str, Any], n_bytes: int | None = None
    ) -> dict[str, Any]:
        """What the engine says to a body of so much text; None: all of it is.

        Raises NotTaken, InvalidRequest for too much text, EngineFailed where it can't be reached.
        """
        data, counting = msgspec.json.encode(body), _pool(endpoint).counting
        n_bytes = len(data) if n_bytes is None else n_bytes
        counting.check(n_bytes, "The text")
        try:
            status, answer = await counting.ask(path, data, n_bytes)
        except OSError as error:
            raise _unreachable(endpoint, error) from None
        if status != 200:
            raise NotTaken(message_of(answer))
        exchange.endpoint = endpoint  # only now: there is no other engine to try in its place
        found: dict[str, Any] = msgspec.json.decode(answer)
        return found

    async def count(self, exchange: InnerExchange, chat: dict[str, Any]) -> int:
        """Tokens of a chat request's prompt, the template and tools included."""
        parsed = parse_body(EndpointKind.CHAT, msgspec.json.encode(chat))
        endpoint = await self.endpoint_for(exchange, parsed.model)
        if endpoint.settings.task != "chat":
            raise NotSupported(f"The model '{endpoint.model_id}' has the task '{endpoint.settings.task}', no chat.",
                               param="model")  # fmt: skip
        _pool(endpoint)
        if _is_vllm(endpoint):
            question: dict[str, Any] = {
                name: parsed.fields[name] for name in ("messages", "tools") if name in parsed.fields
            }
            return int((await self.ask(exchange, endpoint, "/tokenize", _named(endpoint, question)))["count"])
        try:
            n_tokens = await count_tokens(endpoint, parsed)
        except OSError as error:
            raise _unreachable(endpoint, error) from None
        exchange.endpoint = endpoint
        return n_tokens


def _is_vllm(endpoint: Endpoint) -> bool:
    return endpoint.settings.engine == "vllm"


def _named(endpoint: Endpoint, question: dict[str, Any]) -> dict[str, Any]:
    """With the model as vLLM calls it."""
    return question | {"model": _pool(endpoint).address.model or endpoint.model_id}


def _pool(endpoint: Endpoint) -> UpstreamPool:
    if endpoint.pool is None:
        raise EngineFailed(f"The engine of '{endpoint.model_id}' was unloaded just now; ask again.")
    return endpoint.pool


def _unreachable(endpoint: Endpoint, error: OSError) -> LayaError:
    return EngineFailed(f"The engine of '{endpoint.model_id}' does not answer: {error}.")


class TokensApi:
    """The handlers."""

    def __init__(self, inner: Inner, tokenizers: Tokenizers) -> None:
        self._inner = inner
        self._tokenizers = tokenizers

    def routes(self) -> list[Route]:
        found = []
        for path, handler in (("/tokenize", self.tokenize), ("/detokenize", self.detokenize)):
            found += [Route(path, handler, methods=["POST"]), Route("/v1" + path, handler, methods=["POST"])]
        return found

    async def tokenize(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.COMPLETION, self._tokenize)

    async def detokenize(self, request: Request) -> Any:
        return self._inner.answer(EndpointKind.COMPLETION, self._detokenize)

    async def _tokenize(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = read_fields(body, Tokenize, "/tokenize")
        _check_form(asked)
        endpoint = await self._tokenizers.endpoint_for(exchange, asked.model)
        if _is_vllm(endpoint):
            return await self._tokenize_by_vllm(exchange, endpoint, asked)
        text, special = asked.content, asked.add_special
        if asked.prompt is not None:
            text, special = asked.prompt, asked.add_special_tokens is not False
        elif asked.messages is not None:
            text, special = await self._rendered(exchange, endpoint, asked), asked.add_special_tokens
        assert text is not None
        n_bytes, of_pieces = len(text.encode()), bool(asked.with_pieces or asked.return_token_strs)
        if of_pieces:
            _pool(endpoint).counting.check(n_bytes, "The text (with its pieces)", share=_PIECES_SHARE)
            n_bytes *= _PIECES_SHARE
        question = {"content": text, "add_special": bool(special), "with_pieces": of_pieces}
        question["parse_special"] = asked.parse_special is not False
        found = (await self._tokenizers.ask(exchange, endpoint, "/tokenize", question, n_bytes))["tokens"]
        if asked.content is not None:
            return reply({"tokens": found})
        assert endpoint.planned is not None
        tokens = [each["id"] for each in found] if of_pieces else found
        pieces = [_piece(each["piece"]) for each in found] if of_pieces else None
        answer = {"count": len(tokens), "max_model_len": endpoint.planned.max_seq_len, "tokens": tokens}
        return reply(answer | {"token_strs": pieces})

    async def _tokenize_by_vllm(self, exchange: InnerExchange, endpoint: Endpoint, asked: Tokenize) -> Response:
        """Its own form goes to it as it is; llama.cpp's is put into it."""
        told = ("prompt", "messages", "tools", "add_generation_prompt", "chat_template_kwargs", "add_special_tokens")
        question = {name: value for name in told if (value := getattr(asked, name)) is not None}
        if asked.content is not None:
            question |= {"prompt": asked.content, "add_special_tokens": bool(asked.add_special)}
        of_pieces = bool(asked.with_pieces or asked.return_token_strs)
        question["return_token_strs"] = of_pieces
        found = await self._tokenizers.ask(exchange, endpoint, "/tokenize", _named(endpoint, question))
        if asked.content is None:
            return reply({name: found[name] for name in ("count", "max_model_len", "tokens", "token_strs")})
        tokens = found["tokens"]
        if of_pieces:
            tokens = [{"id": n, "piece": text} for n, text in zip(tokens, found["token_strs"], strict=True)]
        return reply({"tokens": tokens})

    async def _rendered(self, exchange: InnerExchange, endpoint: Endpoint, asked: Tokenize) -> str:
        """The prompt that the model's template makes of a conversation."""
        told = ("messages", "tools", "add_generation_prompt", "chat_template_kwargs")
        question = {name: value for name in told if (value := getattr(asked, name)) is not None}
        return str((await self._tokenizers.ask(exchange, endpoint, "/apply-template", question))["prompt"])

    async def _detokenize(self, exchange: InnerExchange, body: bytes) -> Response:
        asked = read_fields(body, Detokenize, "/detokenize")
        endpoint = await self._tokenizers.endpoint_for(exchange, asked.model)
        try:
            question: dict[str, Any] = {"tokens": asked.tokens}
            if _is_vllm(endpoint):
                question = _named(endpoint, question)
            found = await self._tokenizers.ask(exchange, endpoint, "/detokenize", question, len(asked.tokens))
            text = found["prompt" if _is_vllm(endpoint) else "content"]
        except NotTaken:
            raise InvalidRequest(
                f"'tokens' has one that is not in the vocabulary of '{endpoint.model_id}': the largest is "
                f"{max(asked.tokens, default=0)}.",
                param="tokens",
            ) from None
        return reply({"content": text, "prompt": text})


def _check_form(asked: Tokenize) -> None:
    said = [name for name in ("content", "prompt", "messages") if getattr(asked, name) is not None]
    if len(said) != 1:
        what = "are said together" if said else "are all missing"
        raise InvalidRequest(f"'content', 'prompt' and 'messages' {what}: say one of them.", param="content")


def _piece(piece: str | list[int]) -> str:
    """A token that is no whole character comes as its bytes."""
    return piece if isinstance(piece, str) else bytes(piece).decode(errors="replace")
