"""Owns: what `laya doctor` says of graphics cards: which are there, and that the engine here leaves them idle.

Asks nvidia-smi where it is installed, else reads what the kernel shows. Knows no engine.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from laya.cli.doctor_machine import kernel_text
from laya.cli.finding import Finding, must_fix, ok
from laya.config import Config
from laya.memory import size_text
from laya.types import GIB, MIB

NVIDIA_SMI_TIMEOUT_S = 10
OWN_MEMORY_BYTES = 2 * GIB  # an AMD device with more than this is a card, with less it is part of the processor
_QUERY = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
_NVIDIA, _AMD, _INTEL = "0x10de", "0x1002", "0x8086"
_CURE = (
    "no GPU engine is part of this version; engine_path may name a script of yours: "
    'exec llama-server "$@" --n-gpu-layers 99   (GPU memory is not planned)'
)

AskNvidia = Callable[[], str]


def ask_nvidia_smi() -> str:
    """One line a card: name, MiB, driver version. "" without nvidia-smi, or with one that finds no card."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpu(root: Path, config: Config, ask_nvidia: AskNvidia = ask_nvidia_smi) -> Finding:
    """The cards, and whether they are of use."""
    cards = ", ".join(_nvidia_cards(root, ask_nvidia) + _amd_cards(root))
    if not cards:
        is_small = any(vendor in (_AMD, _INTEL) for _, vendor in _drm_devices(root))
        what = "the processor's own graphics only" if is_small else "no GPU"
        return ok("gpu", f"{what}; the engine computes on the CPU")
    if any(config.for_model(name).engine_path is not None for name in ("", *config.models)):
        return ok("gpu", f"GPU {cards}; engine_path names an engine of yours")
    return must_fix("gpu", f"GPU {cards}: idle, the engine of this version computes on the CPU", _CURE)


def _nvidia_cards(root: Path, ask_nvidia: AskNvidia) -> list[str]:
    cards = []
    for line in ask_nvidia().splitlines():
        name, memory_mib, driver = ([part.strip() for part in line.split(",")] + ["", ""])[:3]
        if not name:
            continue
        size = f" {size_text(int(memory_mib) * MIB)}" if memory_mib.isdigit() else ""
        cards.append(f"{name}{size}{f', driver {driver}' if driver else ''}")
    return cards or _nvidia_cards_of_the_kernel(root)


def _nvidia_cards_of_the_kernel(root: Path) -> list[str]:
    """As NVIDIA's driver names them, else as the free driver shows them, without a name."""
    cards = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in kernel_text(path).splitlines())
        cards.append(lines.get("Model", "NVIDIA").strip())
    return cards or ["NVIDIA, without its driver" for _, vendor in _drm_devices(root) if vendor == _NVIDIA]


def _amd_cards(root: Path) -> list[str]:
    cards = []
    for device, vendor in _drm_devices(root):
        n_bytes = kernel_text(device / "mem_info_vram_total").strip()
        if vendor == _AMD and n_bytes.isdigit() and int(n_bytes) > OWN_MEMORY_BYTES:
            cards.append(f"AMD {size_text(int(n_bytes))}")
    return cards


def _drm_devices(root: Path) -> list[tuple[Path, str]]:
    """Devices that can compute (those with a render node) and their PCI vendors."""
    nodes = sorted((root / "dev/dri").glob("renderD*"))
    devices = [root / "sys/class/drm" / node.name / "device" for node in nodes]
    return [(device, kernel_text(device / "vendor").strip()) for device in devices]
