"""Owns: how a program of the user's own becomes an engine: its command line, its port, the proof that it answers.

Laya picks a free port and says it as `${PORT}`; another program may take it in the moment before this one listens, so a
start that failed for that is tried again. Where it listens beside that is the program's own business.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import msgspec

from laya.config.program import filled
from laya.engines.held_memory import MemoryReading, read_family
from laya.engines.launcher import Launcher
from laya.engines.llamacpp_launcher import child_environment
from laya.engines.log import EngineLog
from laya.engines.probe import until_healthy, until_it_answers
from laya.engines.settings import CommandSettings
from laya.errors import ConfigError
from laya.types import EngineAddress, GpuLayers

HOST = "127.0.0.1"
CONNECT_TIMEOUT_S = 10.0  # a program that accepts no more leaves connections in its backlog, and then those before it
LAST_LINES = 3  # of its log, in a message
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|errno 98\b|port \d+ is (?:already )?in use", re.IGNORECASE)
_NOT_PASSED_ON = ("LAYA_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # secrets that it gets where `env` says so


class CommandLauncher(Launcher):
    """See launcher.Launcher."""

    module = "laya.engines.program_child"
    files: tuple[Path, ...] = ()
    needs_cpu = False

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._port = free_port()
        self._waits_for = ""
        texts = (*settings.words, *settings.env.values())
        self._has_key = any("${API_KEY}" in text for text in texts)

    def check(self) -> None:
        if not self._settings.folder.is_dir():
            raise ConfigError(f"models.{self._settings.model_id}.cwd: there is no folder {self._settings.folder}")

    def environment(self) -> dict[str, str]:
        return child_environment(_inherited())

    def document(self, api_key: str) -> dict[str, Any]:
        settings = self._settings
        values = {
            "PORT": str(self._port),
            "HOST": HOST,
            "MODEL": settings.served_model_name or settings.model_id,
            "API_KEY": api_key,
            "THREADS": str(settings.planned.n_threads),
        }
        own = {name: filled(text, values) for name, text in settings.env.items()}
        environment = {**_inherited(), "OMP_NUM_THREADS": values["THREADS"], **own}
        command = [str(settings.program), *(filled(word, values) for word in settings.words[1:])]
        return {"command": command, "environment": environment, "folder": str(settings.folder)}

    def listens_at(self, log: EngineLog) -> str | None:
        return f"{HOST}:{self._port}"

    async def prove(self, host: str, port: int, api_key: str) -> EngineAddress:
        settings = self._settings
        address = EngineAddress(
            host=host,
            port=port,
            api_key=api_key if self._has_key else None,
            cancels_whole=settings.cancels_whole,
            keeps_streams=settings.keeps_streams,
            dialect="openai",
            model=settings.served_model_name,
            alive_path=settings.health,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        if settings.health is not None:
            await until_healthy(address, settings.health, self._note)
        asked = settings.served_model_name or settings.model_id
        said = await until_it_answers(address, settings.planned.task, model=asked)
        return msgspec.structs.replace(address, renames={asked, said or asked} != {settings.model_id})

    def _note(self, waits_for: str) -> None:
        self._waits_for = waits_for

    async def gpu_layers(self, log: EngineLog) -> GpuLayers | None:
        return None

    def waits_for(self) -> str | None:
        return self._waits_for or f"nothing answers on {HOST}:{self._port}, which is its ${{PORT}}"

    def last_words(self, log: EngineLog) -> str | None:
        lines = [line.strip() for line in log.run_lines() if line.strip()]
        return " | ".join(lines[-LAST_LINES:]) or None

    def about(self) -> str:
        return f"program {self._settings.program}; `laya logs {self._settings.model_id}` has the rest"

    def may_try_again(self, log: EngineLog) -> bool:
        return any(_PORT_TAKEN.search(line) for line in log.run_lines())

    def measure(self, pid: int) -> MemoryReading | None:
        return read_family(pid)


def free_port() -> int:
    """One that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
