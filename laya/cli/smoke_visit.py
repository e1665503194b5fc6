"""Owns: one run of `laya smoke` against one server: whom it asks, and what checks hand on. Knows no check.

A check raises Wrong for an answer that is not right and Skipped where there is nothing to try.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from laya.cli.client import ServerClient
from laya.errors import LayaError

ANSWER_TIMEOUT_S = 120.0
MAX_TOKENS = 12
_QUESTION = "Name three colours."


class Wrong(Exception):
    """An answer that is not what it should be."""


class Skipped(Exception):
    """Nothing to try here."""


class Check(msgspec.Struct, frozen=True):
    """A part of the server. Without an essential one the rest can't be tried."""

    name: str
    run: Callable[[Visit], str]
    is_essential: bool = False


class Visit:
    """One run against one server: whom it asks, and what earlier checks left for later ones."""

    def __init__(self, client: ServerClient, asked: str | None = None) -> None:
        self.client = client
        self.asked = asked
        self.models: list[dict[str, Any]] = []
        self.model: dict[str, Any] = {}
        self.whole: dict[str, Any] = {}
        self.streamed: list[dict[str, Any]] = []

    @property
    def model_id(self) -> str:
        return str(self.model.get("id", ""))

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A chat body, short and at temperature 0."""
        message = {"role": "user", "content": _QUESTION}
        return {"model": self.model_id, "messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0} | fields

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer to `body`."""
        answer: dict[str, Any] = self.client.post(path, body, timeout_s=ANSWER_TIMEOUT_S)
        return answer

    def refusal(self, body: dict[str, Any]) -> LayaError:
        """The error that a chat body must lead to. Raises Wrong when it is answered."""
        try:
            self.ask("/v1/chat/completions", body)
        except LayaError as error:
            return error
        raise Wrong("it was answered")

    def state(self) -> dict[str, Any]:
        """The server's state, and under "model" that of the model."""
        state: dict[str, Any] = self.client.get("/admin/state")
        state["model"] = next(model for model in state["models"] if model["id"] == self.model_id)
        return state

    def busy_slots(self) -> int:
        """How many sequences the engine itself says it computes; 0 for an engine that doesn't tell."""
        try:
            slots = self.client.get(f"/admin/models/{self.model_id}/slots")["slots"]
        except LayaError as error:
            if error.http_status in (404, 501):
                return 0
            raise
        return sum(bool(slot.get("is_processing")) for slot in slots)

    def leave(self, events: Iterator[tuple[str, str]]) -> None:
        """Close the connection that a stream comes on."""
        assert isinstance(events, Generator), "stream_events is a generator"
        events.close()


def require(is_right: object, otherwise: str) -> None:
    """Raise Wrong unless it is."""
    if not is_right:
        raise Wrong(otherwise)
