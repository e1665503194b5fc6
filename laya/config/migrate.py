"""Owns: which versions of config.yaml's form there are, and what brings a file from one to the next.

A step is a list of keys that have another name now. It is done in the text, so that comments, order and `${env.NAME}`
stay. Knows no key of today's form and writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from laya.config.document import Document, KeyPath, dotted
from laya.errors import ConfigError

NEWEST = 1
ANY = "*"  # in a path: whatever name stands there, such as a model's

Renames = Mapping[KeyPath, str]  # where a key stood -> its name now
STEPS: Mapping[int, Renames] = {}  # version -> what leads from it to the next


class Migrated(NamedTuple):
    """A file in its newest form, and each change in words."""

    text: str
    changes: list[str]


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def check_version(document: Document, newest: int = NEWEST) -> None:
    """Raises ConfigError for a file whose form this Laya does not read."""
    version = document.data.get("version", 1)
    if type(version) is int and version == newest:
        return
    said = f"version: {document.value(('version',), version)}: this Laya reads version: {newest}"
    if type(version) is int and version > newest:
        said += ". The file was written for a newer Laya: update this one, or write the file in version " + str(newest)
    elif type(version) is int and 1 <= version < newest:
        said += f". `laya config migrate {document.name}` brings the file there, and keeps what it was"
    raise document.error(("version",), said)


def migrated(text: str, version: int, steps: Mapping[int, Renames] = STEPS, newest: int = NEWEST) -> Migrated:
    """The text in the form of the newest version. Raises ConfigError where both names of a key are there."""
    changes: list[str] = []
    for number in range(version, newest):
        edits: set[_Edit] = set()  # what an anchor holds is met once for each of its aliases, and changed once
        for path, key, siblings in _keys(yaml.compose(text, Loader=yaml.SafeLoader), ()):
            new = next((name for old, name in steps[number].items() if _matches(old, path)), None)
            if path == ("version",):
                edits.add(_of_value(key, siblings, str(number + 1)))
            elif new is not None and new in (other.value for other, _ in siblings):
                raise ConfigError(f"line {key.start_mark.line + 1}: {dotted(path)} is {new} now, which is there too")
            elif new is not None:
                edits.add(_Edit(key.start_mark.index, key.end_mark.index, new))
                changes.append(f"line {key.start_mark.line + 1}: {dotted(path)} is {new}")
        for edit in sorted(edits, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        if not _has_version(text):
            text = f"version: {number + 1}\n{text}"
    return Migrated(text, changes)


def _keys(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, list[Any]]]:
    """Each key with its path and the pairs beside it."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, key.value)
            yield below, key, node.value
            yield from _keys(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _keys(value, (*path, index))


def _matches(pattern: KeyPath, path: KeyPath) -> bool:
    return len(pattern) == len(path) and all(each in (ANY, part) for each, part in zip(pattern, path, strict=True))


def _of_value(key: Any, siblings: list[Any], text: str) -> _Edit:
    value = next(value for other, value in siblings if other is key)
    return _Edit(value.start_mark.index, value.end_mark.index, text)


def _has_version(text: str) -> bool:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return root is not None and any(key.value == "version" for key, _ in root.value)
