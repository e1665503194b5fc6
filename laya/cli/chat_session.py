"""Owns: a conversation while it is held: its turns, its model, and what of it is kept. Knows no screen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from laya.cli.chat_answer import Answer, OnPiece, ask
from laya.cli.client import ServerClient
from laya.cli.output import well_formed
from laya.errors import InvalidRequest, LayaError, NotFound
from laya.store import Conversation, Role, Store

TITLE_CHARS = 60
LISTED = 5


@dataclasses.dataclass
class Turn:
    """One thing said."""

    role: Role
    content: str


class Session:
    """One chat. With a store every message is on disk before the next thing happens."""

    def __init__(self, client: ServerClient, store: Store | None, sampling: dict[str, Any]) -> None:
        self.client = client
        self.store = store
        self.sampling = sampling
        self.model = ""
        self.window_tokens: int | None = None
        self.system: str | None = None
        self.turns: list[Turn] = []
        self.conversation_id: int | None = None

    def use_model(self, wanted: str | None) -> None:
        """Speak with this model, else with a loaded one, else with the first. Raises what the server says of it."""
        wanted = well_formed(wanted) if wanted else None
        found = self.client.get(f"/v1/models/{wanted}") if wanted else self._any_model()
        self.model = str(wanted or found["id"])
        self.window_tokens = found.get("context_length") or found.get("max_model_len")
        if self.store and self.conversation_id is not None:
            self.store.change_conversation(self.conversation_id, model=self.model)

    def models(self) -> list[dict[str, Any]]:
        """The server's chat models, loaded ones first."""
        listed = self.client.get("/v1/models")["data"]
        chat = [model for model in listed if model.get("task", "chat") == "chat"]
        return sorted(chat, key=lambda model: not model.get("loaded"))

    def _any_model(self) -> dict[str, Any]:
        models = self.models()
        if not models:
            raise LayaError("The server has no chat model. Get one with `laya pull smollm2`.")
        return models[0]

    def resume(self, which: str) -> Conversation:
        """Go on with a kept conversation: an id, or `latest`. Raises NotFound naming the last ones."""
        assert self.store is not None
        conversation = self._kept(which)
        messages = self.store.messages(conversation.id)
        self.conversation_id = conversation.id
        self.system = next((said.content for said in reversed(messages) if said.role == "system"), None)
        self.turns = [Turn(said.role, said.content) for said in messages if said.role != "system"]
        return conversation

    def _kept(self, which: str) -> Conversation:
        assert self.store is not None
        if which == "latest":
            latest = self.store.latest()
            if latest is None:
                raise NotFound("No conversation is kept yet.", param="--resume")
            return latest
        if not which.isdecimal():
            raise InvalidRequest(f"--resume {which}: expected `latest` or the number of a conversation.")
        try:
            return self.store.conversation(int(which))
        except NotFound as error:
            last = ", ".join(f"{kept.id} ({kept.title[:30]})" for kept in self.store.conversations(LISTED))
            raise NotFound(f"{error.message} The last ones: {last or 'none'}.", param="--resume") from None

    def restart(self) -> None:
        """A new conversation with the same model and system prompt."""
        self.conversation_id, self.turns = None, []

    def set_system(self, text: str | None) -> None:
        """The system prompt from here on; None or nothing takes it away."""
        self.system = well_formed(text) if text else None
        if self.conversation_id is not None:
            self._keep("system", self.system or "")

    def say(self, text: str, on_piece: OnPiece) -> Answer:
        """Send the conversation with this as its last word; both sides are kept."""
        text = well_formed(text)
        self._begin(text)
        self.turns.append(Turn("user", text))
        self._keep("user", text)
        body = self.sampling | {"model": self.model, "messages": self.messages()}
        answer = ask(self.client, body, on_piece)
        answer.text = well_formed(answer.text)
        if answer.text:
            self.turns.append(Turn("assistant", answer.text))
            details = {"usage": answer.usage, "timings": answer.timings}
            self._keep("assistant", answer.text, answer.finish_reason or "error", details)
        return answer

    def messages(self) -> list[dict[str, str]]:
        """The request's messages. A question that never got an answer is left out: templates want them to alternate."""
        said: list[Turn] = []
        for turn in self.turns:
            if said and said[-1].role == turn.role == "user":
                said.pop()
            said.append(turn)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [{"role": turn.role, "content": turn.content} for turn in said]

    def save(self, path: Path) -> None:
        """Write the conversation to a new file: .json as messages, anything else as Markdown. Raises LayaError."""
        said = self.messages()
        text = "\n".join(f"**{message['role']}**\n\n{message['content']}\n" for message in said)
        if path.suffix == ".json":
            text = json.dumps({"model": self.model, "messages": said}, indent=2, ensure_ascii=False) + "\n"
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise InvalidRequest(f"{path} is there already; name another file.") from None
        except OSError as error:
            raise LayaError(f"{path}: {error.strerror}") from None

    def _begin(self, first_words: str) -> None:
        if self.store is None or self.conversation_id is not None:
            return
        title = " ".join(first_words.split())[:TITLE_CHARS]
        self.conversation_id = self.store.create_conversation(self.model, title)
        if self.system:
            self._keep("system", self.system)

    def _keep(
        self, role: Role, content: str, finish_reason: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        if self.store is not None and self.conversation_id is not None:
            self.store.append_message(self.conversation_id, role, content, finish_reason=finish_reason, details=details)
