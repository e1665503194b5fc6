"""Owns: everything one engine child needs, and the checks made before a process is spent on it.

The values were decided elsewhere (a plan, the config); this module only says when they cannot work together. It knows
nothing of processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from laya.config import Remote, RemoteUrl
from laya.engines.arguments import check_args
from laya.engines.builds import PACKAGE
from laya.errors import BadModelFile, ConfigError, EngineFailed
from laya.types import PlannedSettings

Pooling = Literal["none", "mean", "cls", "last", "rank"]
LOAD_TIMEOUT_S = 300.0
LOOPBACK = "127.0.0.1"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to start. Paths may be relative to the current folder; they are made absolute for the child."""

    model_id: str  # what answers call the model
    name: str = ""  # what logs and limits call this engine, where the model has several; else as the model
    path: Path  # the .gguf file, the first one of a split model
    planned: PlannedSettings
    args: dict[str, Any] = {}  # the engine's own arguments, from config; see arguments.py
    mmproj: Path | None = None  # projector of a vision or audio model
    draft: Path | None = None  # small model for speculative decoding
    lora: tuple[Path, ...] = ()  # adapters, each at scale 1
    chat_template: str | None = None  # the text of a Jinja template; None = the one in the file
    pooling: Pooling | None = None  # task embed: None = the file's own; a file without one needs "mean" or "last"
    mapped_bytes: int | None = None  # of its files, that stay in RAM where others lie on GPUs; None: all
    sees_all_gpus: bool = False  # those of the plan can't be chosen by number for it
    engine_path: Path | None = None  # the user's own llama-server instead of the built-in engine
    host: str = LOOPBACK  # where it listens
    packages: Path | None = None  # where the built-in engine's build is; None: in Laya's own environment
    why_no_gpu: str | None = None  # why no layer was planned for a GPU, though the build is for one
    threads_file: str | None = None  # where the child reads how many threads it may use now; None: as planned
    ceiling_bytes: int | None = None  # the most it may hold, its mapped file included; None: not limited
    load_timeout_s: float = LOAD_TIMEOUT_S  # from spawn to the first generated token

    @property
    def engine_name(self) -> str:
        return self.name or self.model_id

    @property
    def context_tokens(self) -> int:
        """Tokens of the whole context, as llama.cpp's n_ctx counts them."""
        if self.planned.kv_unified:
            return self.planned.slot_tokens
        return self.planned.slot_tokens * self.planned.max_num_seqs

    @property
    def http_threads(self) -> int:
        """Threads of the engine's HTTP server, one per connection.

        A client that left holds its connection until the engine notices, while the next one is already admitted.
        """
        return 2 * self.planned.max_num_seqs + 8

    def checked_args(self) -> dict[str, Any]:
        """`args` flattened to dotted names. Raises ConfigError for one that fights the plan or does not exist."""
        return check_args(
            self.args,
            where=f"models.{self.model_id}.args",
            has_draft=self.draft is not None,
            native_flags=self.engine_path is not None,
        )

    def check(self) -> None:
        """Raise ConfigError or BadModelFile for what can be seen without starting anything."""
        self.checked_args()
        for path in (self.path, self.mmproj, self.draft, *self.lora):
            if path is not None:
                check_file(path)
        own = self.engine_path
        if own is not None and (own.is_dir() or not os.access(own, os.X_OK)):
            raise ConfigError(f"engine_path: {self.engine_path} is not a program that can be run", param="engine_path")
        if self.packages is not None and not (self.packages / PACKAGE).is_dir():  # another build would be found instead
            raise EngineFailed(f"The engine build {self.packages} is not on this machine", param="model")
        if self.pooling is not None and self.planned.task not in ("embed", "rerank"):
            told = f"pooling: {self.pooling} goes with task embed or rerank, not {self.planned.task}"
            raise ConfigError(told, param="pooling")


class CommandSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One program to start."""

    model_id: str
    name: str = ""  # what logs and limits call this engine, where the model has several; else as the model
    program: Path
    words: tuple[str, ...]  # the command line as it was written
    folder: Path
    planned: PlannedSettings
    health: str | None = None  # path that answers 2xx once it is up
    env: dict[str, str] = {}
    served_model_name: str | None = None  # what the program calls the model
    cancels_whole: bool = False
    keeps_streams: bool = True
    ceiling_bytes: int | None = None
    load_timeout_s: float = LOAD_TIMEOUT_S

    @property
    def engine_name(self) -> str:
        return self.name or self.model_id


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One address of another server."""

    model_id: str
    name: str = ""  # what logs call this engine, where the model has several
    url: RemoteUrl
    remote: Remote
    planned: PlannedSettings
    is_watched: bool = False  # somebody else asks whether it is there, for all its models at once
    ceiling_bytes: int | None = None
    load_timeout_s: float = LOAD_TIMEOUT_S

    @property
    def engine_name(self) -> str:
        return self.name or self.model_id


def check_file(path: Path) -> None:
    """Raise BadModelFile when the file is missing, empty, a folder or unreadable."""
    if not path.exists():
        raise BadModelFile(f"{path} does not exist", param="model")
    if not path.is_file():
        raise BadModelFile(f"{path} is not a file; the llama.cpp engine needs a .gguf file", param="model")
    if path.stat().st_size == 0:
        raise BadModelFile(f"{path} is empty (0 bytes); pull it again", param="model")
    if not os.access(path, os.R_OK):
        raise BadModelFile(f"{path} cannot be read: permission denied", param="model")
