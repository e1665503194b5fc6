"""Owns: what `laya doctor` says of graphics cards: which are there, that the engine leaves them idle, their strain.

Asks nvidia-smi where it is installed, else reads what the kernel shows. Loads no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from laya.cli.doctor_machine import kernel_text
from laya.cli.finding import Finding, must_fix, ok, warn
from laya.config import Config
from laya.engines.builds import Build, installed
from laya.engines.gpu_wheels import GpuKind, choose
from laya.engines.hardware import Hardware, look
from laya.engines.hardware import ask_nvidia_smi as ask_with
from laya.errors import EngineFailed, NotSupported
from laya.memory import size_text
from laya.types import GIB, MIB

HOT_C = 85
MUCH_POWER_W = 300  # beside a processor at full load more than many desktop supplies bear
LESS_POWER = 0.8  # of the limit; decoding waits for memory, so it costs little speed
OWN_MEMORY_BYTES = 2 * GIB  # an AMD device with more than this is a card, with less it is part of the processor
_QUERY = ["--query-gpu=name,memory.total,driver_version,temperature.gpu,power.limit", "--format=csv,noheader,nounits"]
_NVIDIA, _AMD, _INTEL = "0x10de", "0x1002", "0x8086"

AskNvidia = Callable[[], str]


def ask_nvidia_smi() -> str:
    """One line a card: name, MiB, driver version, degrees Celsius, watts it may draw. "" without one, or nvidia-smi."""
    return ask_with(_QUERY)


def gpu(
    root: Path,
    config: Config,
    ask_nvidia: AskNvidia = ask_nvidia_smi,
    *,
    home: Path,
    build: Build | EngineFailed,
    look_at: Callable[[Path], Hardware] = look,
) -> Finding:
    """The cards, and whether they are of use. build: of llama.cpp, the one that is used."""
    cards = ", ".join(_nvidia_cards(root, ask_nvidia) + _amd_cards(root))
    if not cards and isinstance(build, Build) and build.kind != "cpu":
        seen = f"no GPU is found, and the engine in use is built for {build.hardware}"
        return must_fix("gpu", seen, "nvidia-smi   # what the driver says; without a card: laya engines use bundled")
    if not cards:
        is_small = any(vendor in (_AMD, _INTEL) for _, vendor in _drm_devices(root))
        what = "the processor's own graphics only" if is_small else "no GPU"
        return ok("gpu", f"{what}; the engine computes on the CPU")
    if _has_own_engine(config):
        return ok("gpu", f"GPU {cards}; engine_path names an engine of yours")
    if isinstance(build, Build) and build.kind != "cpu":
        return ok("gpu", f"GPU {cards}; the engine is built for {build.hardware}")
    idle = f"GPU {cards}: idle, the engine is CPU only"
    for_gpu = next((each for each in installed(home) if each.kind != "cpu"), None)
    if for_gpu is not None:
        return must_fix("gpu", f"{idle}; a build for {for_gpu.hardware} is here", f"laya engines use {for_gpu.name}")
    return must_fix("gpu", idle, _cure(look_at(root)))


def _cure(hardware: Hardware) -> str:
    """The build that runs here, or why none does; Vulkan's where nothing else does."""
    reasons = []
    kinds: tuple[GpuKind, ...] = ("rocm", "vulkan") if hardware.amd and not hardware.nvidia else ("cuda", "vulkan")
    for kind in kinds:
        try:
            choose(kind, hardware)
        except NotSupported as error:
            reasons.append(error.message)
        else:
            return f"laya engines install {kind}"
    return f"{reasons[0]} Then: laya engines install {kinds[0]}"


def gpu_strain(
    config: Config, ask_nvidia: AskNvidia = ask_nvidia_smi, *, build: Build | EngineFailed
) -> list[Finding]:
    """Cards that are hot, or that with the processor may draw more than a desktop's supply gives; none where idle."""
    if not _has_own_engine(config) and (isinstance(build, EngineFailed) or build.kind == "cpu"):
        return []
    findings = []
    for number, card in enumerate(_fields(line) for line in ask_nvidia().splitlines()):
        name, _, _, celsius, watts = card
        if celsius.isdigit() and int(celsius) >= HOT_C:
            findings.append(warn("gpu heat", f"GPU {number} {name}: {celsius} C", _less_power(number, watts)))
        elif "GeForce" in name and _number(watts) >= MUCH_POWER_W:
            seen = f"GPU {number} may draw {_number(watts):.0f} W and the processor its own: small supplies trip"
            findings.append(warn("gpu power", seen, _less_power(number, watts)))
    return findings


def _less_power(number: int, watts: str) -> str:
    return f"sudo nvidia-smi -i {number} -pl {LESS_POWER * (_number(watts) or MUCH_POWER_W):.0f}"


def _number(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _has_own_engine(config: Config) -> bool:
    return any(config.for_model(name).engine_path is not None for name in ("", *config.models))


def _fields(line: str) -> list[str]:
    return ([part.strip() for part in line.split(",")] + [""] * 5)[:5]


def _nvidia_cards(root: Path, ask_nvidia: AskNvidia) -> list[str]:
    cards = []
    for line in ask_nvidia().splitlines():
        name, memory_mib, driver, celsius, watts = _fields(line)
        if not name:
            continue
        size = f" {size_text(int(memory_mib) * MIB)}" if memory_mib.isdigit() else ""
        strain = f", {celsius} C" if celsius.isdigit() else ""
        strain += f", {_number(watts):.0f} W limit" if _number(watts) else ""
        cards.append(f"{name}{size}{f', driver {driver}' if driver else ''}{strain}")
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
