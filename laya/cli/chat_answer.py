"""Owns: one answer of a chat, from the request to its last token. Knows no screen and no store.

Ctrl-C ends the answer: the connection is closed at once, which tells the server to free the sequence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

from laya.cli.client import ServerClient, parse_event
from laya.errors import LayaError

PieceKind = Literal["text", "reasoning", "progress"]
OnPiece = Callable[[PieceKind, str], None]


@dataclasses.dataclass
class Answer:
    """What came back. `error` is set when the answer broke off; what came before it is kept."""

    text: str = ""
    finish_reason: str | None = None  # stop, length, ...; "stopped" by Ctrl-C; None when it broke off
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    timings: dict[str, Any] = dataclasses.field(default_factory=dict)
    first_token_s: float | None = None  # from the request to the first piece
    decode_s: float = 0.0  # from the first piece to the last
    error: LayaError | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """As the engine measured it, else from the pieces' arrival here."""
        if self.timings.get("predicted_per_second"):
            return float(self.timings["predicted_per_second"])
        n_tokens = self.usage.get("completion_tokens", 0)
        return (n_tokens - 1) / self.decode_s if n_tokens > 1 and self.decode_s > 0 else None

    @property
    def context_tokens(self) -> int | None:
        """Tokens the conversation holds now."""
        if "prompt_tokens" not in self.usage:
            return None
        return int(self.usage["prompt_tokens"]) + int(self.usage.get("completion_tokens", 0))


def ask(client: ServerClient, body: dict[str, Any], on_piece: OnPiece) -> Answer:
    """Stream one answer; never raises for what the server says, nor for Ctrl-C once the request is out."""
    answer = Answer()
    started_s = time.monotonic()
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    events = client.stream_events("/v1/chat/completions", request)
    try:
        for field, value in events:
            if not field:
                on_piece("progress", value)
            elif field == "data" and value == "[DONE]":
                break
            elif field == "data":
                _take(answer, parse_event(value), on_piece, started_s)
        else:
            answer.error = LayaError("The connection ended before the answer did.")
    except LayaError as error:
        answer.error = error
    except KeyboardInterrupt:
        answer.finish_reason = "stopped"
    finally:
        events.close()  # type: ignore[attr-defined]
    return answer


def _take(answer: Answer, event: dict[str, Any], on_piece: OnPiece, started_s: float) -> None:
    answer.usage = event.get("usage") or answer.usage
    answer.timings = event.get("timings") or answer.timings
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        if text or reasoning:
            elapsed_s = time.monotonic() - started_s
            answer.first_token_s = answer.first_token_s or elapsed_s
            answer.decode_s = elapsed_s - answer.first_token_s
        answer.text += text
        if reasoning:
            on_piece("reasoning", reasoning)
        if text:
            on_piece("text", text)
