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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from laya.engines.cpu import REQUIRED_X86_FLAGS
from laya.engines.gpu_wheels import GPU_KINDS, GpuKind
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
    """Those beside it that are whole, by name. What is being installed, or was left half done, has another name."""
    return [found for found in _found(home).values() if isinstance(found, Build)]


def broken(home: Path) -> dict[str, str]:
    """Folders of builds that cannot be used, with the reason: something happened to them since they were installed."""
    return {name: found for name, found in _found(home).items() if isinstance(found, str)}


def _found(home: Path) -> dict[str, Build | str]:
    """Each build beside it, or what is wrong with it."""
    folders = sorted(path for path in builds_folder(home).glob("[!.]*") if path.is_dir() and path.name != _USED)
    return {folder.name: _read(folder) for folder in folders}


def _read(folder: Path) -> Build | str:
    try:
        found = msgspec.json.decode((folder / RECORD).read_bytes(), type=Build)
    except OSError as error:
        return f"its {RECORD} cannot be read ({error.strerror})"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"its {RECORD} is damaged ({error})"
    return msgspec.structs.replace(found, name=folder.name, folder=folder)


class BuildGone(EngineFailed):
    """The build that was chosen cannot be used: a choice to be made anew, as with a wrong setting."""

    exit_code = ConfigError.exit_code


def used(home: Path) -> Build:
    """The one that models without an engine_path run by. Raises BuildGone where it is gone: another one, that may
    have no GPU, is never taken in its place."""
    name = used_name(home)
    if name == BUNDLED:
        return bundled()
    found = _found(home).get(name)
    if isinstance(found, Build):
        return found
    wrong = f"is not in {builds_folder(home)} any more" if found is None else f"is broken: {found}"
    raise BuildGone(
        f"The engine build '{name}', chosen by `laya engines use`, {wrong}. "
        "`laya engines list` shows those that are there; `laya engines use bundled` takes the one that came with Laya."
    )


def packages_for(engine_path: Path | None, home: Path) -> Path | None:
    """Where the engine of a model is; None: in Laya's own environment, or the user's own llama-server. Raises as
    `used`."""
    return used(home).folder if engine_path is None else None


def used_name(home: Path) -> str:
    try:
        return (builds_folder(home) / _USED).read_text(errors="replace").strip() or BUNDLED
    except (FileNotFoundError, NotADirectoryError):
        return BUNDLED
    except OSError as error:
        raise BuildGone(
            f"{builds_folder(home) / _USED}, which names the engine build in use, cannot be read: {error.strerror}."
        ) from None


def find(home: Path, name: str, *, to_remove: bool = False) -> Build:
    """By its name, or by a beginning that only one has. to_remove: a broken one too. Raises ConfigError."""
    faults = broken(home)
    there = {build.name: build for build in (bundled(), *installed(home))}
    names = [*there, *faults]
    close = [name] if name in names else [each for each in names if name and each.startswith(name)]
    if len(close) > 1:
        raise ConfigError(f"'{name}' is the beginning of several builds: {', '.join(close)}.")
    if close and close[0] in there:
        return there[close[0]]
    if close and to_remove:
        return Build(name=close[0], kind="cpu", version=MISSING, folder=builds_folder(home) / close[0])
    if close:
        raise ConfigError(f"The engine build '{close[0]}' is broken: {faults[close[0]]}. {mend_words(close[0])}")
    kind = next((each for each in GPU_KINDS if name.lower().startswith(each)), None)
    hint = nearest(name, names)
    mean = f"; did you mean {hint}?" if hint else f"; `laya engines install {kind}` installs one." if kind else "."
    raise ConfigError(f"There is no engine build '{name}'{mean} There are: {', '.join(names)}.")


def mend_words(name: str) -> str:
    """What to do with a broken build."""
    return f"`laya engines rm {name}` removes it; then it can be installed again."


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises EngineFailed where builds cannot be kept."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise EngineFailed(f"{folder} cannot be written: {why}. LAYA_HOME names another folder.") from None


def use(home: Path, build: Build) -> None:
    """From the next load on."""
    folder = builds_folder(home)
    fresh = folder / f".{_USED}-{os.getpid()}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(build.name + "\n")
            fresh.replace(folder / _USED)
        finally:
            fresh.unlink(missing_ok=True)


def remove(home: Path, build: Build) -> None:
    """Raises ConfigError for one that is used, or that came with Laya."""
    if build.folder is None:
        raise ConfigError("The engine that came with Laya is part of its environment.")
    if build.name == used_name(home):
        raise ConfigError(f"'{build.name}' is in use: `laya engines use bundled`, or another one, first.")
    gone = build.folder.with_name(f".gone-{os.getpid()}-{build.name}")
    with writing(builds_folder(home)):
        build.folder.rename(gone)  # at once, so that a half of it is never taken for a build
        shutil.rmtree(gone)
