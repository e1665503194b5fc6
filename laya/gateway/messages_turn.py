"""Owns: an answer in Anthropic's Messages API: its content blocks as they grow, the events that tell them, its end.

Fed with the events of a chat. Blocks come one after the other, each opened, told, closed. Stop sequences are looked for
here, since engines cut them out of the text without a word of which one it was. Pure: no engine, no socket.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import msgspec

from laya.errors import EngineFailed
from laya.gateway.assemble import encode
from laya.gateway.messages_request import Create

Event: TypeAlias = dict[str, Any]
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def event_text(event: Event) -> bytes:
    """An event as it goes over the wire."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class StopFinder:
    """Finds the first stop sequence in a text that comes in pieces."""

    def __init__(self, sequences: list[str]) -> None:
        self._sequences = sequences
        self._held = ""  # what may be the beginning of one

    def feed(self, text: str) -> tuple[str, str | None]:
        """What can be told of the text so far, and the sequence that ended it."""
        text = self._held + text
        places = [(text.find(each), each) for each in self._sequences if each in text]
        if places:
            place, found = min(places)
            return text[:place], found
        n_held = max((_overlap(text, each) for each in self._sequences), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], None

    def rest(self) -> str:
        """What was held back, and was no beginning."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, sequence: str) -> int:
    """Characters at the text's end that are the sequence's beginning."""
    most = min(len(text), len(sequence) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(sequence[:n])), 0)


class Turn:
    """One message in the making. Its methods give the events that tell what has changed."""

    def __init__(self, asked: Create) -> None:
        self.asked = asked
        self.id = f"msg_{os.urandom(12).hex()}"
        self.model = asked.model or ""
        self.content: list[dict[str, Any]] = []
        self.stop_sequence: str | None = None  # the one that was found: what comes after is not part of the message
        self.input_tokens = 0
        self.output_tokens = 0
        self._cached_tokens = 0
        self._finish = ""
        self._is_open = False
        self._pieces: list[str] = []  # of the open block's text or arguments
        self._call = -1  # which of the engine's calls the last block is
        self._stops = StopFinder(asked.stop_sequences or [])

    def begin(self, input_tokens: int) -> list[Event]:
        """input_tokens: as far as they are known before the first token."""
        self.input_tokens = input_tokens
        return [{"type": "message_start", "message": self.as_dict()}]

    def add(self, event: Event) -> list[Event]:
        """A chat event of the engine."""
        self.model = event.get("model") or self.model
        self._count(event)
        events: list[Event] = []
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if self.asked.shows_thinking and (text := delta.get("reasoning_content")):
                events += self._grow("thinking", text)
            if text := delta.get("content"):
                events += self._add_text(text)
            for call in delta.get("tool_calls") or ():
                events += self._add_call(call)
            self._finish = choice.get("finish_reason") or self._finish
        return events

    def _count(self, event: Event) -> None:
        usage, timings = event.get("usage"), event.get("timings")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._set_counts(
                int(usage.get("prompt_tokens") or 0), int(cached), int(usage.get("completion_tokens") or 0)
            )
        elif timings:
            cached = int(timings.get("cache_n") or 0)
            self._set_counts(cached + int(timings.get("prompt_n") or 0), cached, int(timings.get("predicted_n") or 0))
        else:
            self.output_tokens += bool(event.get("choices"))

    def _set_counts(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """In Anthropic's terms: what was cached is not in the input."""
        self.input_tokens, self._cached_tokens = prompt_tokens - cached_tokens, cached_tokens
        self.output_tokens = output_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.input_tokens + self._cached_tokens

    def _add_text(self, text: str) -> list[Event]:
        if self.stop_sequence is not None:
            return []
        text, self.stop_sequence = self._stops.feed(text)
        return self._grow("text", text) if text else []

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = []
        if not self._is_open or self.content[-1]["type"] != kind:
            events = self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._pieces.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _add_call(self, call: dict[str, Any]) -> list[Event]:
        """Calls arrive in deltas by `index`: the first has id and name, the rest pieces of the arguments."""
        function, index = call.get("function") or {}, int(call.get("index") or 0)
        events = []
        if index != self._call:
            held = self._stops.rest()
            events = self._grow("text", held) if held else []
            self._call = index
            use_id = call.get("id") or f"toolu_{os.urandom(12).hex()}"
            events += self._open({"type": "tool_use", "id": use_id, "name": function.get("name") or "", "input": {}})
        if arguments := function.get("arguments"):
            self._pieces.append(arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self.content.append(block)
        self._is_open = True
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        block, text = self.content[-1], "".join(self._pieces)
        self._is_open, self._pieces = False, []
        if block["type"] == "tool_use":
            block["input"] = self._input(block["name"], text)
        else:
            block[block["type"]] = text
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _input(self, name: str, text: str) -> dict[str, Any]:
        """What the arguments say; nothing where the answer was cut within them, which its stop_reason tells."""
        try:
            return _OBJECT.decode(text or "{}")
        except msgspec.DecodeError:
            if self._finish == "length":
                return {}
            raise EngineFailed(f"The model called '{name}' with arguments that are no JSON object.") from None

    def finish(self) -> list[Event]:
        """The engine has said all, or enough. Raises EngineFailed for a call that can't be read."""
        held = "" if self.stop_sequence is not None else self._stops.rest()
        events = self._grow("text", held) if held else []
        events += self._close()
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop_sequence}
        return [*events, {"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}]

    def _stop_reason(self) -> str:
        if self.stop_sequence is not None:
            return "stop_sequence"
        if self._finish == "length" and self.output_tokens < self.asked.max_tokens:
            return "model_context_window_exceeded"
        if self._finish == "stop" and self._call >= 0:
            return "tool_use"
        return _REASONS.get(self._finish, "end_turn")

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached_tokens,
            "output_tokens": self.output_tokens,
        }

    def as_dict(self) -> dict[str, Any]:
        """The message as it is now; of one that is not finished yet, without a stop_reason."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self.content),
            "stop_reason": self._stop_reason() if self._finish or self.stop_sequence is not None else None,
            "stop_sequence": self.stop_sequence,
            "usage": self._usage(),
        }
