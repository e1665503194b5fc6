"""Owns: reading YAML so that every value knows its line and `${env.NAME}` is filled in. Knows no key of the config.

PyYAML's safe loader makes the nodes; they are turned into values here because only nodes carry lines, and because
PyYAML lets the last of two equal keys win silently.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from laya.errors import ConfigError

KeyPath = tuple[str | int, ...]
MAX_FILE_BYTES = 1024 * 1024
MAX_NODES = 100_000  # an alias repeats its whole subtree, so a small file can stand for a huge one
MAX_DEPTH = 40
_FILLED_LATER = frozenset({"cmd", "env"})  # keys whose `${PORT}` and the like are filled in when a program starts
_VARIABLE = re.compile(r"\$?\$\{(env\.)?([A-Za-z_][A-Za-z0-9_]*)\}")
_MERGE_TAG = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_STRING_TAG = "tag:yaml.org,2002:str"


@dataclasses.dataclass(frozen=True)
class Document:
    """Settings as they were written, and where each of them stands."""

    data: Any
    name: str = ""  # the file, as messages name it
    folder: Path = Path()  # what relative paths in it start from
    lines: Mapping[KeyPath, int] = dataclasses.field(default_factory=dict)
    written: Mapping[KeyPath, str] = dataclasses.field(default_factory=dict)  # values that hold ${env.NAME}
    spelled: Mapping[KeyPath, str] = dataclasses.field(default_factory=dict)  # keys the user knows by another name

    def error(self, path: KeyPath, message: str) -> ConfigError:
        """The error for the value at `path`, with the file and line in front."""
        return ConfigError(self.place(path) + message, param=dotted(path) or None)

    def place(self, path: KeyPath) -> str:
        if not self.name:
            return ""
        line = next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)
        return f"{self.name}: " if line is None else f"{self.name}:{line}: "

    def key(self, path: KeyPath) -> str:
        """The key as the user wrote it."""
        return self.spelled.get(path) or self.spelled.get(path[:1]) or dotted(path)

    def value(self, path: KeyPath, value: Any) -> str:
        """The value as a message may show it: what came from the environment may be a secret."""
        return self.written.get(path) or shown(value)


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def shown(value: Any) -> str:
    """A value as YAML writes it, in one short line."""
    if value is None:
        return "nothing (leave the line out for the default)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 256:  # Python does not write out a number of any length
        return f"a number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, list, dict)) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_document(path: Path, environ: Mapping[str, str] | None) -> Document:
    """The YAML file at `path`. Raises ConfigError naming the file, the line and what is wrong there.

    environ: None leaves `${...}` as it is: the file is another program's.
    """
    name = str(path)
    text = read_text(path, hint="" if environ is None else f"; `laya config example > {name}` writes one")
    loader = yaml.SafeLoader("")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        reader = _NodeReader(name, loader, environ)
        data = None if root is None else reader.read(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels") from None
    finally:
        loader.dispose()
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: expected keys with values, such as `max_seq_len: 8192`, got {shown(data)}")
    return Document(data, name, path.parent.absolute(), reader.lines, reader.written)


def read_text(path: Path, *, hint: str = "") -> str:
    """The whole of a file of settings. Raises ConfigError for what is not there (with the hint), is no text or huge."""
    name = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{name}: larger than 1 MiB, so it is not a configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text") from None


class _NodeReader:
    def __init__(self, name: str, loader: yaml.SafeLoader, environ: Mapping[str, str] | None) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.written: dict[KeyPath, str] = {}
        self._name = name
        self._loader = loader
        self._environ = environ
        self._nodes = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise self._error(node, f"more than {MAX_NODES} values or {MAX_DEPTH} levels, aliases counted each time")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
            raise self._error(node, f"{node.tag} is not known here: write keys with values, or a list")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._read_scalar(node, path)

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                merged = self._read_merge(value_node, path) | merged
                continue
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _STRING_TAG:
                name = key if isinstance(key, str) else "with values of its own"
                raise self._error(key_node, f"the key {name} is not text: write it in quotes")
            child = (*path, key)
            if key in own:
                first = self.lines[child]
                raise self._error(key_node, f"{dotted(child)} is here twice, first in line {first}")
            self.lines[child] = key_node.start_mark.line + 1
            own[key] = self.read(value_node, child)
        return merged | own

    def _read_merge(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        """The mapping, or the list of mappings of which the first wins, behind a `<<` key."""
        merged: dict[str, Any] = {}
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                raise self._error(node, "<<: needs keys to merge")
            merged = {**self._read_mapping(source, (*path, "<<")), **merged}
        return merged

    def _read_scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        environ = self._environ
        if environ is not None and isinstance(node.value, str) and "${" in node.value:
            filled = _VARIABLE.sub(lambda match: self._variable(match, node, path, environ), node.value)
            self.written[path] = node.value
            # Unquoted, the text of a variable has the type it would have had in the file: a port stays a number.
            resolved: str = self._loader.resolve(yaml.ScalarNode, filled, (True, False))  # type: ignore[no-untyped-call]
            node = yaml.ScalarNode(node.tag if node.style else resolved, filled, node.start_mark, node.end_mark)
        try:
            return self._loader.construct_object(node)
        except ValueError:  # e.g. a date with month 13, which the resolver took for a date
            raise self._error(node, f"{node.value} cannot be read: write it in quotes") from None

    def _variable(self, match: re.Match[str], node: yaml.Node, path: KeyPath, environ: Mapping[str, str]) -> str:
        whole, name = match.group(0), match.group(2)
        if whole.startswith("$$"):
            return whole[1:]
        if not match.group(1):
            if not _FILLED_LATER.isdisjoint(path[2:]):
                return whole
            raise self._error(node, f"{whole} is not filled in: write ${{env.{name}}}, or $${{{name}}} to keep it")
        if name not in environ:
            raise self._error(node, f"{whole}: the environment has no {name}")
        return environ[name]

    def _error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self._name}:{node.start_mark.line + 1}: {message}")
