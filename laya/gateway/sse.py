"""Owns: an engine's server-sent events: what is passed on as it is, what is Laya's own, what the end says.

From the first token on, bytes go through unparsed unless a mark says that an event in them is not for the client:
prefill progress, usage (always asked for, often not by the client), errors, the end. A mark is a JSON key with its
quotes, which cannot occur inside a JSON string, where quotes are escaped. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from laya.gateway.assemble import UsageSum, completion_logprobs, encode, trim_logprobs
from laya.gateway.renaming import renamed_events

_MARK = re.compile(rb'"prompt_progress"|"usage"\s*:\s*\{|"error"\s*:|data: *[n\[]')
_DECODER = msgspec.json.Decoder(dict[str, Any])
DONE = b"data: [DONE]\n\n"
EVENT_LIMIT_BYTES = 16 * 1024 * 1024


try:
    from laya._core import stream_runs
except ImportError:  # no compiler when Laya was installed

    def stream_runs(events: bytes) -> list[tuple[bool, bytes]]:
        """Whole events in runs: unmarked ones together, each marked one for itself."""
        runs: list[tuple[bool, bytes]] = []
        for event in re.findall(rb".*?\n\n", events, re.S):
            is_marked = _MARK.search(event) is not None
            if runs and not is_marked and not runs[-1][0]:
                runs[-1] = (False, runs[-1][1] + event)
            else:
                runs.append((is_marked, event))
        return runs


def event_bytes(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


class EventReader:
    """What both readers of an engine's stream share: cutting events, and what Laya keeps of them for itself."""

    def __init__(self, usage: UsageSum) -> None:
        self._tail = b""
        self.usage = usage
        self.usage_event: dict[str, Any] | None = None  # the last one, whose id and timings its sum is sent under
        self.error: dict[str, Any] | None = None
        self.prefill_done = 0
        self.prefill_total = 0
        self.started = False  # the first token is there
        self.done = False  # the engine said [DONE]: the answer is whole

    def _cut(self, data: bytes) -> bytes:
        """All complete events of what has arrived; the rest waits for more."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if b"\r" in data:  # some engines end lines so; inside an event's JSON it would be escaped
            data = data.replace(b"\r\n", b"\n")
        if data.endswith(b"\n\n"):
            return data
        end = data.rfind(b"\n\n")
        end = 0 if end < 0 else end + 2
        self._tail = data[end:]
        if len(self._tail) > EVENT_LIMIT_BYTES:
            self.error = {"message": f"the engine sent an event that has no end within {EVENT_LIMIT_BYTES} bytes"}
        return data[:end]

    def _take(self, raw: bytes) -> dict[str, Any] | None:
        """One event's JSON, or None where nothing of it is for the client."""
        line = raw if raw.startswith(b"data:") else raw[raw.find(b"\ndata:") + 1 :]  # behind `event:` or `id:` lines
        payload = line[5:].strip() if line.startswith(b"data:") else b""
        if payload == b"[DONE]":
            self.done = True
            return None
        if not payload or payload == b"null":
            return None
        try:
            event = _DECODER.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            self.error = {"message": "the engine sent an event that is not JSON"}
            return None
        if error := event.get("error"):
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            return None
        if progress := event.get("prompt_progress"):
            self.prefill_done = int(progress.get("processed") or 0)
            self.prefill_total = int(progress.get("total") or 0)
            return None
        if (usage := event.pop("usage", None)) and isinstance(usage, dict):
            self.usage.add(usage)
            self.usage_event = event
            if not event.get("choices"):
                return None
        self.started = True
        return event


class StreamFilter(EventReader):
    """For a client that streams. `feed` gives the bytes to send on, `end` the last ones of a whole answer."""

    def __init__(
        self,
        usage: UsageSum,
        *,
        wants_usage: bool,
        n_top_logprobs: int | None = None,
        is_chat: bool = False,
        own_name: str | None = None,
    ) -> None:
        """own_name: of the model, where its engine calls it by another."""
        super().__init__(usage)
        self._own_name = own_name
        self._wants_usage = wants_usage
        self._n_top_logprobs = n_top_logprobs  # with logprobs: each event is rewritten
        self._is_chat = is_chat
        self._text_offsets: dict[int, int] = {}

    def feed(self, data: bytes) -> bytes:
        out: list[bytes] = []
        for is_marked, run in stream_runs(self._cut(data)):
            if self.error is not None:  # what follows is no answer any more
                break
            while run and not self.started:  # what the first token is, only its event tells
                end = run.find(b"\n\n") + 2
                out += self._events(run[:end])
                run = run[end:]
            if is_marked or self._n_top_logprobs is not None:
                out += self._events(run)
            else:
                out.append(run)
        events = b"".join(out)
        return events if self._own_name is None else renamed_events(events, self._own_name)

    @property
    def passes_events(self) -> bool:
        """Whether the events of tokens go on as they are."""
        return self._n_top_logprobs is None and self._own_name is None

    @property
    def ends_plainly(self) -> bool:
        """Whether usage comes in one event, which is not for the client."""
        return not self._wants_usage and self.usage.n_prompts * self.usage.n_choices == 1

    def has_flowed(self, *, has_started: bool, is_done: bool, usage: tuple[int, int] | None) -> None:
        """What went by elsewhere; `usage`: tokens of the prompt and of the answer."""
        self.started |= has_started
        self.done |= is_done
        if usage is not None:
            self.usage.add({"prompt_tokens": usage[0], "completion_tokens": usage[1]})

    @property
    def is_steady(self) -> bool:
        """The first token is there, the last is not, and no event is half here: events pass as they are."""
        is_whole = not self._tail and not self.done and self.error is None
        return self.started and is_whole and self.passes_events

    def _events(self, data: bytes) -> list[bytes]:
        out = []
        for raw in data.split(b"\n\n"):
            n_usage = self.usage.n_events
            event = self._take(raw)
            if event is None:
                continue
            if self._n_top_logprobs is not None:
                self._rewrite_logprobs(event, self._n_top_logprobs)
            elif self.usage.n_events == n_usage:
                out.append(raw + b"\n\n")
                continue
            out.append(event_bytes(event))
        return out

    def _rewrite_logprobs(self, event: dict[str, Any], n_top: int) -> None:
        for choice in event.get("choices") or ():
            if self._is_chat:
                trim_logprobs(choice, n_top)
                continue
            entries = (choice.get("logprobs") or {}).get("content") or []
            index = choice.get("index") or 0
            offset = self._text_offsets.get(index, 0)
            self._text_offsets[index] = offset + sum(len(entry["token"]) for entry in entries)
            choice["logprobs"] = completion_logprobs(entries, n_top, offset) if entries else None

    def end(self) -> bytes:
        """The events after the last token: usage if the client asked, and [DONE]."""
        if self._wants_usage and self.usage_event is not None:
            event = self.usage_event | {"choices": [], "usage": self.usage.as_dict()}
            if self._own_name is not None:
                event["model"] = self._own_name
            return event_bytes(event) + DONE
        return DONE


class AnswerReader(EventReader):
    """For a client that wants the answer whole: decoded events, to be assembled."""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        events = (self._take(raw) for raw in self._cut(data).split(b"\n\n"))
        return [event for event in events if event is not None]
