"""Owns: the answer of one turn in the Responses API: its output items as they grow, the events that tell it, its end.

Fed with what chat events carry; a whole chat answer is one such delta. The order of events is OpenAI's: an item is
opened, its parts or arguments come, it is closed before the next one is opened. Pure: no store, no engine, no socket.
"""

from __future__ import annotations

import copy
import time
from typing import Any, Literal

import msgspec

from laya.errors import LayaError
from laya.gateway.assemble import encode
from laya.gateway.fields import without_nulls
from laya.gateway.responses_items import Item, new_id
from laya.gateway.responses_request import Create

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PART_OF = {"message": "output_text", "reasoning": "reasoning_text"}
_ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "safety_identifier",
           "temperature", "top_p", "user")  # fmt: skip


def event_text(event: Event) -> bytes:
    """An event as it goes over the wire."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class Turn:
    """One response in the making. Its methods give the events that tell what has changed."""

    def __init__(self, asked: Create) -> None:
        self.asked = asked
        self.id = new_id("resp")
        self.created_s = int(time.time())
        self.model = asked.model or ""
        self.status: Status = "in_progress"
        self.output: list[Item] = []
        self._usage: dict[str, Any] | None = None
        self._finish: str | None = None
        self._error: LayaError | None = None
        self._n_events = 0
        self._call = -1  # which of the engine's calls the last item is
        self._texts: list[str] = []  # of the last item, to be joined at its end
        self._completed_s: int | None = None

    def begin(self) -> list[Event]:
        return [self._event(f"response.{name}", response=self.as_dict()) for name in ("created", "in_progress")]

    def add(self, event: Event) -> list[Event]:
        """A chat event of the engine."""
        self.model = event.get("model") or self.model
        if usage := event.get("usage"):
            self._usage = usage
        events: list[Event] = []
        for choice in event.get("choices") or ():
            events += self._add_delta(choice.get("delta") or {}, choice.get("logprobs"))
            self._finish = choice.get("finish_reason") or self._finish
        return events

    def add_whole(self, answer: dict[str, Any]) -> None:
        """A whole chat answer."""
        choices = []
        for choice in answer.get("choices") or ():
            delta = dict(choice.get("message") or {})
            calls = delta.get("tool_calls") or ()
            delta["tool_calls"] = [{"index": index} | call for index, call in enumerate(calls)]
            choices.append(choice | {"delta": delta})
        self.add(answer | {"choices": choices})

    def finish(self) -> list[Event]:
        """The engine has said all: the events that close what is open. The last event is `last`, after the commit."""
        reason = _INCOMPLETE.get(self._finish or "")
        events = self._close("incomplete" if reason else "completed")
        self.status = "incomplete" if reason else "completed"
        self._completed_s = None if reason else int(time.time())
        return events

    def fail(self, error: LayaError) -> None:
        """It broke off; what was said so far stays in the output."""
        n_events = self._n_events
        self._close("incomplete")
        self._n_events = n_events  # nothing but `last` tells of it
        self.status, self._error, self._completed_s = "failed", error, None

    def last(self) -> Event:
        """The event that ends the stream."""
        return self._event(f"response.{self.status}", response=self.as_dict())

    # items
    def _add_delta(self, delta: dict[str, Any], logprobs: Any) -> list[Event]:
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content"):
            events += self._text("reasoning", reasoning, [])
        if content := delta.get("content"):
            events += self._text("message", content, (logprobs or {}).get("content") or [])
        for call in delta.get("tool_calls") or ():
            events += self._add_call(call)
        return events

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[Event]:
        events = [] if self._is_open(kind) else self._open_text(kind)
        self._texts.append(text)
        more: dict[str, Any] = {}
        if kind == "message":
            entries = [_logprob(entry) for entry in logprobs]
            more = {"logprobs": entries}
            if entries:
                self.output[-1]["content"][0]["logprobs"] += entries
        name = _PART_OF[kind]
        events.append(self._event(f"response.{name}.delta", **self._place(0), delta=text, **more))
        return events

    def _open_text(self, kind: str) -> list[Event]:
        item: Item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        if kind == "message":
            item = {"id": new_id("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
        events = self._open(item)
        part: Item = {"type": _PART_OF[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        events.append(self._event("response.content_part.added", **self._place(0), part=copy.deepcopy(part)))
        item["content"].append(part)
        return events

    def _add_call(self, call: dict[str, Any]) -> list[Event]:
        index, function = int(call.get("index") or 0), call.get("function") or {}
        events: list[Event] = []
        if not (self._is_open("function_call") and index == self._call):
            item = {
                "id": new_id("fc"),
                "type": "function_call",
                "call_id": call.get("id") or new_id("call"),
                "name": function.get("name") or "",
                "arguments": "",
                "status": "in_progress",
            }
            events = self._open(item)
            self._call = index
        if arguments := function.get("arguments"):
            self._texts.append(arguments)
            events.append(self._event("response.function_call_arguments.delta", **self._place(), delta=arguments))
        return events

    def _is_open(self, kind: str) -> bool:
        return bool(self.output) and self.output[-1]["type"] == kind and self.output[-1]["status"] == "in_progress"

    def _open(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self.output.append(item)
        shown = copy.deepcopy(item)  # as it is now: it goes on growing
        events.append(self._event("response.output_item.added", output_index=len(self.output) - 1, item=shown))
        return events

    def _close(self, status: Status) -> list[Event]:
        """The events that close the last item, where it is open."""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return []
        item, text = self.output[-1], "".join(self._texts)
        self._texts = []
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            done: Event = {"name": item["name"], "arguments": text}
            events.append(self._event("response.function_call_arguments.done", **self._place(), **done))
        else:
            part, place = item["content"][0], self._place(0)
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append(self._event(f"response.{part['type']}.done", **place, text=text, **more))
            events.append(self._event("response.content_part.done", **place, part=part))
        events.append(self._event("response.output_item.done", output_index=len(self.output) - 1, item=item))
        return events

    # what is told
    def _place(self, content_index: int | None = None) -> Event:
        place: Event = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return place if content_index is None else place | {"content_index": content_index}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1} | fields

    def as_dict(self) -> dict[str, Any]:
        """The response object as it is now."""
        asked = self.asked
        reason = _INCOMPLETE.get(self._finish or "") if self.status == "incomplete" else None
        reasoning = asked.reasoning
        form = asked.text.format if asked.text is not None and asked.text.format is not None else None
        error = self._error
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": self._completed_s,
            "status": self.status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self.model,
            "output": list(self.output),
            "usage": None if self._usage is None else _usage(self._usage),
            "background": False,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
            "store": asked.is_kept,
            "text": {"format": {"type": "text"} if form is None else _told(form)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [msgspec.to_builtins(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": asked.truncation or "disabled",
        } | {name: getattr(asked, name) for name in _ECHOED}


def told_again(document: dict[str, Any]) -> list[Event]:
    """The events of a finished response, each text and each call in one piece."""
    events: list[Event] = []

    def tell(kind: str, **fields: Any) -> None:
        events.append({"type": kind, "sequence_number": len(events)} | fields)

    now = document | {"status": "in_progress", "output": [], "usage": None, "completed_at": None,
                      "incomplete_details": None}  # fmt: skip
    for name in ("created", "in_progress"):
        tell(f"response.{name}", response=now)
    for index, item in enumerate(document["output"]):
        tell_item = {"item_id": item["id"], "output_index": index}
        empty: Item = {"content": []} if "content" in item else {"arguments": ""}
        opened = item | empty | {"status": "in_progress"}
        tell("response.output_item.added", output_index=index, item=opened)
        if item["type"] == "function_call":
            name, arguments = "response.function_call_arguments", item["arguments"]
            tell(name + ".delta", **tell_item, delta=arguments)
            tell(name + ".done", **tell_item, name=item["name"], arguments=arguments)
        for part_index, part in enumerate(item.get("content") or ()):
            place = tell_item | {"content_index": part_index}
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            tell("response.content_part.added", **place, part=part | {key: [] for key in more} | {"text": ""})
            tell(f"response.{part['type']}.delta", **place, delta=part["text"], **more)
            tell(f"response.{part['type']}.done", **place, text=part["text"], **more)
            tell("response.content_part.done", **place, part=part)
        tell("response.output_item.done", output_index=index, item=item)
    tell(f"response.{document['status']}", response=document)
    return events


def _told(struct: msgspec.Struct) -> dict[str, Any]:
    return without_nulls(msgspec.to_builtins(struct))


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    tops = [{name: top.get(name) for name in ("token", "bytes", "logprob")} for top in entry.get("top_logprobs") or ()]
    return {name: entry.get(name) for name in ("token", "bytes", "logprob")} | {"top_logprobs": tops}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    n_in, n_out = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": n_in,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": n_out,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": n_in + n_out,
    }
