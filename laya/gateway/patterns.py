"""Owns: regular expressions as an engine can hold an answer to them: the same language in the notation it knows.

llama.cpp passes over a whole pattern in which it meets one thing that it doesn't know, even `\\d`. So what has another
form is given that form, and the rest is told apart. Knows no schema.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|\(\?:|\(\?|\[\^?|.", re.S)
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " "}
# A text of JSON can't hold these as they are, and the engine would write them so. \s is a mere space for that.
_NOT_IN_JSON = r"\x22\x5c\x01-\x1f"
_WHITE = "ntr"
_MARKS = frozenset("^$.[]()|{}*+?")  # the engine knows them with a backslash outside of [...]


def engine_pattern(pattern: str) -> str | None:
    """The pattern, or a narrower one, in the engine's notation; None where it has none."""
    first, *tokens = _TOKEN.findall(pattern) or [""]
    if first != "^" or not tokens or tokens.pop() != "$" or '"' in tokens or "\\\\" in tokens:
        return None
    out = ["^"]
    opened, before = "", ""  # the [ or [^ that is open; the token before
    for token in tokens:
        said = _in_class(token, before, out[-1], opened) if opened else _outside(token, before)
        if said is None:
            return None
        if opened and token == "]":
            opened = ""
        elif not opened and token[0] == "[":
            opened = token
        if said:
            out.append(said)
        before = token
    return None if opened else "".join([*out, "$"])


def _outside(token: str, before: str) -> str | None:
    if token == "?" and before in ("+", "*", "?", "}"):
        return ""  # lazy: another way to find the same texts
    if token in ("^", "$", "(?", "\\") or (token == "+" and before in ("+", "*", "?", "}")):
        return None
    if token == ".":
        return f"[^{_NOT_IN_JSON}]"
    if len(token) != 2 or token[0] != "\\":
        return token
    letter = token[1]
    if letter.lower() in _CLASSES:
        held = _CLASSES[letter.lower()]
        return f"[^{held}{_NOT_IN_JSON}]" if letter.isupper() else f"[{held}]"
    return token if letter in _MARKS else _code(letter)


def _in_class(token: str, before: str, said_before: str, opened: str) -> str | None:
    if token == "]":
        if opened == "[^":
            return _NOT_IN_JSON + token
        return None if said_before == opened else token  # nothing is left in it
    is_after_class = len(before) == 2 and before[0] == "\\" and before[1] in _CLASSES
    if token == "-" and is_after_class:
        return r"\x2d"
    if token[0] == "[":
        return r"\x5b" + token[1:]
    if len(token) != 2 or token[0] != "\\":
        return token
    letter = token[1]
    if letter in _CLASSES:
        return None if before == "-" and said_before == "-" else _CLASSES[letter]
    return "" if letter in _WHITE else _code(letter)


def _code(letter: str) -> str | None:
    """An escaped mark by its number. Letters and digits mean something that has no other form."""
    return f"\\x{ord(letter):02x}" if letter.isascii() and not letter.isalnum() else None
