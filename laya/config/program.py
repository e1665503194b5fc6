"""Owns: the keys of a model that a program of the user's own serves (`engine: command`), and its command line.

Knows no process: the values of `${PORT}` and the others come when a program is started.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from laya.config.settings import Limit, ModelSettings
from laya.errors import ConfigError, nearest

VARIABLES = ("PORT", "HOST", "MODEL", "API_KEY", "THREADS")  # that a command line and its environment may name
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class ProgramKeys(ModelSettings, kw_only=True, forbid_unknown_fields=True):
    """What only a program needs."""

    cmd: Annotated[
        str | list[str] | None,
        Meta(description="engine: command: the program and its arguments, with ${PORT} for the port it listens on."),
    ] = None
    health: Annotated[
        str | None,
        Meta(description="engine: command: path that answers 2xx once the program is up; null = it has none."),
    ] = "/health"
    memory: Annotated[
        Limit | None,
        Meta(description="engine: command: RAM the program and all it starts may take; null = learned."),
    ] = None
    env: Annotated[
        dict[str, str],
        Meta(description="engine: command: variables of its environment, beside Laya's own."),
    ] = {}
    cwd: Annotated[
        str | None, Meta(description="engine: command: folder the program is started in; null = that of this file.")
    ] = None
    served_model_name: Annotated[
        str | None, Meta(description="engine: command: what the program calls the model; null = as here.")
    ] = None
    cancels_whole: Annotated[
        bool,
        Meta(description="true: it stops a whole answer whose client leaves; false: Laya always asks for a stream."),
    ] = False
    keeps_streams: Annotated[
        bool, Meta(description="engine: command: false if it closes the connection after each stream.")
    ] = True


PROGRAM_KEYS = tuple(name for name in ProgramKeys.__struct_fields__ if name not in ModelSettings.__struct_fields__)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program that serves a model, every key decided."""

    words: tuple[str, ...]  # with `${PORT}` and the others as they were written
    cwd: Path
    health: str | None
    memory_bytes: int | None  # None: what it was seen to take
    env: dict[str, str]
    served_model_name: str | None
    cancels_whole: bool
    keeps_streams: bool

    def path(self) -> Path:
        """The file of the program. Raises ConfigError naming the nearest."""
        return program_of(self.words[0], self.cwd)


def read_program(keys: ProgramKeys) -> Program:
    """The program of a checked entry. Raises ConfigError for a command line that cannot be split."""
    assert keys.cmd is not None, "an entry without a command line is refused before"
    return Program(
        words=tuple(words_of(keys.cmd)),
        cwd=Path(keys.cwd) if keys.cwd is not None else Path.cwd(),
        health=keys.health,
        memory_bytes=keys.memory,
        env=dict(keys.env),
        served_model_name=keys.served_model_name,
        cancels_whole=keys.cancels_whole,
        keeps_streams=keys.keeps_streams,
    )


def words_of(cmd: str | list[str]) -> list[str]:
    """The command line in words; text is split as a shell would, and by none. Raises ConfigError."""
    try:
        words = shlex.split(cmd) if isinstance(cmd, str) else list(cmd)
    except ValueError as error:
        raise ConfigError(f"{cmd!r}: {str(error).lower()}", param="cmd") from None
    if not words or not words[0]:
        raise ConfigError("it names no program", param="cmd")
    return words


def program_of(name: str, cwd: Path) -> Path:
    """The file of the program: a name without a slash is looked up in PATH. Raises ConfigError naming the nearest."""
    path = str(cwd / Path(name).expanduser()) if "/" in name else name
    found = shutil.which(path)
    if found is not None:
        return Path(found).absolute()
    if "/" in name and Path(path).is_file():
        raise ConfigError(f"{path} may not be run: chmod +x", param="cmd")
    beside = Path(path).parent if "/" in name else None
    close = nearest(Path(name).name, _programs(beside))
    hint = f". Did you mean {close}?" if close else ""
    where = "there is no program" if beside is not None else "PATH has no program"
    raise ConfigError(f"{where} {path}{hint}", param="cmd")


def unknown_variable(text: str) -> str | None:
    """The first `${NAME}` in it that Laya does not fill in."""
    return next((name for name in _VARIABLE.findall(text) if name not in VARIABLES), None)


def filled(text: str, values: Mapping[str, str]) -> str:
    """`--port ${PORT}` -> `--port 41234`."""
    return _VARIABLE.sub(lambda match: values.get(match[1], match[0]), text)


def _programs(folder: Path | None) -> list[str]:
    """Names of what can be run there; None: in PATH."""
    folders = [folder] if folder is not None else [Path(each) for each in os.get_exec_path()]
    names: list[str] = []
    for each in folders:
        if each.is_dir():
            names += [entry.name for entry in os.scandir(each) if entry.is_file() and os.access(entry.path, os.X_OK)]
    return names
