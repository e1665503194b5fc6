"""Owns: reading a text that the user gave. Knows no model."""

from __future__ import annotations

import codecs
from pathlib import Path

from laya.errors import ConfigError

_UTF8_BYTES = 4  # the most of one character


def given_text(flag: str, name: str, most_characters: int | None = None, hint: str = "") -> str:
    """The text of a file, no more of it than asked for. Raises ConfigError for one that is missing, binary or blank."""
    param = flag.lstrip("-")
    try:
        with Path(name).expanduser().open("rb") as file:
            raw = file.read(-1 if most_characters is None else _UTF8_BYTES * most_characters)
            is_whole = not file.read(1)
    except OSError as error:
        raise ConfigError(f"{flag} {name}: {error.strerror}.{hint}", param=param) from None
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(raw, final=is_whole)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag} {name}: no text in UTF-8: byte {error.start} is {raw[error.start]:#04x}.", param=param
        ) from None
    if "\0" in text:
        raise ConfigError(f"{flag} {name}: no text: byte {raw.index(0)} is 0.", param=param)
    if is_whole and not text.strip():
        raise ConfigError(f"{flag} {name}: there is no text in it.", param=param)
    return text[:most_characters]
