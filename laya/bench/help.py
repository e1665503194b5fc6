"""Owns: how the help of a bench begins: with what it tells, in the words of its module, for who runs it."""

from __future__ import annotations

import re

_OF_MODULE = re.compile(r"^Owns: (`[^`]+`: )?")


def description(doc: str | None) -> str:
    """Of a parser: a module's docstring without what only its readers need."""
    words = _OF_MODULE.sub("", doc or "")
    return words[:1].upper() + words[1:]
