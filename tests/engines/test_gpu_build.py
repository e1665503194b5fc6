"""Whether a build of llama.cpp computes on NVIDIA's GPUs, by what it lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from laya.engines.gpu_build import why_no_gpu

CUDA = "Available devices:\n  CUDA0: NVIDIA GeForce RTX 4090 (24217 MiB, 23850 MiB free)\n"
RADV = "Available devices:\n  Vulkan0: AMD Radeon (RADV) (16384 MiB, 16000 MiB free)\n"


@pytest.fixture
def make_server(tmp_path: Path) -> Callable[[str], Path]:
    """A program that answers --list-devices so, and nothing else."""

    def make(listed: str) -> Path:
        program = tmp_path / "llama-server"
        program.write_text(f'#!/bin/sh\n[ "$*" = "--list-devices" ] || exit 1\ncat <<END\n{listed}END\n')
        program.chmod(0o755)
        return program

    return make


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (CUDA, None),
        ("ggml_cuda_init: found 1 CUDA devices\n" + CUDA + "  Vulkan0: NVIDIA (24564 MiB, 23850 MiB free)\n", None),
        ("Available devices:\n", "is a build for CPUs"),
        ("Available devices:\n  ROCm0: AMD Radeon RX 7900 XTX (24560 MiB, 24000 MiB free)\n", None),
        (RADV, None),
        (RADV + "  Vulkan1: AMD Radeon (RADV) (512 MiB, 500 MiB free)\n", "sees 2 GPUs by Vulkan, and the memory of 1"),
        ("Available devices:\n  SYCL0: Intel Arc (16384 MiB, 16000 MiB free)\n", "is a build for SYCL"),
    ],
)
def test_a_build_is_known_by_the_devices_it_lists(make_server: Callable[[str], Path], listed: str, words: str) -> None:
    told = why_no_gpu(make_server(listed), None, 1)
    assert (told is None) if words is None else (told is not None and words in told)


def test_the_wheel_for_cpus_is_known_as_that() -> None:
    pytest.importorskip("xllamacpp")
    assert (why_no_gpu(None) or "").startswith("the engine that comes with Laya is a build for CPUs")


def test_a_program_that_lists_nothing_is_taken_for_one_without_gpus(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert "is a build for CPUs" in (why_no_gpu(program) or "")
    assert why_no_gpu(tmp_path / "missing") is None
