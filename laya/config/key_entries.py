"""Owns: reading `server.api_keys`: where a key's digest comes from, and messages that never show what may be a key.

An entry gives the digest itself, or where the key is: a file (a mounted secret) or the environment. Either way only the
digest goes on from here.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from laya.config.document import Document, KeyPath, dotted
from laya.config.keys import MIN_KEY_CHARS, check_priorities, hash_key
from laya.config.units import parse_moment
from laya.errors import ConfigError

KEY_COMMAND = "`laya config hash-key` prints the entry to put here; the key itself is never kept"
_PLAIN = ("key", "api_key", "token", "value")


def key_entries(document: Document, path: KeyPath, value: Any) -> list[tuple[KeyPath, Any]]:
    """Each entry with its place, its digest decided. Raises ConfigError; no message shows a value."""
    if value is not None and not isinstance(value, list):
        raise document.error(path, f"{dotted(path)}: expected a list of name and sha256. {KEY_COMMAND}")
    return [((*path, index), _entry(document, (*path, index), entry)) for index, entry in enumerate(value or [])]


def _entry(document: Document, path: KeyPath, entry: Any) -> Any:
    if isinstance(entry, str):
        raise document.error(path, f"{dotted(path)} is a plain key. {KEY_COMMAND}")
    if not isinstance(entry, dict):
        return entry
    sources = [name for name in ("sha256", "key_file", *_PLAIN) if entry.get(name) is not None]
    if len(sources) > 1:
        raise document.error(
            (*path, sources[1]), f"{dotted(path)}: {sources[0]} and {sources[1]}; one of them is enough"
        )
    entry = _with_expiry(document, path, entry)
    try:
        check_priorities(entry.get("priority"), entry.get("max_priority"))
    except ConfigError as error:
        raise document.error((*path, "priority"), f"{dotted(path)}: {error.message}") from None
    if "sha256" in sources:
        return entry | {"sha256": _digest(document, (*path, "sha256"), entry["sha256"])}
    if "key_file" in sources:
        return entry | {"sha256": _hashed(document, (*path, "key_file"), _from_file(document, path, entry["key_file"]))}
    if sources:
        where = (*path, sources[0])
        if where not in document.written:
            raise document.error(where, f"{dotted(where)} is a plain key. {KEY_COMMAND}")
        kept = {name: value for name, value in entry.items() if name != sources[0]}
        return kept | {"sha256": _hashed(document, where, str(entry[sources[0]]))}
    return entry


def _digest(document: Document, path: KeyPath, digest: Any) -> str:
    if not isinstance(digest, str) or len(digest) != 64 or set(digest.lower()) - set("0123456789abcdef"):
        raise document.error(path, f"{dotted(path)} is not a SHA-256 (64 hex digits). {KEY_COMMAND}")
    return digest.lower()


def _from_file(document: Document, path: KeyPath, name: Any) -> str:
    where = (*path, "key_file")
    if not isinstance(name, str) or not name:
        raise document.error(where, f"{dotted(where)}: expected the name of a file")
    try:
        return (document.folder.absolute() / Path(name).expanduser()).read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise document.error(where, f"{dotted(where)}: {name} is not text") from None
    except OSError as error:
        raise document.error(where, f"{dotted(where)}: {name}: {error.strerror}") from None


def _hashed(document: Document, path: KeyPath, key: str) -> str:
    if len(key) < MIN_KEY_CHARS or any(letter.isspace() for letter in key):
        raise document.error(
            path,
            f"{dotted(path)}: a key is one word of {MIN_KEY_CHARS} characters or more; `laya config hash-key` makes it",
        )
    return hash_key(key)


def _with_expiry(document: Document, path: KeyPath, entry: dict[str, Any]) -> dict[str, Any]:
    """YAML reads an unquoted day as a date; here it is the text that it was."""
    expires = entry.get("expires")
    if isinstance(expires, (datetime.date, datetime.datetime)):
        expires = expires.isoformat()
    if isinstance(expires, str):
        try:
            parse_moment(expires)
        except ConfigError as error:
            raise document.error((*path, "expires"), f"{dotted(path)}.expires: {error.message}") from None
    return entry | {"expires": expires} if expires is not None else entry
