"""Owns: the builds of llama.cpp on this machine: the one that came with Laya and those installed beside it, and which
one is used.

A build is a folder of packages below Laya's home, named after what it is for and its version, so that an update of Laya
leaves the engine as it is, and the other way round. It is there once its folder has that name (build_install.py), and
`used` holds the name of one of them.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from laya.engines.cpu import REQUIRED_X86_FLAGS
from laya.engines.gpu_wheels import GpuKind
from laya.errors import ConfigError, EngineFailed, nearest

PACKAGE = "xllamacpp"
BUNDLED = "bundled"
MISSING = "missing"  # the version of a package that is not installed
RECORD = "build.json"
_USED = "used"


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """One build."""

    name: str
    kind: Literal["cpu"] | GpuKind
    version: str  # of the package
    toolkit: str = ""  # 12.8 of CUDA
    devices: tuple[str, ...] = ()  # GPUs that it found when it was installed
    n_bytes: int = 0
    folder: Path | None = None  # of its packages; None: those of Laya's own environment

    @property
    def hardware(self) -> str:
        """What it computes on: `CPU with AVX2`, `CUDA 12.8`."""
        if self.kind == "cpu":
            is_x86 = platform.machine().lower() in ("x86_64", "amd64")
            return f"CPU with {', '.join(REQUIRED_X86_FLAGS).upper()}" if is_x86 else "CPU"
        return f"{ {'cuda': 'CUDA', 'rocm': 'ROCm', 'vulkan': 'Vulkan'}[self.kind] } {self.toolkit}".strip()

    @property
    def words(self) -> str:
        """`llama.cpp (xllamacpp 2026.10.11549), CUDA 12.8`."""
        short = "CPU" if self.kind == "cpu" else self.hardware
        return f"llama.cpp ({PACKAGE} {self.version}), {short}"


def builds_folder(home: Path) -> Path:
    return home / "engines" / "llamacpp"


def bundled() -> Build:
    """The one in Laya's own environment."""
    try:
        return Build(name=BUNDLED, kind="cpu", version=version(PACKAGE))
    except PackageNotFoundError:
        return Build(name=BUNDLED, kind="cpu", version=MISSING)


def installed(home: Path) -> list[Build]:
    """Those beside it, by name. What is being installed, or was left half done, has another name and no record."""
    folders = sorted(builds_folder(home).glob(f"[!.]*/{RECORD}"))
    return [_read(record) for record in folders]


def _read(record: Path) -> Build:
    """Raises EngineFailed."""
    try:
        found = msgspec.json.decode(record.read_bytes(), type=Build)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineFailed(f"The record of an engine build, {record}, cannot be read: {error}") from None
    return msgspec.structs.replace(found, name=record.parent.name, folder=record.parent)


def used(home: Path) -> Build:
    """The one that models without an engine_path run by. Raises EngineFailed where it is gone: another one, that may
    have no GPU, is never taken in its place."""
    name = used_name(home)
    if name == BUNDLED:
        return bundled()
    record = builds_folder(home) / name / RECORD
    if not record.is_file():
        raise EngineFailed(
            f"The engine build '{name}', chosen by `laya engines use`, is not in {builds_folder(home)} any more. "
            "`laya engines list` shows those that are; `laya engines use bundled` takes the one that came with Laya."
        )
    return _read(record)


def packages_for(engine_path: Path | None, home: Path) -> Path | None:
    """Where the engine of a model is; None: in Laya's own environment, or the user's own llama-server. Raises as
    `used`."""
    return used(home).folder if engine_path is None else None


def used_name(home: Path) -> str:
    try:
        return (builds_folder(home) / _USED).read_text().strip() or BUNDLED
    except FileNotFoundError:
        return BUNDLED


def find(home: Path, name: str) -> Build:
    """By its name, or by a beginning that only one has. Raises ConfigError."""
    there = {build.name: build for build in (bundled(), *installed(home))}
    close = [name] if name in there else [each for each in there if each.startswith(name)]
    if len(close) == 1:
        return there[close[0]]
    if close:
        raise ConfigError(f"'{name}' is the beginning of several builds: {', '.join(close)}.")
    hint = nearest(name, there)
    mean = f"; did you mean {hint}?" if hint else ""
    raise ConfigError(f"There is no engine build '{name}'{mean} There are: {', '.join(there)}.")


def use(home: Path, build: Build) -> None:
    """From the next load on."""
    folder = builds_folder(home)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{_USED}-{os.getpid()}"
    fresh.write_text(build.name + "\n")
    fresh.replace(folder / _USED)


def remove(home: Path, build: Build) -> None:
    """Raises ConfigError for one that is used, or that came with Laya."""
    if build.folder is None:
        raise ConfigError("The engine that came with Laya is part of its environment.")
    if build.name == used_name(home):
        raise ConfigError(f"'{build.name}' is in use: `laya engines use bundled`, or another one, first.")
    gone = build.folder.with_name(f".gone-{os.getpid()}-{build.name}")
    build.folder.rename(gone)  # at once, so that a half of it is never taken for a build
    shutil.rmtree(gone)
