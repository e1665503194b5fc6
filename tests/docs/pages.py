"""Owns: reading the repository's pages: their fenced blocks, command lines, links and anchors. Runs nothing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = sorted(ROOT.glob("*.md")) + DOCS + sorted((ROOT / "examples").rglob("*.md"))
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"\$ |(sudo |[A-Z_]+=\S+ )*(laya|curl|pip|python3?|pytest|make|ray|docker|kubectl|systemctl) ")
_LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
_MARKS = re.compile(r"[^\w\- ]")


class Block(NamedTuple):
    """A fenced block. where: its page and line, as faults name it."""

    where: str
    language: str
    text: str


class Command(NamedTuple):
    where: str
    words: str  # one logical line, without its comment


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(f"{name_of(page)}:{text.count(chr(10), 0, found.start()) + 1}", found[2].strip(), found[3])
        for found in _FENCE.finditer(text)
    ]


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def commands(page: Path) -> list[Command]:
    """Every command that a reader may paste: of sh blocks, of console blocks, and of unmarked ones that hold any."""
    return [
        Command(block.where, line)
        for block in blocks(page)
        if block.language in ("sh", "bash", "console") or (not block.language and _is_command(block.text))
        for line in _logical_lines(block)
    ]


def _is_command(text: str) -> bool:
    return any(_COMMAND.match(line) for line in text.splitlines())


def _logical_lines(block: Block) -> list[str]:
    """Lines put together until quotes and backslashes are closed. Of a session, what follows `$ `."""
    lines = block.text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    done, begun = [], ""
    for line in lines:
        begun += line
        if begun.endswith("\\") or not _is_closed(begun):
            begun += "\n"
        else:
            if words := _without_comment(begun):
                done.append(words)
            begun = ""
    assert not begun, f"{block.where}: a quote is not closed"
    return done


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#\s.*$", "", line, flags=re.DOTALL if line.startswith("#") else 0).strip()


def inline_commands(page: Path) -> list[str]:
    """`laya VERB ...` as sentences and tables have it."""
    return re.findall(r"`((?:sudo )?laya [^`]+)`", without_blocks(page))


def links(page: Path) -> list[str]:
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", without_blocks(page)))


def anchors(page: Path) -> set[str]:
    """The anchors that a forge, and the site, make of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_blocks(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = _MARKS.sub("", plain.lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found
