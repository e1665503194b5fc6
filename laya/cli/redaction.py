"""Owns: taking secrets, people's paths and prompts out of text that leaves this machine. Knows no file format.

What is known to be secret here is replaced wherever it stands, in any spelling that JSON or a URL gives it; what looks
like a secret is replaced too. Too much hidden is better than too little: the reader needs figures, not names.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

SECRET = "(secret)"
LEFT_OUT = "(text left out)"
SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth|cookie|dsn|webhook", re.IGNORECASE)
MIN_SECRET_CHARS = 6  # a shorter one stands in every text
MIN_NAME_CHARS = 4
_COMMON_NAMES = frozenset(
    {"root", "user", "laya", "admin", "ubuntu", "debian", "fedora", "localhost",
     "host", "server", "desktop", "laptop", "machine", "computer", "home", "model"}
)  # fmt: skip

_PATTERNS = [
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"(authorization[\"']?\s*[:=]\s*[\"']?)[^\r\n\"']+", rf"\1{SECRET}"),
        (r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", rf"\1 {SECRET}"),
        (r"\b(laya-|sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abpr]-)[\w-]{10,}", SECRET),
        (r"\b(AKIA|ASIA)[A-Z0-9]{16}\b", SECRET),
        (r"\beyJ[\w-]{8,}\.[\w-]+\.?[\w-]*", SECRET),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", SECRET),
        (r"(\b[a-z][a-z0-9+.-]*://)[^/\s@\"']+@", rf"\1{SECRET}@"),
        (
            r"((?:api[_-]?key|access[_-]?key|token|secret|password|passwd|signature|credential)s?[\"']?\s*[=:]\s*[\"']?)"
            r"[^\s\"',&;}\])(]{8,}",
            rf"\1{SECRET}",
        ),
        (r"(/(?:home|Users)/)[^/\s\"':,;)\]]+", r"~"),
        (r"(?<![\w.~-])/root(?=[/\s\"':,;)\]]|$)", "~"),
    )
]
_LOG_LINE = re.compile(r"^(?:laya: |[\d.:]+ [DIWE] |\[?\d{4}-\d\d-\d\d|(?:INFO|WARNING|ERROR|DEBUG)\b)")
_DEBUG_LINE = re.compile(r"^(?:[\d.:]+ D |DEBUG\b)")
_SAID = re.compile(
    r"[\"'](?:content|prompt|messages|input|text|query|documents|tools|arguments)[\"']\s*:"
    r"|\b(?:prompt|request|response|content|messages|input|generated text|formatted|body)\s*[:=]\s*(?=[\"'{\[<])"
    r"|<\|\w+\|>",
    re.IGNORECASE,
)


class Redactor:
    """Hides what is secret on one machine."""

    def __init__(self, secrets: Iterable[str], homes: Mapping[str, str]) -> None:
        """secrets: texts to hide. homes: folder -> what is shown in its place."""
        spellings = {spelling for secret in secrets for spelling in _spellings(secret)}
        replaced = dict.fromkeys(spellings, SECRET)
        for folder, shown in homes.items():
            if len(folder.rstrip("/")) > 1:
                replaced |= dict.fromkeys(_spellings(folder.rstrip("/")), shown)
        self._replaced = replaced
        longest_first = sorted(replaced, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        names = [name for name in _names() if len(name) >= MIN_NAME_CHARS and name.lower() not in _COMMON_NAMES]
        self._names = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)" if names else r"(?!)")

    def text(self, text: str) -> str:
        """The text without what is secret or tells who uses this machine."""
        text = self._known.sub(lambda match: self._replaced[match[0]], text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return self._names.sub("(name)", text)

    def log(self, text: str) -> str:
        """As `text`, for what an engine wrote: what users said to a model goes, with the lines it runs over."""
        lines = []
        is_cut = False
        for line in text.splitlines():
            if _LOG_LINE.match(line):
                is_cut = False
            if is_cut or _DEBUG_LINE.match(line):
                continue
            said = _SAID.search(line)
            if said is not None:
                is_cut = True
                line = f"{line[: said.start()]}{LEFT_OUT}"
            lines.append(line)
        return self.text("\n".join(lines) + "\n" if lines else "")


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Values of variables whose name says that they are secret."""
    return [value for name, value in environ.items() if SECRET_NAME.search(name) and _can_be_secret(value)]


def _can_be_secret(value: str) -> bool:
    """Not a switch, a small number or a path that such a variable also may hold."""
    return len(value) >= MIN_SECRET_CHARS and not Path(value).exists()


def _spellings(text: str) -> set[str]:
    if len(text) < MIN_SECRET_CHARS:
        return set()
    return {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], quote(text, safe="")}


def _names() -> list[str]:
    """Who uses this machine, and what it is called."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        user = ""
    return [user, socket.gethostname()]
