"""Owns: which of xllamacpp's GPU wheels runs on which hardware, as its authors state, and the choice among them. Pure.

CUDA wheels carry machine code for some cards, which runs with any driver of the toolkit's major version, and
intermediate code that the driver compiles for newer cards, if it is at least as new as the toolkit. ROCm wheels carry
machine code only. https://github.com/xorbitsai/xllamacpp#cuda-gpu-architecture-coverage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from laya.engines.hardware import Hardware, NvidiaCard, Version, check_linux, version_text
from laya.errors import ConfigError, NotSupported, nearest

GpuKind = Literal["cuda", "rocm", "vulkan"]
GPU_KINDS: tuple[GpuKind, ...] = get_args(GpuKind)
INDEX = "https://xorbitsai.github.io/xllamacpp/whl"
LEAST_GLIBC = (2, 35)


class GpuWheel(msgspec.Struct, frozen=True, kw_only=True):
    """One line of wheels."""

    kind: GpuKind
    folder: str  # of the index
    toolkit: Version = ()
    native: tuple[Version, ...] = ()  # compute capabilities with machine code
    exact: tuple[Version, ...] = ()  # the same, which runs on no newer one
    compiled: tuple[Version, ...] = ()  # with intermediate code, for these and whatever is newer
    targets: tuple[str, ...] = ()  # of AMD
    machines: tuple[str, ...] = ("x86_64",)

    @property
    def index_url(self) -> str:
        return f"{INDEX}/{self.folder}"

    @property
    def label(self) -> str:
        """`cuda12.8`: in names of builds."""
        return f"{self.kind}{version_text(self.toolkit)}"

    @property
    def words(self) -> str:
        """`CUDA 12.8`."""
        name = {"cuda": "CUDA", "rocm": "ROCm", "vulkan": "Vulkan"}[self.kind]
        return f"{name} {version_text(self.toolkit)}".strip()

    def runs_on(self, card: NvidiaCard, cuda: Version) -> bool:
        """Whether a driver that runs this CUDA computes on the card with it."""
        capability = card.capability
        has_code = capability in self.exact or any(
            each[0] == capability[0] and each <= capability for each in self.native
        )
        if has_code:
            return cuda[:1] >= self.toolkit[:1]
        return cuda >= self.toolkit and any(each <= capability for each in self.compiled)


# The newest first.
WHEELS = (
    GpuWheel(
        kind="cuda", folder="cu132", toolkit=(13, 2), machines=("x86_64", "aarch64"),
        native=((7, 5), (8, 6), (8, 9)), exact=((12, 0), (12, 1)), compiled=((8, 0),),
    ),
    GpuWheel(
        kind="cuda", folder="cu128", toolkit=(12, 8), machines=("x86_64", "aarch64"),
        native=((8, 6), (8, 9)), exact=((12, 0),), compiled=((5, 0),),
    ),
    GpuWheel(
        kind="rocm", folder="rocm-7.2.4", toolkit=(7, 2, 4),
        targets=(
            "gfx1030", "gfx1031", "gfx1032", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200",
            "gfx1201", "gfx950",
        ),
    ),
    GpuWheel(
        kind="rocm", folder="rocm-6.4.1", toolkit=(6, 4, 1),
        targets=("gfx1030", "gfx1031", "gfx1032", "gfx1100", "gfx1101", "gfx1102"),
    ),
    GpuWheel(kind="vulkan", folder="vulkan"),
)  # fmt: skip


def named(kind: GpuKind, toolkit: str) -> GpuWheel:
    """The line with this toolkit, whatever is here. Raises ConfigError."""
    wheels = {version_text(wheel.toolkit): wheel for wheel in WHEELS if wheel.kind == kind}
    if "" in wheels and toolkit:
        raise ConfigError(f"--toolkit {toolkit}: the builds for {kind} need none; leave it out.")
    if toolkit not in wheels:
        close = nearest(toolkit, wheels) or next(iter(wheels))
        raise ConfigError(
            f"There are no wheels for {kind} {toolkit}; did you mean {close}? There are {', '.join(wheels)}."
        )
    return wheels[toolkit]


def choose(kind: GpuKind, hardware: Hardware) -> GpuWheel:
    """The newest line that computes on the cards here; on most of them, where none does on all. Raises NotSupported."""
    check_linux(hardware, LEAST_GLIBC)
    wheels = [wheel for wheel in WHEELS if wheel.kind == kind and hardware.machine in wheel.machines]
    if not wheels:
        raise NotSupported(f"There are no {kind} wheels for {hardware.machine}; engine_path takes a build of your own.")
    return _CHOICES[kind](wheels, hardware)


def _choose_cuda(wheels: Sequence[GpuWheel], hardware: Hardware) -> GpuWheel:
    if not hardware.nvidia:
        raise NotSupported("nvidia-smi finds no NVIDIA GPU here: the card's driver has to be installed first.")
    counts = [sum(wheel.runs_on(card, hardware.cuda) for card in hardware.nvidia) for wheel in wheels]
    if any(counts):
        return wheels[counts.index(max(counts))]
    cards = ", ".join(f"{card.name} (compute capability {version_text(card.capability)})" for card in hardware.nvidia)
    least = min(min((*wheel.native, *wheel.compiled)) for wheel in wheels)
    if all(card.capability < least for card in hardware.nvidia):
        raise NotSupported(f"{cards}: the CUDA builds begin with compute capability {version_text(least)}.")
    oldest = min(wheel.toolkit for wheel in wheels)
    has = f"CUDA {version_text(hardware.cuda)}" if hardware.cuda else "no CUDA that nvidia-smi names"
    raise NotSupported(
        f"{cards}: driver {hardware.nvidia_driver} runs {has}; the builds need one for CUDA {version_text(oldest)} "
        "(570 or newer)."
    )


def _choose_rocm(wheels: Sequence[GpuWheel], hardware: Hardware) -> GpuWheel:
    if not hardware.amd:
        raise NotSupported("The kernel shows no AMD GPU that computes (/dev/kfd): its driver, amdgpu, comes first.")
    if not hardware.rocm:
        raise NotSupported("There is no ROCm in /opt/rocm, whose libraries the ROCm builds need; Vulkan needs none.")
    for wheel in wheels:
        if wheel.toolkit[0] == hardware.rocm[0] and any(target in wheel.targets for target in hardware.amd):
            return wheel
    covering = [wheel for wheel in wheels if any(target in wheel.targets for target in hardware.amd)]
    cards = ", ".join(hardware.amd)
    if not covering:
        raise NotSupported(f"{cards}: no ROCm build has code for it; `laya engines install vulkan` may run.")
    needed = " or ".join(str(wheel.toolkit[0]) for wheel in covering)
    raise NotSupported(f"{cards}: its builds need ROCm {needed}; ROCm {version_text(hardware.rocm)} is installed.")


def _choose_vulkan(wheels: Sequence[GpuWheel], hardware: Hardware) -> GpuWheel:
    if not hardware.vulkan:
        raise NotSupported(
            "No driver for Vulkan is installed (/usr/share/vulkan/icd.d): sudo apt install mesa-vulkan-drivers, or "
            "NVIDIA's own driver."
        )
    return wheels[0]


_CHOICES: dict[GpuKind, Callable[[Sequence[GpuWheel], Hardware], GpuWheel]] = {
    "cuda": _choose_cuda,
    "rocm": _choose_rocm,
    "vulkan": _choose_vulkan,
}
