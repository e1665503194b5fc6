"""Owns: what of this machine decides which GPU build of llama.cpp runs here: cards, drivers, the C library.

Asks nvidia-smi where it is, and reads what the kernel shows. Changes nothing and knows no build.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from laya.errors import NotSupported

Version = tuple[int, ...]
AskNvidia = Callable[[list[str]], str]
NVIDIA_SMI_TIMEOUT_S = 10
_CUDA = re.compile(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)")
_CARD = "--query-gpu=name,driver_version,compute_cap"


class NvidiaCard(msgspec.Struct, frozen=True, kw_only=True):
    """One card, as its driver tells."""

    name: str
    capability: Version  # compute capability: (8, 6)


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What is here; () and "" where nothing is."""

    machine: str  # x86_64, aarch64
    glibc: Version = ()
    nvidia: tuple[NvidiaCard, ...] = ()
    nvidia_driver: str = ""
    cuda: Version = ()  # the newest that the driver runs
    amd: tuple[str, ...] = ()  # targets such as gfx1100, of cards whose driver computes
    rocm: Version = ()  # of the ROCm that is installed
    vulkan: tuple[str, ...] = ()  # drivers for Vulkan


def ask_nvidia_smi(words: list[str]) -> str:
    """What it prints; "" without it, or without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def look(root: Path = Path("/"), ask: AskNvidia = ask_nvidia_smi) -> Hardware:
    """This machine now."""
    cards, driver = [], ""
    for line in ask([_CARD, "--format=csv,noheader"]).splitlines():
        name, driver_version, capability = ([part.strip() for part in line.split(",")] + [""] * 3)[:3]
        if name and (parsed := version_of(capability)):
            cards.append(NvidiaCard(name=name, capability=parsed))
            driver = driver_version
    cuda = _CUDA.search(ask([])) if cards else None
    return Hardware(
        machine=platform.machine(),
        glibc=_glibc(),
        nvidia=tuple(cards),
        nvidia_driver=driver,
        cuda=(int(cuda[1]), int(cuda[2])) if cuda else (),
        amd=_amd_targets(root),
        rocm=version_of(_text(root / "opt/rocm/.info/version")),
        vulkan=_vulkan_drivers(root),
    )


def version_of(text: str) -> Version:
    """`8.6` -> (8, 6); () where it begins with no number."""
    found = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(map(int, found[0].split("."))) if found else ()


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


def _glibc() -> Version:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):  # musl
        return ()
    return version_of(version) if name == "glibc" else ()


def _amd_targets(root: Path) -> tuple[str, ...]:
    """Of each AMD card that the kernel lets programs compute on."""
    targets = []
    for properties in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        found = re.search(r"^gfx_target_version (\d+)$", _text(properties), re.MULTILINE)
        number = int(found[1]) if found else 0
        if number:  # 110000: major, minor, stepping, two digits each; the name has the last two in hexadecimal
            targets.append(f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}")
    return tuple(targets)


def _vulkan_drivers(root: Path) -> tuple[str, ...]:
    folders = (root / "usr/share/vulkan/icd.d", root / "etc/vulkan/icd.d")
    names = sorted(path.name.split(".")[0] for folder in folders for path in folder.glob("*.json"))
    return tuple(name for name in names if not name.startswith(("lvp_", "lavapipe")))  # which computes on the CPU


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_linux(hardware: Hardware, least_glibc: Version) -> None:
    """Raise NotSupported where no wheel of a GPU build can be loaded, whatever the card."""
    if hardware.glibc < least_glibc:
        has = f"glibc {version_text(hardware.glibc)}" if hardware.glibc else "no glibc"
        raise NotSupported(
            f"This system has {has}; the GPU builds need {version_text(least_glibc)} or newer (Ubuntu 22.04, "
            "Debian 12). A llama-server that was built here runs by engine_path."
        )
