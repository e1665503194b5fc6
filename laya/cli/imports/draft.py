"""Owns: a configuration in the making from another program's file, and what is to be told of what is not in it.

Knows no program. A value that may be a secret is never kept: neither in the configuration nor in a message.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from laya.config.document import Document, KeyPath, dotted
from laya.config.keys import MIN_KEY_CHARS, hash_key
from laya.config.load import parse_settings
from laya.config.remote import read_url
from laya.errors import ConfigError, nearest

_SECRET_NAME = re.compile(r"(api[-_]?key|secret|token|passw(or)?d|credential|authorization)s?$", re.IGNORECASE)
_KEYS = re.compile(r"[a-z_.]+(, [a-z_.]+)*(: \{.*\}|: remote)?")  # a reason that names Laya's keys and nothing else
SECRET_VALUE = re.compile(r"\b(sk-|hf_|ghp_)[A-Za-z0-9_-]{8,}")  # what a key looks like, wherever it stands
_VARIABLE = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_UNFILLED = re.compile(r"\$\{(?!env\.[A-Za-z_][A-Za-z0-9_]*\})")


@dataclasses.dataclass
class Draft:
    """`config` is what config.yaml will hold; `told` are lines for the user, in the order of the file."""

    document: Document
    config: dict[str, Any] = dataclasses.field(default_factory=lambda: {"version": 1})
    told: list[str] = dataclasses.field(default_factory=list)

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        models: dict[str, dict[str, Any]] = self.config.setdefault("models", {})
        return models

    def skip(self, path: KeyPath, why: str, *, key: str = "") -> None:
        """A key that has no counterpart. key: how it is named, where not by its path."""
        why = f"nearest: {why}" if _KEYS.fullmatch(why) else why
        self._tell(f"not taken over: {key or dotted(path)} ({self._line(path)}{why})")

    def note(self, path: KeyPath, what: str) -> None:
        """A key that was taken over and means something else here, or asks something of the user."""
        self._tell(f"note: {dotted(path)} ({self._line(path)}{what})")

    def skip_known(
        self,
        path: KeyPath,
        section: Mapping[str, Any],
        reasons: Mapping[str, str],
        program: str,
        taken: Sequence[str] = (),
    ) -> None:
        """Tell every key of a section that nobody took: by its reason, or as one that is not known.

        taken: keys that are taken over, which an unknown one may be a slip of.
        """
        for key in section:
            if key in reasons:
                self.skip((*path, key), reasons[key])
            else:
                close = nearest(str(key), [*reasons, *taken])
                hint = f", did you mean {close}?" if close else ""
                self.skip((*path, key), f"an unknown key of {program}{hint}")

    def setting(self, path: KeyPath, entry: dict[str, Any], name: str, value: Any, *, key: str = "") -> bool:
        """Put a setting of Laya's in an entry; one that Laya refuses is told in the words of the refusal."""
        try:
            parse_settings(_nested(name, value))
        except ConfigError as error:
            self.skip(path, error.message, key=key)
            return False
        head, _, rest = name.partition(".")
        if rest:
            entry.setdefault(head, {})[rest] = value
        else:
            entry[head] = value
        return True

    def alias(self, path: KeyPath, name: str, model_id: str) -> None:
        """Another name of a model, unless something has that name already."""
        taken = {alias for entry in self.models.values() for alias in entry.get("aliases", ())}
        if name in taken or name in self.models:
            self.skip(path, f"{name} is a name already")
        else:
            self.models[model_id].setdefault("aliases", []).append(name)

    def server_key(self, path: KeyPath, name: str, value: str, variable: str | None, *, role: str) -> None:
        """A key that clients show: by its hash, or where the environment holds it."""
        entry: dict[str, Any] = {"name": name, "role": role}
        if variable is not None:
            entry["key"] = f"${{env.{variable}}}"
        elif len(value) < MIN_KEY_CHARS or any(letter.isspace() for letter in value):
            self.skip(path, f"a key has {MIN_KEY_CHARS} characters or more here: `laya config hash-key` makes one")
            return
        else:
            entry["sha256"] = hash_key(value)
            self.note(path, "kept as its hash; clients go on with the key they have")
        self.config.setdefault("server", {}).setdefault("api_keys", []).append(entry)

    def remote_key(self, path: KeyPath, entry: dict[str, Any], model_id: str, variable: str | None) -> None:
        """A key for another server: the variable that holds it, or one that the user is to set."""
        entry["key_env"] = variable or re.sub(r"[^A-Z0-9]+", "_", model_id.upper()).strip("_") + "_API_KEY"
        if variable is None:
            self.skip(
                path,
                f"no key is copied: put it in a file that key_file of {model_id} names instead of key_env, "
                f"or in the environment as {entry['key_env']}",
            )

    def _tell(self, line: str) -> None:
        self.told.append(SECRET_VALUE.sub("(hidden)", line))

    def _line(self, path: KeyPath) -> str:
        lines = self.document.lines
        line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        return "" if line is None else f"line {line}: "


def is_secret_name(name: str) -> bool:
    """Whether what is called so is for nobody's eyes."""
    return _SECRET_NAME.search(name) is not None


def variable_of(text: str) -> str | None:
    """NAME, where the text is `${env.NAME}` and nothing else."""
    match = _VARIABLE.fullmatch(text)
    return match[1] if match else None


def checked_url(text: str) -> str:
    """The address. Raises ConfigError, which does not show it where it may hold a secret."""
    if any(mark in text for mark in "?#@"):
        raise ConfigError("an address is https://host/v1 here, with no query, no user and no password", param="url")
    read_url(text)
    return text


def literal(text: str, *, keeps_env: bool = True) -> str:
    """Text as config.yaml holds it, where `${` would begin a variable. keeps_env: `${env.NAME}` means one."""
    return _UNFILLED.sub("$${", text) if keeps_env else text.replace("${", "$${")


def expect(document: Document, path: KeyPath, value: Any, kind: type, words: str) -> Any:
    """The value, where it is of this kind. Raises ConfigError naming the key and the line."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        got = "nothing" if value is None else type(value).__name__
        raise document.error(path, f"{dotted(path) or 'the file'}: expected {words}, got {got}")
    return value


def expect_names(document: Document, path: KeyPath, value: Any) -> list[str]:
    """A list of names, nothing standing for none. Raises ConfigError naming the first that is none."""
    found = expect(document, path, [] if value is None else value, list, "a list of names")
    return [expect(document, (*path, index), name, str, "a name") for index, name in enumerate(found)]


def _nested(name: str, value: Any) -> dict[str, Any]:
    head, _, rest = name.partition(".")
    return {head: _nested(rest, value) if rest else value}
