"""Owns: the calls in an answer that was held to their schema: text in pieces in, `tool_calls` as OpenAI tells them out.

The text is JSON by a grammar, the name of a call before its arguments, so it is read by the character as it comes and
no piece waits for the next one. Pure: events in, events out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from laya.gateway.assemble import Assembler, UsageSum
from laya.gateway.sse import StreamFilter, event_bytes

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody

_SPACE = " \t\r\n"


class CallReader:
    """The calls of one choice. Spaces between what the JSON of arguments consists of are left out."""

    def __init__(self, *, is_list: bool) -> None:
        self._inside = 2 if is_list else 1  # how deep a call's own members are
        self._depth = 0
        self._is_quoted = self._is_escaped = False
        self._word: list[str] = []  # the last string among a call's own members, with its quotes
        self._key = ""  # of the member whose value is read
        self._deltas: list[dict[str, Any]] = []
        self.n_calls = 0  # whose names are known

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What `tool_calls` of the next events say."""
        for char in text:
            if self._is_quoted:
                self._in_string(char)
            elif char not in _SPACE:
                self._between(char)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _in_string(self, char: str) -> None:
        if self._key == "arguments":
            self._tell(char)
        else:
            self._word.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_quoted = False
            if self._key == "name":
                self._begin(msgspec.json.decode("".join(self._word)))

    def _between(self, char: str) -> None:
        is_own = self._depth == self._inside
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif char == '"':
            self._is_quoted, self._word = True, [char]
        if is_own and char in ",}":
            self._key = ""
        elif self._key == "arguments":
            self._tell(char)
        elif is_own and char == ":":
            self._key = msgspec.json.decode("".join(self._word))

    def _begin(self, name: str) -> None:
        call_id = f"call_{os.urandom(12).hex()}"
        function = {"name": name, "arguments": ""}
        self._deltas.append({"index": self.n_calls, "id": call_id, "type": "function", "function": function})
        self.n_calls += 1

    def _tell(self, char: str) -> None:
        last = self._deltas[-1] if self._deltas else None
        if last is None or "id" in last or last["index"] != self.n_calls - 1:
            last = {"index": self.n_calls - 1, "function": {"arguments": ""}}
            self._deltas.append(last)
        last["function"]["arguments"] += char


class CallEvents:
    """The engine's events, each choice's text turned into calls."""

    def __init__(self, *, is_list: bool) -> None:
        self._is_list = is_list
        self._readers: dict[int, CallReader] = {}
        self.error: dict[str, Any] | None = None  # an answer without a call, which is none

    def of(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """What is to be told in place of one event; an event whose text only began something is none."""
        choices = event.get("choices")
        if not choices:
            return [event]
        return [event | {"choices": [told]} for choice in choices for told in self._told(choice)]

    def _told(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        reader = self._readers.setdefault(int(choice.get("index") or 0), CallReader(is_list=self._is_list))
        delta = dict(choice.get("delta") or {})
        calls = reader.feed(delta.get("content") or "")
        if delta.get("content"):
            del delta["content"]
        reason = choice.get("finish_reason")
        if reason == "stop" and not reader.n_calls:
            self.error = {"message": "it called no tool, although it was held to the schema of a call"}
        deltas = [{"tool_calls": [call]} for call in calls]
        if delta or (reason and not deltas):
            deltas.insert(0, delta)
        told = [choice | {"delta": each, "finish_reason": None} for each in deltas]
        if told and reason:
            told[-1]["finish_reason"] = "tool_calls" if reason == "stop" and reader.n_calls else reason
        return told


class CutCalls:
    """The engine's own calls. One that a stop sequence cut off ends by `stop`: engines say it was whole."""

    def __init__(self) -> None:
        self._arguments: dict[tuple[int, int], str] = {}  # by choice and call
        self.error: dict[str, Any] | None = None

    def of(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """The event, with the reason that is true."""
        for choice in event.get("choices") or ():
            index = int(choice.get("index") or 0)
            for call in (choice.get("delta") or {}).get("tool_calls") or ():
                place = (index, int(call.get("index") or 0))
                told = (call.get("function") or {}).get("arguments") or ""
                self._arguments[place] = self._arguments.get(place, "") + told
            if choice.get("finish_reason") == "tool_calls" and not self._are_whole(index):
                choice["finish_reason"] = "stop"
        return [event]

    def _are_whole(self, index: int) -> bool:
        try:
            for (choice, _), arguments in self._arguments.items():
                if choice == index:
                    msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


def calls_of(parsed: ParsedBody) -> CallEvents | CutCalls | None:
    """What the events of an answer go through, where they do not pass as they are."""
    if parsed.forced is not None:
        return CallEvents(is_list=parsed.forced.is_list)
    return CutCalls() if parsed.rewrites_calls else None


class CallFilter(StreamFilter):
    """For a client that streams."""

    def __init__(self, usage: UsageSum, calls: CallEvents | CutCalls, *, wants_usage: bool) -> None:
        super().__init__(usage, wants_usage=wants_usage)
        self._calls = calls

    @property
    def passes_events(self) -> bool:
        return False

    def feed(self, data: bytes) -> bytes:
        out: list[bytes] = []
        for raw in self._cut(data).split(b"\n\n"):
            event = self._take(raw) if self.error is None else None
            if event is not None:
                out += [event_bytes(told) for told in self._calls.of(event)]
                self.error = self.error or self._calls.error
        return b"".join(out)


class CallAssembler(Assembler):
    """For a client that wants the answer whole."""

    def __init__(self, calls: CallEvents | CutCalls) -> None:
        super().__init__(chat=True, n_top_logprobs=None)
        self._calls = calls

    def add(self, event: dict[str, Any]) -> None:
        for told in self._calls.of(event):
            super().add(told)
        self.error = self._calls.error
