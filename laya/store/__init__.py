"""Owns: what outlives the process in one SQLite file: conversations, corrections, API keys, responses, usage.

One module per group of tables; `database` opens the file, `migrations` brings it to the newest form. Knows no room.
"""

from laya.store.conversations import Conversation, Message, Role
from laya.store.corrections import LearnedCorrection
from laya.store.keys import no_key, secret_taken, stamp_of
from laya.store.responses import KeptTurn
from laya.store.responses_url import Responses, open_responses
from laya.store.store import Store
from laya.store.usage import Usage

__all__ = [
    "Conversation",
    "KeptTurn",
    "LearnedCorrection",
    "Message",
    "Responses",
    "Role",
    "Store",
    "Usage",
    "no_key",
    "open_responses",
    "secret_taken",
    "stamp_of",
]
