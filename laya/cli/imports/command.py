"""Owns: another program's command line as `cmd` of `engine: command`: its port is Laya's, its keys stay out."""

from __future__ import annotations

import re
import shlex
from urllib.parse import urlsplit

from laya.cli.imports.draft import SECRET_VALUE, Draft, checked_url, is_secret_name
from laya.config.document import KeyPath, dotted
from laya.config.hosts import is_loopback
from laya.config.program import unknown_variable
from laya.errors import ConfigError

_PLAIN_WORD = re.compile(r"[\w@%+=:,./${}-]+")  # no shell reads it, so ${PORT} needs no quotes


def without_comments(text: str) -> str:
    """Lines that begin with # are comments."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def split_words(cmd: str) -> list[str]:
    """A command line in words; a backslash at the end of a line joins two."""
    try:
        words = shlex.split("\n".join(line.rstrip().removesuffix("\\") for line in cmd.splitlines()))
    except ValueError as error:
        raise ConfigError(f"cmd: {str(error).lower()}") from None
    if not words:
        raise ConfigError("cmd names no program")
    return words


def program_cmd(words: list[str], proxy: str | None, draft: Draft, path: KeyPath) -> str:
    """proxy: where the other program expects it to listen. Raises ConfigError where its port cannot be Laya's."""
    made = _with_port(words, proxy, draft, path)
    _hide_keys(made, draft, path)
    made = [_safe(word, draft, path) for word in made]
    unknown = next((name for word in made if (name := unknown_variable(word)) not in (None, "PORT", "API_KEY")), None)
    if unknown is not None:
        raise ConfigError(f"cmd: ${{{unknown}}} is no macro of this file")
    return " ".join(word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word) for word in made)


def _with_port(words: list[str], proxy: str | None, draft: Draft, path: KeyPath) -> list[str]:
    """The port is Laya's to choose, also where the file has a fixed one."""
    if any("${PORT}" in word for word in words):
        return list(words)
    if proxy is None:
        raise ConfigError("cmd names no ${PORT}: write it where the program takes its port")
    parts = urlsplit(checked_url(proxy))
    port = parts.port
    if port is None or not is_loopback(parts.hostname or ""):
        raise ConfigError(f"cmd names no ${{PORT}}; where {proxy} is another machine's, write engine: remote")
    changed = [re.sub(rf"(?<!\d){port}(?!\d)", "${PORT}", word) for word in words]
    if changed == words:
        raise ConfigError(f"cmd names neither ${{PORT}} nor {port}: write ${{PORT}} where its port is")
    draft.note(path, f"${{PORT}} stands for {port}: Laya picks the port")
    return changed


def _hide_keys(words: list[str], draft: Draft, path: KeyPath) -> None:
    """`--api-key VALUE`: the program gets a key that Laya makes anew at each start; other secrets come by variables."""
    for index, word in enumerate(words):
        name, attached, value = word.partition("=")
        has_next = not attached and index + 1 < len(words)
        value = words[index + 1] if has_next else value
        if not (name.startswith("-") and is_secret_name(name)) or not value or value.startswith("-"):
            continue
        if re.fullmatch(r"--?api[-_]key", name):
            new, what = "${API_KEY}", "Laya makes one at each start"
        elif value.startswith("$"):
            continue
        else:
            variable = re.sub(r"\W+", "_", name.strip("-")).upper()
            new, what = f"${{env.{variable}}}", f"set {variable} in the environment of `laya serve`"
        words[index + 1 if has_next else index] = new if has_next else f"{name}={new}"
        draft.skip(path, f"no key is copied: {what}", key=f"{dotted(path)} {name}")


def _safe(word: str, draft: Draft, path: KeyPath) -> str:
    """A word without a secret of its own: `-e HF_TOKEN=...` of docker, or what looks like a key."""
    name, has_value, value = word.partition("=")
    is_named = bool(has_value and value) and re.fullmatch(r"\w+", name) is not None and is_secret_name(name)
    if is_named and not value.startswith("$"):
        new, variable = f"{name}=${{env.{name}}}", name
    else:
        new, variable = SECRET_VALUE.sub("${env.KEY_IN_CMD}", word), "KEY_IN_CMD"
    if new != word:
        what = f"no key is copied: set {variable} in the environment of `laya serve`"
        draft.skip(path, what, key=f"{dotted(path)} {variable}")
    return new
