"""Owns: how llama.cpp is started: its server in our child, or the user's own llama-server."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import msgspec

import laya
from laya.engines import llamacpp
from laya.engines.held_memory import MemoryReading, read_memory
from laya.engines.launcher import Launcher
from laya.engines.log import EngineLog
from laya.engines.offload import gpu_layers, has_told
from laya.engines.probe import most_template_tokens, until_it_answers
from laya.engines.settings import EngineSettings
from laya.types import EngineAddress, GpuLayers

TOLD_LOOKS, TOLD_LOOK_EVERY_S = 40, 0.05
_LISTENING = re.compile(r"listening on http://([^\s:/]+):(\d+)")


class LlamaCppLauncher(Launcher):
    """See launcher.Launcher."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._is_own_server = settings.engine_path is not None
        self.module = "laya.engines.program_child" if self._is_own_server else "laya.engines.llamacpp_child"
        self.files = tuple(path for path in (settings.path, settings.mmproj, settings.draft) if path is not None)
        self.needs_cpu = not self._is_own_server

    def check(self) -> None:
        self._settings.check()

    def environment(self) -> dict[str, str]:
        return child_environment(self._environment(), self._settings.packages)

    def document(self, api_key: str) -> dict[str, Any]:
        settings = self._settings
        if settings.engine_path is None:
            return {"params": llamacpp.params(settings, api_key), "threads_file": settings.threads_file}
        command = [llamacpp.absolute(settings.engine_path), *llamacpp.flags(settings)]
        return {"command": command, "environment": self._environment(api_key), "folder": None}

    def listens_at(self, log: EngineLog) -> str | None:
        if not self._is_own_server:
            return None  # the child reports it
        found = [match for line in log.run_lines() if (match := _LISTENING.search(line))]
        return f"{found[0][1]}:{found[0][2]}" if found else None

    async def prove(self, host: str, port: int, api_key: str) -> EngineAddress:
        address = EngineAddress(
            host=host,
            port=port,
            api_key=api_key,
            cancels_whole=False,
            keeps_streams=False,
            answers_kept=90,
            has_slots=True,
        )
        await until_it_answers(address, self._settings.planned.task)
        if self._settings.planned.task != "chat" or self._settings.mmproj is not None:
            return address  # without a template, or with images, which are many tokens in few bytes
        return msgspec.structs.replace(address, template_tokens=await most_template_tokens(address))

    async def gpu_layers(self, log: EngineLog) -> GpuLayers | None:
        planned = self._settings.planned.gpu_layers
        if not planned:
            why_none = self._settings.why_no_gpu
            return GpuLayers(planned=0, loaded=0, why_none=why_none) if why_none is not None else None
        for _ in range(TOLD_LOOKS):  # it was said before the first answer, but the log is another pipe
            if has_told(log.run_lines()):
                break
            await asyncio.sleep(TOLD_LOOK_EVERY_S)
        return gpu_layers(log.run_lines(), planned)

    def waits_for(self) -> str | None:
        return None

    def last_words(self, log: EngineLog) -> str | None:
        return log.error_words(first=True)

    def about(self) -> str:
        return f"model file {self._settings.path}"

    def may_try_again(self, log: EngineLog) -> bool:
        return False

    def measure(self, pid: int) -> MemoryReading | None:
        """Without pages of weights that were read on their way to a GPU: the engine unmaps them after the load."""
        reading, kept_bytes = read_memory(pid), self._settings.mapped_bytes
        if reading is None or kept_bytes is None:
            return reading
        held = reading.anonymous_bytes + min(kept_bytes, reading.resident_bytes - reading.anonymous_bytes)
        return msgspec.structs.replace(reading, peak_bytes=min(reading.peak_bytes, held), resident_bytes=held)

    def _environment(self, api_key: str | None = None) -> dict[str, str]:
        planned = self._settings.planned
        return llamacpp.environment(api_key, planned=planned, keeps_prompts=planned.prompt_cache_bytes > 0)


def child_environment(environment: dict[str, str], packages: Path | None = None) -> dict[str, str]:
    """The same for one of our own child programs, which has to find this package, and `packages` before all others."""
    environment = environment | {"PYTHONSAFEPATH": "1"}  # no module from the user's current folder
    root, first = Path(laya.__file__).resolve().parents[1], [str(packages)] if packages is not None else []
    if root.name not in ("site-packages", "dist-packages"):
        first.append(str(root))
    path = environment.get("PYTHONPATH")
    if first:
        environment["PYTHONPATH"] = os.pathsep.join([*first, path] if path else first)
    return environment
