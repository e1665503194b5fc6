"""Owns: an answer in Ollama's API: its lines as they grow, its end with counts and durations, the whole of it.

Fed with the events of a chat or a completion. Calls are told whole. Durations are nanoseconds. Pure: no engine, no
socket.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any, TypeAlias

import msgspec

from laya.errors import EngineFailed
from laya.gateway.assemble import encode
from laya.gateway.exchange import Exchange
from laya.gateway.ollama_request import Chat, Generate

Line: TypeAlias = dict[str, Any]
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def line_bytes(line: Line) -> bytes:
    return encode(line) + b"\n"


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


class Answer:
    """One answer in the making. Its methods give the lines that tell what has changed."""

    def __init__(self, asked: Chat | Generate) -> None:
        self._asked = asked
        self._is_chat = isinstance(asked, Chat)
        self._finish = ""
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._calls: dict[int, dict[str, str]] = {}
        self._parts: dict[str, list[str]] = {"content": [], "thinking": []}
        self._told_calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, event: dict[str, Any]) -> list[Line]:
        """An event of the engine."""
        self._usage = event.get("usage") or self._usage
        self._timings = event.get("timings") or self._timings
        lines: list[Line] = []
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {"content": choice.get("text")}
            self._finish = choice.get("finish_reason") or self._finish
            thinking = delta.get("reasoning_content") if self._asked.think is not False else None
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
            logprobs = _logprobs(choice.get("logprobs"))
            if thinking or delta.get("content") or logprobs:
                lines.append(self._grown(delta.get("content") or "", thinking or "", logprobs))
        return lines

    def _grown(self, content: str, thinking: str, logprobs: list[dict[str, Any]]) -> Line:
        self._parts["content"].append(content)
        self._parts["thinking"].append(thinking)
        self._logprobs += logprobs
        return self._line(content, thinking, []) | ({"logprobs": logprobs} if logprobs else {}) | {"done": False}

    def _line(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> Line:
        head = {"model": self._asked.model, "created_at": now_text()}
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return head | {"response": content} | more
        more |= {"tool_calls": calls} if calls else {}
        return head | {"message": {"role": "assistant", "content": content} | more}

    def _add_call(self, call: dict[str, Any]) -> None:
        function = call.get("function") or {}
        held = self._calls.setdefault(int(call.get("index") or 0), {"id": "", "name": "", "arguments": ""})
        held["id"] = call.get("id") or held["id"]
        held["name"] += function.get("name") or ""
        held["arguments"] += function.get("arguments") or ""

    def calls(self) -> list[Line]:
        """The calls, each whole; nothing where there are none. Raises EngineFailed for one that can't be read."""
        for index in sorted(self._calls):
            held = self._calls[index]
            try:
                arguments = _OBJECT.decode(held["arguments"] or "{}")
            except msgspec.DecodeError:
                if self._finish == "length":
                    continue  # the answer was cut within it, as done_reason tells
                said = f"The model called '{held['name']}' with arguments that are no JSON object."
                raise EngineFailed(said) from None
            function = {"index": index, "name": held["name"], "arguments": arguments}
            self._told_calls.append({"id": held["id"], "function": function})
        return [self._line("", "", self._told_calls) | {"done": False}] if self._told_calls else []

    def last(self, exchange: Exchange) -> Line:
        """The line that ends a stream."""
        return self._line("", "", []) | self._end(exchange)

    def whole(self, exchange: Exchange) -> Line:
        """The answer in one piece, once `calls` has read them."""
        line = self._line("".join(self._parts["content"]), "".join(self._parts["thinking"]), self._told_calls)
        return line | ({"logprobs": self._logprobs} if self._logprobs else {}) | self._end(exchange)

    def _end(self, exchange: Exchange) -> Line:
        now_s = time.monotonic()
        first_s = exchange.first_token_s or now_s
        prompt_s, answer_s = first_s - exchange.sent_s, now_s - first_s
        if self._timings:
            prompt_s = float(self._timings.get("prompt_ms") or 0) / 1e3
            answer_s = float(self._timings.get("predicted_ms") or 0) / 1e3
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": ns(now_s - exchange.arrived_s),
            "load_duration": waited_ns(exchange),
            "prompt_eval_count": int(self._usage.get("prompt_tokens") or 0),
            "prompt_eval_duration": ns(prompt_s),
            "eval_count": int(self._usage.get("completion_tokens") or 0),
            "eval_duration": ns(answer_s),
        }


def ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def waited_ns(exchange: Exchange) -> int:
    """From the whole request to the engine: the load, where there was one, and the queue."""
    return ns(exchange.sent_s - exchange.read_s) if exchange.sent_s else 0


def _logprobs(given: Any) -> list[dict[str, Any]]:
    """In the form of chats, or of completions."""
    if not given:
        return []
    if (entries := given.get("content")) is not None:
        return [_logprob(entry, [_logprob(top) for top in entry.get("top_logprobs") or ()]) for entry in entries]
    tops = given.get("top_logprobs") or [{}] * len(given["tokens"])
    return [
        _logprob({"token": token, "logprob": value}, [{"token": t, "logprob": p} for t, p in top.items()])
        for token, value, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True)
    ]


def _logprob(entry: dict[str, Any], tops: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """`top_logprobs` is left out where there are none, as Ollama does."""
    return {"token": entry.get("token"), "logprob": entry.get("logprob")} | ({"top_logprobs": tops} if tops else {})
