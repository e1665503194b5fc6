"""Owns: how vLLM is started: out of its own environment, on a port that Laya picks, proven by one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from laya.engines.command import free_port
from laya.engines.held_memory import MemoryReading, read_family
from laya.engines.launcher import Launcher
from laya.engines.llamacpp_launcher import child_environment
from laya.engines.log import EngineLog
from laya.engines.probe import until_healthy, until_it_answers
from laya.engines.vllm import HOST, VllmEngineSettings, command, environment
from laya.engines.vllm_words import fault_of_load, is_port_taken, percent_of, why
from laya.errors import BadModelFile
from laya.types import MIB, EngineAddress

HEALTH = "/health"
LIBRARY_BYTES = 256 * MIB  # that it maps; what is more is its checkpoint, which it has copied and the kernel drops


class VllmLauncher(Launcher):
    """See launcher.Launcher."""

    module = "laya.engines.program_child"
    files: tuple[Path, ...] = ()  # its workers read them, in processes that come and go: the log tells how far it is
    needs_cpu = False

    def __init__(self, settings: VllmEngineSettings) -> None:
        self._settings = settings
        self._port = free_port()
        self._waits_for = ""

    def check(self) -> None:
        if not (self._settings.path / "config.json").is_file():
            raise BadModelFile(f"{self._settings.path} has no config.json", param="model")
        command(self._settings, self._port)

    def environment(self) -> dict[str, str]:
        return child_environment(environment(self._settings, ""))

    def document(self, api_key: str) -> dict[str, Any]:
        return {
            "command": command(self._settings, self._port),
            "environment": environment(self._settings, api_key),
            "folder": "/",
        }

    def listens_at(self, log: EngineLog) -> str | None:
        return f"{HOST}:{self._port}"

    async def prove(self, host: str, port: int, api_key: str) -> EngineAddress:
        address = EngineAddress(
            host=host,
            port=port,
            api_key=api_key,
            cancels_whole=True,
            dialect="openai",
            alive_path=HEALTH,
        )
        await until_healthy(address, HEALTH, self._note)
        task = self._settings.planned.task
        await until_it_answers(address, task, model=self._settings.model_id, has_completions=True)
        return address

    def _note(self, waits_for: str) -> None:
        self._waits_for = waits_for

    def waits_for(self) -> str | None:
        return self._waits_for or "it loads, or compiles: enforce_eager: true starts sooner"

    def last_words(self, log: EngineLog) -> str | None:
        said = why(log.run_lines())
        return said.words if said is not None else log.error_words(first=True)

    def end_words(self, log: EngineLog, *, was_ready: bool) -> str | None:
        return self.last_words(log)

    def ran_out(self, log: EngineLog) -> bool:
        said = why(log.run_lines())
        return said is not None and said.is_gpu_full

    def load_fault(self, log: EngineLog) -> str | None:
        return fault_of_load(log.run_lines())

    def load_percent(self, log: EngineLog) -> int | None:
        return percent_of(log.run_lines())

    def about(self) -> str:
        build = self._settings.build
        return f"vLLM {build.version}, {self._settings.path}; `laya logs {self._settings.model_id}` has the rest"

    def may_try_again(self, log: EngineLog) -> bool:
        return is_port_taken(log.run_lines())

    def measure(self, pid: int) -> MemoryReading | None:
        reading = read_family(pid)
        if reading is None or self._settings.gpu_share is not None:
            return reading
        held = reading.resident_bytes - max(0, reading.file_bytes - LIBRARY_BYTES)
        return msgspec.structs.replace(reading, peak_bytes=held, resident_bytes=held)
