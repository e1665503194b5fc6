"""A CPU without the engine's instructions gets a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.engines.cpu import REQUIRED_X86_FLAGS, check_cpu
from laya.errors import EngineFailed


def cpuinfo(tmp_path: Path, flags: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    return path


def test_old_cpu_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"no AVX2, FMA, which .* engine_path"):
        check_cpu(cpuinfo(tmp_path, "sse4_2 avx bmi2 f16c"), "x86_64")


def test_new_cpu_passes(tmp_path: Path) -> None:
    check_cpu(cpuinfo(tmp_path, " ".join(REQUIRED_X86_FLAGS)), "x86_64")


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_other_architectures_pass(tmp_path: Path, machine: str) -> None:
    check_cpu(cpuinfo(tmp_path, "fp asimd"), machine)


def test_unreadable_cpuinfo_passes(tmp_path: Path) -> None:
    check_cpu(tmp_path / "nothing", "x86_64")
