"""Owns: the form of Ollama's Modelfile, and of the files that set its environment. Knows no key of Laya's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from laya.config.document import Document, KeyPath, read_text
from laya.errors import ConfigError, nearest

INSTRUCTIONS = (
    "from", "parameter", "template", "system", "adapter", "draft", "license", "message", "renderer", "parser",
    "requires", "capability",
)  # fmt: skip
_ASSIGNMENT = re.compile(r'\s*(?:export\s+|Environment\s*=\s*)?["\']?([A-Z][A-Z0-9_]*)=(.*)')


class Instruction(NamedTuple):
    """`PARAMETER num_ctx 4096` is ("parameter", "num_ctx 4096", 3)."""

    name: str
    argument: str
    line: int


def read_modelfile(path: Path) -> list[Instruction]:
    """Raises ConfigError naming the file and the line."""
    lines = read_text(path).splitlines()
    found: list[Instruction] = []
    index = 0
    while index < len(lines):
        number, line = index + 1, lines[index].strip()
        index += 1
        if not line or line.startswith("#"):
            continue
        name, _, argument = line.partition(" ")
        if name.lower() not in INSTRUCTIONS:
            close = nearest(name.lower(), INSTRUCTIONS)
            hint = f" Did you mean {close.upper()}?" if close else ""
            raise ConfigError(f"{path}:{number}: {name[:40]} is no instruction of a Modelfile.{hint}")
        argument = argument.strip()
        head, argument = _role(name.lower(), argument)
        quote = next((mark for mark in ('"""', '"') if argument.startswith(mark)), "")
        if quote:
            argument = argument[len(quote) :]
            while not argument.rstrip().endswith(quote):
                if index >= len(lines):
                    raise ConfigError(f"{path}:{number}: {name.upper()} begins with {quote} and never ends")
                argument += "\n" + lines[index]
                index += 1
            argument = argument.rstrip().removesuffix(quote)
        found.append(Instruction(name.lower(), f"{head}{argument}", number))
    if not any(each.name == "from" for each in found):
        raise ConfigError(f"{path}: a Modelfile has a FROM line, and this has none")
    return found


def _role(name: str, argument: str) -> tuple[str, str]:
    """`stop "<|end|>"`: what comes before a quoted value, and the value."""
    if name not in ("parameter", "message"):
        return "", argument
    head, gap, value = argument.partition(" ")
    return f"{head}{gap}", value.strip()


def is_environment(path: Path) -> bool:
    """Whether a file sets variables (a drop-in of systemd, an env file, a script) and is no Modelfile."""
    lines = [line.strip() for line in read_text(path).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", ";"))]
    return bool(lines) and all(
        line.startswith(("[", "export ", "Environment")) or "=" in line.split(" ")[0] for line in lines
    )


def read_environment(path: Path) -> Document:
    """The variables, each with its line. Variables that are not Ollama's are there too."""
    data: dict[str, str] = {}
    lines: dict[KeyPath, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.lstrip().startswith(("#", ";", "[")):
            continue
        for name, value in _assignments(line):
            data[name] = value
            lines[(name,)] = number
    return Document(data, str(path), path.parent.absolute(), lines)


def _assignments(line: str) -> list[tuple[str, str]]:
    match = _ASSIGNMENT.match(line)
    if match is None:
        return []
    text = re.sub(r"^\s*(export\s+|Environment\s*=\s*)", "", line)
    try:
        words = shlex.split(text)
    except ValueError:
        words = [text.strip()]
    pairs = (word.partition("=") for word in words)
    return [(name, value) for name, has_value, value in pairs if has_value]
