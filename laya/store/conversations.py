"""Owns: conversations and their messages. Knows no model, no server."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import msgspec
import peewee

from laya.errors import NotFound
from laya.store.database import Tables

Role = Literal["system", "user", "assistant", "tool"]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation, without its messages."""

    id: int
    model: str
    title: str
    created_s: float  # seconds since 1970
    updated_s: float


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message as it was said."""

    id: int
    role: Role
    content: str
    finish_reason: str | None  # of an answer: stop, length, or why it ended early
    details: dict[str, Any]  # usage, timings
    created_s: float


class _ConversationRow(peewee.Model):
    id = peewee.AutoField()
    model = peewee.TextField()
    title = peewee.TextField()
    created_s = peewee.DoubleField()
    updated_s = peewee.DoubleField()

    class Meta:
        table_name = "conversation"


class _MessageRow(peewee.Model):
    id = peewee.AutoField()
    conversation_id = peewee.IntegerField()
    role = peewee.TextField()
    content = peewee.TextField()
    finish_reason = peewee.TextField(null=True)
    details = peewee.TextField()
    created_s = peewee.DoubleField()

    class Meta:
        table_name = "message"


class ConversationTables(Tables):
    """Conversations, newest first; every method is one transaction."""

    def create_conversation(self, model: str, title: str) -> int:
        """Id of a new, empty conversation."""
        now_s = time.time()
        row = {"model": _whole(model), "title": _whole(title), "created_s": now_s, "updated_s": now_s}
        with self._faults():
            return int(_ConversationRow.insert(row).execute(self._database))

    def append_message(
        self,
        conversation_id: int,
        role: Role,
        content: str,
        *,
        finish_reason: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> int:
        """Id of the new last message; on disk when this returns. Raises NotFound."""
        now_s = time.time()
        row = {
            "conversation_id": conversation_id,
            "role": role,
            "content": _whole(content),
            "finish_reason": finish_reason,
            "details": json.dumps(details or {}),
            "created_s": now_s,
        }
        of_this = _ConversationRow.id == conversation_id
        with self._faults(), self._writing():
            if not _ConversationRow.update(updated_s=now_s).where(of_this).execute(self._database):
                raise _no_conversation(conversation_id)
            return int(_MessageRow.insert(row).execute(self._database))

    def change_conversation(self, conversation_id: int, *, model: str) -> None:
        """The model that goes on with the conversation. Raises NotFound."""
        of_this = _ConversationRow.id == conversation_id
        with self._faults():
            if not _ConversationRow.update(model=_whole(model)).where(of_this).execute(self._database):
                raise _no_conversation(conversation_id)

    def conversations(self, limit: int = 20) -> list[Conversation]:
        """The last conversations, the one spoken in last first."""
        newest = _ConversationRow.select().order_by(_ConversationRow.updated_s.desc(), _ConversationRow.id.desc())
        with self._faults():
            return [_conversation(row) for row in newest.limit(limit).execute(self._database)]

    def latest(self) -> Conversation | None:
        """The conversation spoken in last."""
        found = self.conversations(1)
        return found[0] if found else None

    def conversation(self, conversation_id: int) -> Conversation:
        """One conversation. Raises NotFound."""
        query = _ConversationRow.select().where(_ConversationRow.id == conversation_id)
        with self._faults():
            for row in query.execute(self._database):
                return _conversation(row)
        raise _no_conversation(conversation_id)

    def messages(self, conversation_id: int) -> list[Message]:
        """Every message in the order it was said. Raises NotFound."""
        self.conversation(conversation_id)
        query = _MessageRow.select().where(_MessageRow.conversation_id == conversation_id).order_by(_MessageRow.id)
        with self._faults():
            return [_message(row) for row in query.execute(self._database)]

    def delete(self, conversation_id: int) -> None:
        """Forget a conversation and its messages. Raises NotFound."""
        query = _ConversationRow.delete().where(_ConversationRow.id == conversation_id)
        with self._faults():
            if not query.execute(self._database):
                raise _no_conversation(conversation_id)


def _whole(text: str) -> str:
    """The text without halves of characters, which UTF-8 cannot hold: what is kept may have come from anywhere."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _no_conversation(conversation_id: int) -> NotFound:
    return NotFound(f"There is no conversation {conversation_id}.", param="conversation")


def _conversation(row: Any) -> Conversation:
    return Conversation(id=row.id, model=row.model, title=row.title, created_s=row.created_s, updated_s=row.updated_s)


def _message(row: Any) -> Message:
    return Message(
        id=row.id,
        role=row.role,
        content=row.content,
        finish_reason=row.finish_reason,
        details=json.loads(row.details),
        created_s=row.created_s,
    )
