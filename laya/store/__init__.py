"""Owns: what outlives the process in one SQLite file: conversations; later responses, usage, learned corrections.

One module per group of tables; `database` opens the file, `migrations` brings it to the newest form. Knows no room.
"""

from laya.store.conversations import Conversation, Message, Role
from laya.store.store import Store

__all__ = ["Conversation", "Message", "Role", "Store"]
