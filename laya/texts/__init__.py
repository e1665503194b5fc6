"""Owns: texts with a topic each, to look at a model with: the sets that ship, and files of a user's own.

A set is a folder beside this module: its documents, and `sources.json` with each one's topic, licence and origin, so
that a training recipe can leave out exactly those. Knows no model; needs only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laya.errors import InvalidRequest, nearest

DEFAULT_SET = "mixed"
_SOURCES = "sources.json"
_ROOM = Path(__file__).parent


class Document(NamedTuple):
    """Text that belongs together; a topic may have several."""

    topic: str
    text: str


def set_names() -> list[str]:
    return sorted(file.parent.name for file in _ROOM.glob(f"*/{_SOURCES}"))


def sources_of(name: str) -> list[dict[str, Any]]:
    """What `sources.json` says of each document: topic, file, title, licence, origin (package, version, file, part).

    Raises InvalidRequest naming the nearest set.
    """
    known = set_names()
    if name not in known:
        close = nearest(name, known)
        hint = f" Did you mean '{close}'?" if close else ""
        raise InvalidRequest(f"There is no text set '{name}'.{hint} There are: {', '.join(known)}.", param="set")
    documents: list[dict[str, Any]] = json.loads((_ROOM / name / _SOURCES).read_text("utf-8"))["documents"]
    return documents


def load_set(name: str) -> list[Document]:
    """The documents of a set that ships. Raises InvalidRequest naming the nearest set."""
    return [
        Document(source["topic"], (_ROOM / name / source["file"]).read_text("utf-8")) for source in sources_of(name)
    ]


def load_files(paths: Sequence[Path]) -> list[Document]:
    """Files of text, each a topic named after it; of a `.jsonl` each line, {"topic": ..., "text": ...}, is a document.

    Raises InvalidRequest naming the file, and the line, that is not what it should be.
    """
    documents: list[Document] = []
    stems = [path.stem for path in paths]
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path}: cannot be read ({error.strerror}).", param="text") from None
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{path}: is no text in UTF-8 (byte {error.start}).", param="text") from None
        if not text.strip():
            raise InvalidRequest(f"{path}: there is no text in it.", param="text")
        if path.suffix == ".jsonl":
            documents += [
                _document(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()
            ]
        else:
            documents.append(Document(path.stem if stems.count(path.stem) == 1 else str(path), text))
    return documents


def _document(path: Path, number: int, line: str) -> Document:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    topic, text = (fields.get("topic"), fields.get("text")) if isinstance(fields, dict) else (None, None)
    if not (isinstance(topic, str) and isinstance(text, str) and topic.strip() and text.strip()):
        raise InvalidRequest(f'{path}, line {number}: expected {{"topic": "...", "text": "..."}}.', param="text")
    return Document(topic, text)
