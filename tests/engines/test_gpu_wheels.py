"""Which GPU wheel suits which machine, by what its authors state; and what is read of a machine for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laya.engines.gpu_wheels import GPU_KINDS, INDEX, choose, named
from laya.engines.hardware import Hardware, NvidiaCard, look, version_of
from laya.errors import ConfigError, NotSupported

PC: dict[str, Any] = {"machine": "x86_64", "glibc": (2, 35)}


def nvidia(*capabilities: str, cuda: str, **more: Any) -> Hardware:
    cards = tuple(NvidiaCard(name=f"card {each}", capability=version_of(each)) for each in capabilities)
    return Hardware(**PC | {"nvidia": cards, "nvidia_driver": "999.1", "cuda": version_of(cuda)} | more)


@pytest.mark.parametrize(
    ("capability", "cuda", "folder"),
    [
        ("8.6", "13.2", "cu132"),  # RTX 3090
        ("8.6", "13.0", "cu132"),  # machine code runs with any driver of CUDA 13
        ("8.6", "12.8", "cu128"),
        ("8.9", "12.2", "cu128"),  # RTX 4090, and the same of CUDA 12
        ("7.5", "13.0", "cu132"),  # RTX 2080
        ("7.5", "12.8", "cu128"),
        ("8.0", "13.0", "cu128"),  # A100: compiled by the driver, which is too old for 13.2
        ("9.0", "13.2", "cu132"),  # H100
        ("6.1", "13.2", "cu128"),  # GTX 1080
        ("12.0", "13.0", "cu132"),  # RTX 5090
        ("12.1", "13.0", "cu132"),
        ("12.1", "12.8", "cu128"),
    ],
)
def test_cuda_wheel_is_the_newest_that_the_driver_runs_on_the_card(capability: str, cuda: str, folder: str) -> None:
    wheel = choose("cuda", nvidia(capability, cuda=cuda))
    assert (wheel.folder, wheel.index_url) == (folder, f"{INDEX}/{folder}")


def test_cards_that_differ_get_the_wheel_that_runs_on_most() -> None:
    assert choose("cuda", nvidia("6.1", "8.6", cuda="13.2")).folder == "cu128"
    assert choose("cuda", nvidia("3.5", "8.6", cuda="13.2")).folder == "cu132"


@pytest.mark.parametrize(
    ("kind", "hardware", "words"),
    [
        ("cuda", Hardware(**PC), "nvidia-smi finds no NVIDIA GPU"),
        ("cuda", nvidia("8.0", cuda="12.4"), "driver 999.1 runs CUDA 12.4; the builds need one for CUDA 12.8 (570"),
        ("cuda", nvidia("8.6", cuda="11.8"), "runs CUDA 11.8"),
        ("cuda", nvidia("3.5", cuda="12.8"), "begin with compute capability 5.0"),
        ("cuda", nvidia("8.6", cuda="12.8", glibc=(2, 31)), "This system has glibc 2.31; the GPU builds need 2.35"),
        ("cuda", nvidia("8.6", cuda="12.8", glibc=()), "This system has no glibc"),
        ("rocm", Hardware(**PC), "no AMD GPU that computes"),
        ("rocm", Hardware(**PC, amd=("gfx1100",)), "There is no ROCm in /opt/rocm"),
        ("rocm", Hardware(**PC, amd=("gfx1200",), rocm=(6, 4, 1)), "its builds need ROCm 7; ROCm 6.4.1 is installed"),
        ("rocm", Hardware(**PC, amd=("gfx906",), rocm=(7, 1)), "no ROCm build has code for it"),
        ("rocm", Hardware(machine="aarch64", glibc=(2, 39), amd=("gfx1100",)), "There are no rocm wheels for aarch64"),
        ("vulkan", Hardware(**PC), "No driver for Vulkan is installed"),
    ],
)
def test_what_runs_no_wheel_is_told_why(kind: Any, hardware: Hardware, words: str) -> None:
    with pytest.raises(NotSupported) as refused:
        choose(kind, hardware)
    assert words in refused.value.message


def test_amd_and_vulkan_get_theirs() -> None:
    assert choose("rocm", Hardware(**PC, amd=("gfx1100",), rocm=(7, 1, 0))).folder == "rocm-7.2.4"
    assert choose("rocm", Hardware(**PC, amd=("gfx1030",), rocm=(6, 2))).folder == "rocm-6.4.1"
    assert choose("vulkan", Hardware(**PC, vulkan=("radeon_icd",))).folder == "vulkan"


def test_toolkit_by_name() -> None:
    assert named("cuda", "12.8").label == "cuda12.8"
    with pytest.raises(ConfigError, match=r"no wheels for cuda 12\.9; did you mean 12\.8\? There are 13\.2, 12\.8\."):
        named("cuda", "12.9")


def test_machine_is_read_as_the_kernel_and_nvidia_smi_show_it(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, target in enumerate((0, 110000, 90010, 100301)):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(
            f"cpu_cores_count 8\ngfx_target_version {target}\nsimd_count 0\n"
        )
    for path, text in {
        "opt/rocm/.info/version": "7.0.2-56\n",
        "usr/share/vulkan/icd.d/radeon_icd.x86_64.json": "{}",
        "usr/share/vulkan/icd.d/lvp_icd.x86_64.json": "{}",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    said = {
        True: "NVIDIA GeForce RTX 4090, 570.86.15, 8.9\nTesla K80, 570.86.15, [N/A]\n",
        False: "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |\n",
    }
    found = look(tmp_path, lambda words: said[bool(words)])
    assert found.nvidia == (NvidiaCard(name="NVIDIA GeForce RTX 4090", capability=(8, 9)),)
    assert (found.nvidia_driver, found.cuda) == ("570.86.15", (12, 8))
    assert (found.amd, found.rocm) == (("gfx1100", "gfx90a", "gfx1031"), (7, 0, 2))
    assert found.vulkan == ("radeon_icd",)


def test_this_machine_can_be_read() -> None:
    assert look().machine
    assert set(GPU_KINDS) == {"cuda", "rocm", "vulkan"}
