"""Owns: what every verb may rely on of stdin, stdout and stderr, and how text gets there whole. Knows no verb.

A terminal may not know a character, a disk may be full, a reader may have left and a stream may be closed: none of
that is a fault of a verb, so it is settled here, once.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from contextlib import suppress
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def prepare_streams() -> None:
    """Let no character fail and no stream be missing: results for a closed stdout fail as for a full disk."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # a write fails, as it should
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def drop_stdout() -> None:
    """What is left in the buffer of a stdout that takes nothing more has nowhere to go; Python would try at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """A name as a terminal may show it, in one line: control characters and what is no text by escapes."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def printable_lines(text: str) -> str:
    """As `printable`, for text of several lines that came from elsewhere: line feeds and tabs stay."""
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in "\n\t" else printable(match[0]), text)


def shown(text: str) -> str:
    """A name as rich's markup may hold it: `printable`, and no markup itself."""
    return escape(printable(text))


def well_formed(text: str) -> str:
    """The text without halves of characters (surrogates), which neither JSON in UTF-8 nor a database takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def print_json(value: Any) -> None:
    """A result on stdout, in ASCII: JSON's own escapes stand for what a terminal or a decoder may not know."""
    print(json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=2))


def print_table(console: Console, table: Table) -> None:
    """A table on stdout. A pipe has no width: there every cell is whole, and no line ends in spaces."""
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(file=io.StringIO(), width=10_000, highlight=False)
    wide.print(table)
    for line in wide.file.getvalue().splitlines():  # type: ignore[attr-defined]
        print(line.rstrip())


def knows_unicode(console: Console) -> bool:
    """Whether marks and bars outside ASCII can be shown."""
    return console.encoding.lower().startswith("utf")
