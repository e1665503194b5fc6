"""Owns: the whole answer that a client asked for, put together from the engine's stream, and the repair of what the
engine's streams get wrong (usage per choice, chat-form logprobs on completions). Pure: events in, answer out.

An engine whose slot is freed only by a *streaming* client that leaves is always asked for a stream; this makes the
whole answer of it, with every field the engine's own whole answer would have: tool calls, reasoning, logprobs,
usage summed over the choices, timings.
"""

from __future__ import annotations

from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()
MOST_COUNTED_TOKENS = 2**40  # of one answer; who says more does not count


class UsageSum:
    """Usage over all choices: llama.cpp reports each choice (or each prompt of a list) in an event of its own."""

    __slots__ = ("cached_tokens", "completion_tokens", "n_choices", "n_events", "n_prompts", "prompt_tokens")

    def __init__(self, n_prompts: int = 1, n_choices: int = 1) -> None:
        self.n_prompts = n_prompts
        self.n_choices = n_choices  # of each prompt: they share it
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.n_events = 0

    def add(self, usage: dict[str, Any]) -> None:
        self.n_events += 1
        prompt_tokens = _counted(usage.get("prompt_tokens"))
        details = usage.get("prompt_tokens_details")
        cached_tokens = _counted(details.get("cached_tokens")) if isinstance(details, dict) else 0
        if self.n_prompts > 1:
            self.prompt_tokens += prompt_tokens
            self.cached_tokens += cached_tokens
        else:  # what a second choice finds cached is what the first one has just read
            self.prompt_tokens = max(self.prompt_tokens, prompt_tokens)
            self.cached_tokens = min(self.cached_tokens, cached_tokens) if self.n_events > 1 else cached_tokens
        self.completion_tokens += _counted(usage.get("completion_tokens"))

    def as_dict(self) -> dict[str, Any]:
        n_times = self.n_choices if self.n_prompts > 1 and self.n_events > 1 else 1  # that each prompt was counted
        prompt_tokens = self.prompt_tokens // n_times
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens // n_times},
        }


def _counted(said: Any) -> int:
    """A number of tokens; 0 for what is none."""
    return said if isinstance(said, int) and 0 <= said <= MOST_COUNTED_TOKENS else 0


class _Choice:
    __slots__ = ("content", "finish_reason", "logprobs", "reasoning", "role", "text", "text_logprobs", "tool_calls")

    def __init__(self) -> None:
        self.role = "assistant"
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.text: list[str] = []
        self.tool_calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[Any] = []
        self.text_logprobs: dict[str, list[Any]] = {}  # in the form of /v1/completions, from engines that have it
        self.finish_reason: str | None = None


