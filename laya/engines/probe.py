"""Owns: the proof that an engine works: one generated token, embedding or score that really came back; and how many
tokens its chat template adds to what is said.

A server that listens is not yet an engine that computes: a wrong instruction set, a kernel that is missing or a mode
that does not fit the model show only at the first answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import httpx

from laya.errors import EngineFailed
from laya.types import MIB, EngineAddress, Task

RETRY_S = 0.1
ANSWER_LIMIT_BYTES = 4 * MIB
NO_POOLING_HINT = "The model file states no pooling: set args: {pooling_type: mean}, or last, as its authors say"
PROBES: dict[Task, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0, "cache_prompt": False}),
    "embed": ("/v1/embeddings", {"input": "Hello"}),
    "rerank": ("/v1/rerank", {"query": "Hello", "documents": ["Hello"]}),
    "decide": ("/v1/systemone", {"state": "Hello", "questions": {"q": {"type": "noul", "instructions": "Hello?"}}}),
}
# What any server of OpenAI's API understands, where completions may be missing.
CHAT: tuple[str, dict[str, Any]] = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0},
)

# Templates put a text of their own before a conversation without a system message, some also into later turns.
_TEMPLATE_CHATS = (("user",), ("system", "user"), ("user", "assistant", "user"))
_TEMPLATE_MARGIN_TOKENS = 64  # with the factor: for dates, and words that some conversation has and none of these


async def until_healthy(address: EngineAddress, path: str, note: Callable[[str], None]) -> None:
    """Return once this path answers 2xx. `note` is told what is waited for.

    Raises EngineFailed where the server is up and has no such path.
    """
    async with _client(address) as client:
        while True:
            try:
                async with client.stream("GET", path) as response:  # its body is nobody's business, and may have no end
                    status = response.status_code
            except httpx.TransportError:
                note("")
            else:
                if 200 <= status < 300:
                    note("it is healthy and has not answered its first request")
                    return
                if status == httpx.codes.NOT_FOUND:
                    raise EngineFailed(f"it has no {path} (404): set health to a path that it has, or to null")
                note(f"{path} answers {status}")
            await asyncio.sleep(RETRY_S)


async def until_it_answers(
    address: EngineAddress, task: Task, *, model: str | None = None, has_completions: bool = False
) -> str | None:
    """Return after the first real answer, what it calls the model. Waits without a deadline of its own while the engine
    loads.

    model: what the engine calls it, where requests have to say so. has_completions: it is asked for one also where it
    is no llama.cpp, as a model without a chat template can give nothing else.
    Raises EngineFailed with the engine's words when it answers with something else.
    """
    is_asked_to_chat = task == "chat" and address.dialect == "openai" and not has_completions
    path, body = CHAT if is_asked_to_chat else PROBES[task]
    if model is not None:
        body = body | {"model": model}
    async with _client(address) as client:
        while True:
            try:
                response = await _answer(client, path, body)
            except httpx.TransportError:
                response = None  # not listening yet, or gone: whoever waits for the exit will say so
            if response is not None and response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return check(task, response, asked_for=model)
            await asyncio.sleep(RETRY_S)


async def most_template_tokens(address: EngineAddress) -> int | None:
    """Tokens that llama.cpp's chat template adds at most to a chat without tools or options of the template, beyond a
    few for each message: twice those of the longest of three short chats, and a margin. None where it does not tell.

    A template may still do more with a conversation that it was not asked of: then the engine says what is too long.
    """
    found = []
    async with _client(address) as client:
        for roles in _TEMPLATE_CHATS:
            body = {"messages": [{"role": role, "content": "Hello"} for role in roles]}
            try:
                response = await _answer(client, "/v1/chat/completions/input_tokens", body)
                if response.status_code == httpx.codes.OK:  # some know no system message
                    found.append(int(response.json()["input_tokens"]))
            except (httpx.TransportError, KeyError, TypeError, ValueError):
                return None
    return 2 * max(found) + _TEMPLATE_MARGIN_TOKENS if found else None


async def _answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    """Its first bytes, as many as any real answer to so little has."""
    async with client.stream("POST", path, json=body) as response:
        data = b""
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > ANSWER_LIMIT_BYTES:
                break
        return httpx.Response(response.status_code, content=data)


def _client(address: EngineAddress) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    url = f"http://{address.host}:{address.port}"
    # trust_env off: a proxy set for the internet must not see the loopback.
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=None, trust_env=False, verify=False)


def check(task: Task, response: httpx.Response, *, asked_for: str | None = None) -> str | None:
    """What the answer calls the model. Raises EngineFailed unless it carries what the task is about.

    asked_for: the name of the model that the request said.
    """
    try:
        answer = response.json()
    except ValueError:
        raise EngineFailed(f"its first answer was not JSON: {response.text[:200]!r}") from None
    if response.status_code != httpx.codes.OK:
        words = error_text(answer)
        hint = f". {NO_POOLING_HINT}" if task == "embed" and "Pooling type 'none'" in words else ""
        if asked_for is not None and response.status_code == httpx.codes.NOT_FOUND:
            hint = f". It was asked for '{asked_for}': served_model_name says what it calls the model"
        raise EngineFailed(f"its first answer was an error: {words.rstrip('.') if hint else words}{hint}")
    if not isinstance(answer, dict) or not _is_shaped(task, answer):
        raise EngineFailed(f"its first answer has no {THINGS[task]}: {response.text[:200]}")
    said = answer.get("model")
    return said if isinstance(said, str) else None


THINGS: dict[Task, str] = {"chat": "token", "embed": "embedding", "rerank": "score", "decide": "answer"}


def _is_shaped(task: Task, answer: dict[str, Any]) -> bool:
    try:
        return CHECKS[task](answer)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False


def _has_token(answer: dict[str, Any]) -> bool:
    choice = (answer.get("choices") or [{}])[0]
    said = choice.get("text") or (choice.get("message") or {}).get("content")
    n_tokens = int((answer.get("usage") or {}).get("completion_tokens", 0))
    return bool(answer.get("choices")) and (n_tokens >= 1 or bool(said))


def _has_embedding(answer: dict[str, Any]) -> bool:
    data = answer.get("data") or [{}]
    vector = data[0].get("embedding") or []
    return bool(vector) and all(isinstance(value, float | int) and math.isfinite(value) for value in vector)


def _has_score(answer: dict[str, Any]) -> bool:
    results = answer.get("results") or [{}]
    return isinstance(results[0].get("relevance_score"), float | int)


def _has_decision(answer: dict[str, Any]) -> bool:
    probability = (answer.get("answers") or {}).get("q", {}).get("noul")
    return isinstance(probability, float | int) and math.isfinite(probability)


CHECKS = {"chat": _has_token, "embed": _has_embedding, "rerank": _has_score, "decide": _has_decision}


def error_text(answer: Any) -> str:
    """The message inside OpenAI's envelope, or the answer itself."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
