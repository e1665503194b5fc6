"""Owns: the clients of the soak with real engines: what each asks, when it leaves, and which ends are right.

An answer is whole, or it is refused in words that a client can act on, or it breaks off and says so; anything else is a
fault. Knows nothing of the server but its address and keys.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Any, NamedTuple

import httpx
import msgspec

PATIENCE_S = 180.0
EXPECTED_CODES = frozenset(
    {"queue_full", "queue_timeout", "server_busy", "model_loading", "model_draining", "memory_busy", "memory_pressure",
     "engine_crashed", "engine_failed", "engine_stuck"}
)  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": _SCHEMA}}


class Ask(NamedTuple):
    """One request. ends: what a whole answer to it has in it; of a stream, its last words. refusal: a code that a
    model may refuse it with. is_raw: its answer is passed on as it comes, so that one that breaks off has no words."""

    path: str
    body: dict[str, Any]
    ends: str
    refusal: str = ""
    is_raw: bool = False

    @property
    def is_stream(self) -> bool:
        return self.path.startswith("/api/") or bool(self.body.get("stream"))


class Seen(msgspec.Struct):
    """What the clients saw."""

    ends: Counter[str] = msgspec.field(default_factory=Counter)
    faults: list[str] = msgspec.field(default_factory=list)

    def add(self, end: str, fault: str | None = None) -> None:
        self.ends[end] += 1
        if fault is not None:
            self.faults.append(fault)


def asks(draw: random.Random, chats: list[str], embedder: str) -> tuple[Ask, ...]:
    """A request of each kind that a client may send, for one of the models."""
    model, text = draw.choice(chats), "Tell me of " + " ".join(draw.choices(("tea", "rain", "owls", "ink"), k=6))
    messages = [{"role": "user", "content": text}]
    n_tokens = draw.choice((2, 4, 8, 24))
    chat = {"model": model, "messages": messages, "max_tokens": n_tokens}
    done = "data: [DONE]\n\n"
    return (
        Ask("/v1/chat/completions", chat, '"choices"'),
        Ask("/v1/chat/completions", chat | {"stream": True}, done),
        Ask("/v1/chat/completions", chat | {"stream": True, "max_tokens": 200, "ignore_eos": True}, done),
        Ask("/v1/chat/completions", chat | {"tools": [_TOOL]}, '"choices"', "not_supported"),
        Ask("/v1/completions", {"model": model, "prompt": [text, text], "max_tokens": 2}, '"choices"'),
        Ask("/v1/embeddings", {"model": embedder, "input": [text, "short"]}, '"embedding"', is_raw=True),
        Ask("/v1/responses", {"model": model, "input": text, "max_output_tokens": 16}, '"output"'),
        Ask("/v1/messages", chat | {"stream": True}, "message_stop"),
        Ask("/api/chat", {"model": model, "messages": messages, "options": {"num_predict": 4}}, '"done":true'),
        Ask("/tokenize", {"model": model, "content": text}, '"tokens"'),
    )


async def client(
    url: str, key: str, draw: random.Random, names: tuple[list[str], str], end_s: float, seen: Seen
) -> None:
    """Ask until `end_s` of the monotonic clock. names: models that chat, and one that embeds."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False) as http:
        while time.monotonic() < end_s:
            asked, leaves_after_s = draw.choice(asks(draw, *names)), draw.choice((None, None, None, 0.05, 0.3, 1.0))
            await ask(http, asked, seen, leaves_after_s)


async def ask(http: httpx.AsyncClient, asked: Ask, seen: Seen, leaves_after_s: float | None = None) -> None:
    """Ask, and read to the end, or for a while."""
    timeout = httpx.Timeout(PATIENCE_S, read=leaves_after_s or PATIENCE_S)
    end_s = time.monotonic() + (leaves_after_s or PATIENCE_S)
    status, text = 0, ""
    try:
        async with http.stream("POST", asked.path, json=asked.body, timeout=timeout) as answer:
            status = answer.status_code
            async for piece in answer.aiter_text():
                text += piece
                if time.monotonic() > end_s:
                    seen.add("left")
                    return
        seen.add(*judged(asked, status, text))
    except httpx.HTTPError as error:
        if leaves_after_s is not None and isinstance(error, httpx.ReadTimeout):
            seen.add("left")
        elif status:
            seen.add(*judged(asked, status, text, broke=error))
        else:
            seen.add("broken connection", f"{asked.path} {asked.body['model']}: no answer: {error!r}")


def judged(asked: Ask, status: int, text: str, *, broke: Exception | None = None) -> tuple[str, str | None]:
    """How an answer ended, and what is wrong with that, if anything. broke: why it has no end, where it has none.

    What broke off after its first byte says so and has no end; what has an end says no such thing.
    """
    if status == 200 and asked.is_raw and broke is not None:
        return "broken off", None
    if status == 200 and broke is None:
        if asked.ends in text and not (asked.is_stream and '"error"' in text):
            return "whole", None
        code = ""
    else:
        code = _code_at_end(text) if status == 200 else _code(text)
    is_expected = code in EXPECTED_CODES or (code and code == asked.refusal)
    if is_expected and (broke is None) == (status != 200):
        return code, None
    return f"{status} {code}", f"{asked.path} {asked.body['model']}: {status}: {text[-300:]!r} {broke or ''!r}"


def _code_at_end(text: str) -> str:
    """Of the error that a stream says it broke off with."""
    last = next((line for line in reversed(text.splitlines()) if '"error"' in line), "")
    return _code(last.removeprefix("data: "))


def _code(text: str) -> str:
    """The error's code, in whichever envelope it came."""
    try:
        said = json.loads(text)
    except ValueError:
        return ""
    said = said.get("response", said) if isinstance(said, dict) else {}
    error = said.get("error")
    return str((error if isinstance(error, dict) else said).get("code", ""))