class Assembler:
    """Feed it decoded stream events; `answer()` is the whole answer."""

    def __init__(self, *, chat: bool, n_top_logprobs: int | None) -> None:
        self.chat = chat
        self.n_top_logprobs = n_top_logprobs  # None: logprobs were not asked for, or pass as they are
        self.choices: dict[int, _Choice] = {}
        self.meta: dict[str, Any] = {}
        self.timings: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None  # why this is no answer

    def add(self, event: dict[str, Any]) -> None:
        """One event. Progress and usage events carry no choice text and only leave their timings."""
        try:
            self._add(event)
        except (AttributeError, TypeError, ValueError):
            self.error = {"message": "the engine sent an event of another form than OpenAI's"}

    def _add(self, event: dict[str, Any]) -> None:
        if not self.meta:
            self.meta = {
                name: event[name] for name in ("id", "created", "model", "system_fingerprint") if name in event
            }
        if timings := event.get("timings"):
            self.timings = timings
        if "prompt_progress" in event:
            return
        for part in event.get("choices") or ():
            self._add_choice(part)

    def _add_choice(self, part: dict[str, Any]) -> None:
        choice = self.choices.setdefault(int(part.get("index") or 0), _Choice())
        if self.chat and self.n_top_logprobs is not None:
            trim_logprobs(part, self.n_top_logprobs)
        if reason := part.get("finish_reason"):
            choice.finish_reason = reason
        logprobs = part.get("logprobs") or {}
        if entries := logprobs.get("content"):
            choice.logprobs.extend(entries)
        elif "tokens" in logprobs:
            for name, values in logprobs.items():
                choice.text_logprobs.setdefault(name, []).extend(values or ())
        if text := part.get("text"):
            choice.text.append(text)
        delta = part.get("delta") or {}
        if content := delta.get("content"):
            choice.content.append(content)
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):  # the second of newer vLLMs
            choice.reasoning.append(reasoning)
        for call in delta.get("tool_calls") or ():
            _merge_call(choice.tool_calls, call)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Why each choice ended, in their order."""
        reasons = (self.choices[index].finish_reason for index in sorted(self.choices))
        return tuple(reason for reason in reasons if reason is not None)

    def answer(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer as a JSON-ready dict (OpenAI's chat.completion or text_completion)."""
        render = self._chat_choice if self.chat else self._text_choice
        body = {
            "id": self.meta.get("id", ""),
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.meta.get("created", 0),
            "model": self.meta.get("model", ""),
            "choices": [render(index, self.choices[index]) for index in sorted(self.choices)],
            "usage": usage,
        }
        if fingerprint := self.meta.get("system_fingerprint"):
            body["system_fingerprint"] = fingerprint
        if self.timings:
            body["timings"] = self.timings
        return body

    def answer_as_event(self) -> dict[str, Any]:
        """The whole answer as one stream event, for `enable_streaming: false` and a client that asked for a stream."""
        body = self.answer({})
        del body["usage"]
        if self.chat:
            body["object"] = "chat.completion.chunk"
            for choice in body["choices"]:
                choice["delta"] = choice.pop("message")
                for index, call in enumerate(choice["delta"].get("tool_calls") or ()):
                    call["index"] = index
        return body

    def _chat_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        calls = [choice.tool_calls[key] for key in sorted(choice.tool_calls)]
        content = "".join(choice.content)
        message: dict[str, Any] = {"role": choice.role, "content": None if calls and not content else content}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if calls:
            message["tool_calls"] = calls
        logprobs = {"content": choice.logprobs, "refusal": None} if choice.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _text_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = choice.text_logprobs or None
        if self.n_top_logprobs is not None and logprobs is None:
            logprobs = completion_logprobs(choice.logprobs, self.n_top_logprobs, 0)
        text = "".join(choice.text)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _merge_call(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    """Tool calls arrive as deltas by `index`: the first has id and name, the rest pieces of the arguments."""
    index = int(delta.get("index") or 0)
    call = calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    if delta.get("id"):
        call["id"] = delta["id"]
    function = delta.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def trim_logprobs(choice: dict[str, Any], n_top: int) -> None:
    """A chat event's choice without alternatives that were not asked for, and without tokens that are not in the text:
    llama.cpp takes out what is around an answer that is held to a schema, but for its logprobs."""
    logprobs, delta = choice.get("logprobs"), choice.get("delta") or {}
    if not logprobs:
        return
    if not any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
        choice["logprobs"] = None
        return
    for entry in logprobs.get("content") or ():
        entry["top_logprobs"] = (entry.get("top_logprobs") or [])[:n_top]


def completion_logprobs(entries: list[dict[str, Any]], n_top: int, text_offset: int) -> dict[str, Any]:
    """Chat-form logprobs -> the form of /v1/completions (llama.cpp gives the chat form on both)."""
    offsets = []
    for entry in entries:
        offsets.append(text_offset)
        text_offset += len(entry["token"])
    top = [{item["token"]: item["logprob"] for item in entry.get("top_logprobs", ())[:n_top]} for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": top if n_top else None,
        "text_offset": offsets,
    }


def encode(body: dict[str, Any]) -> bytes:
    return _ENCODER.encode(body)
