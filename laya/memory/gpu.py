"""Owns: what each GPU's memory holds, ours and that of other programs, as NVIDIA's library or AMD's driver tells it.

The library's Python binding (nvidia-ml-py) is used where it is installed; without it, or without a card or driver,
there are no cards of NVIDIA, and those of AMD are looked for in /sys. These do not tell whose memory it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from laya.types import GIB, MIB

NO_BINDING = "NVIDIA's cards are seen with the package nvidia-ml-py, which is not installed"
AMD, LEAST_CARD_BYTES = "0x1002", 2 * GIB  # PCI vendor; with less, it is part of the processor
KEPT_FREE_BYTES, KEPT_FREE_SHARE = 512 * MIB, 0.03


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One card, in bytes."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    own_bytes: int  # held by our engines
    process_bytes: dict[int, int] = {}  # the same, by their processes
    uuid: str = ""  # NVIDIA's name of it, as CUDA_VISIBLE_DEVICES may have it

    @property
    def others_bytes(self) -> int:
        """Held by other programs and the driver."""
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)

    @property
    def kept_free_bytes(self) -> int:
        """Left to drivers and other programs by every plan."""
        return max(KEPT_FREE_BYTES, round(KEPT_FREE_SHARE * self.total_bytes))

    @property
    def is_tight(self) -> bool:
        """Whether less is free than plans leave."""
        return self.free_bytes < self.kept_free_bytes


class GpuMeter:
    """The cards of this machine."""

    def __init__(self, library: Any = None, root: Path = Path("/")) -> None:
        """library: stands in for pynvml; None: the real one, where there is one. root: of the file system."""
        self._root = root
        self._library = library or _pynvml()
        self.why_none = "no GPU was found" if self._library is not None else f"no GPU was found ({NO_BINDING})"
        self._errors: tuple[type[Exception], ...] = ()
        if self._library is not None:
            self._errors = (self._library.NVMLError, OSError)
            try:
                self._library.nvmlInit()
            except self._errors:  # the binding without a driver
                self._library = None

    def read(self, own_pids: Collection[int] = ()) -> list[GpuMemory]:
        """Every card that answers; `own_pids` are those of our engines and all they started."""
        if self._library is None:
            return amd_cards(self._root)
        cards: list[GpuMemory] = []
        try:
            for index in range(self._library.nvmlDeviceGetCount()):
                cards.append(self._card(index, own_pids))
        except self._errors:  # a card that fell off the bus: what answered is shown
            return cards
        return cards or amd_cards(self._root)

    def _card(self, index: int, own_pids: Collection[int]) -> GpuMemory:
        library = self._library
        handle = library.nvmlDeviceGetHandleByIndex(index)
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        process_bytes: dict[int, int] = {}
        for list_processes in (
            library.nvmlDeviceGetComputeRunningProcesses,
            library.nvmlDeviceGetGraphicsRunningProcesses,  # engines that compute by Vulkan are here
        ):
            for process in list_processes(handle):
                if process.pid in own_pids:  # what is in both lists holds the same memory
                    process_bytes[process.pid] = max(process_bytes.get(process.pid, 0), process.usedGpuMemory or 0)
        return GpuMemory(
            index=index,
            name=_decoded(library.nvmlDeviceGetName(handle)),
            uuid=_decoded(library.nvmlDeviceGetUUID(handle)),
            total_bytes=memory.total,
            free_bytes=memory.free,
            own_bytes=sum(process_bytes.values()),
            process_bytes=process_bytes,
        )


def _decoded(said: str | bytes) -> str:
    """Older bindings give bytes."""
    return said.decode() if isinstance(said, bytes) else said


def amd_cards(root: Path) -> list[GpuMemory]:
    """AMD's cards in the order of the bus, by their driver's own figures; a processor's graphics are none."""
    cards: list[GpuMemory] = []
    for node in sorted((root / "sys/class/drm").glob("renderD*/device")):
        found = [_text(node / name) for name in ("vendor", "mem_info_vram_total", "mem_info_vram_used")]
        if found[0] != AMD or not found[1].isdigit() or not found[2].isdigit() or int(found[1]) < LEAST_CARD_BYTES:
            continue
        total, used = int(found[1]), int(found[2])
        name = _text(node / "product_name") or "AMD"
        free = max(0, total - used)
        cards.append(GpuMemory(index=len(cards), name=name, total_bytes=total, free_bytes=free, own_bytes=0))
    return cards


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _pynvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
