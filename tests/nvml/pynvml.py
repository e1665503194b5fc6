"""Stands in for NVIDIA's library where there is no card: answers from a script, in the shape of nvidia-ml-py's answers.

`PLAYED_NVML` names the script, read anew at each reading, so that a test may go on in it: {"cards": [{"name", "uuid",
"total", "free", "compute": {pid: bytes}, "graphics": {pid: bytes}}]}, bytes null where NVML says it does not know. With
this folder in PYTHONPATH a server takes it for the real one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As the library's own."""


def _script() -> dict[str, Any]:
    script: dict[str, Any] = json.loads(Path(os.environ["PLAYED_NVML"]).read_text())
    return script


def nvmlInit() -> None:
    if "PLAYED_NVML" not in os.environ:
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount() -> int:
    return len(_script()["cards"])


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    card: dict[str, Any] = _script()["cards"][index]
    if card.get("is_lost"):
        raise NVMLError("GPU is lost")
    return card


def nvmlDeviceGetMemoryInfo(handle: dict[str, Any]) -> Any:
    return SimpleNamespace(total=handle["total"], free=handle["free"], used=handle["total"] - handle["free"])


def nvmlDeviceGetName(handle: dict[str, Any]) -> str:
    return str(handle["name"])


def nvmlDeviceGetUUID(handle: dict[str, Any]) -> str:
    return str(handle.get("uuid", ""))


def _processes(named: dict[str, int | None]) -> list[Any]:
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=n_bytes) for pid, n_bytes in named.items()]


def nvmlDeviceGetComputeRunningProcesses(handle: dict[str, Any]) -> list[Any]:
    return _processes(handle.get("compute", {}))


def nvmlDeviceGetGraphicsRunningProcesses(handle: dict[str, Any]) -> list[Any]:
    return _processes(handle.get("graphics", {}))
