"""Layers on GPUs as llama.cpp tells of them, in lines that its builds have printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from laya.engines.log import EngineLog
from laya.engines.offload import gpu_layers
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.types import ALL_LAYERS, GpuLayers

MakeSettings = Callable[..., EngineSettings]

ALL_ON_GPU = """\
load_tensors: offloading output layer to GPU
load_tensors: offloading 29 repeating layers to GPU
load_tensors: offloaded 31/31 layers to GPU
load_tensors:          CPU model buffer size =   577.50 MiB
load_tensors:        CUDA0 model buffer size =  6504.39 MiB
load_tensors:    CUDA_Host model buffer size =  9498.51 MiB
load_tensors: offloading output layer to GPU
load_tensors: offloaded 5/5 layers to GPU
load_tensors:          CPU model buffer size =   210.00 MiB
"""
PART_ON_GPU = """\
0.00.161.418 I load_tensors: offloaded 12/25 layers to GPU
0.00.173.724 I load_tensors:      Vulkan0 model buffer size =  4699.90 MiB
0.00.173.725 I load_tensors:   CPU_Mapped model buffer size =  7218.45 MiB
"""
COUNT_WITHOUT_WEIGHTS = """\
load_tensors: offloaded 33/33 layers to GPU
load_tensors:   CPU_Mapped model buffer size = 14526.27 MiB
load_tensors:    CUDA_Host model buffer size =   102.00 MiB
"""
CPU_BUILD = "0.00.173.724 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB\n"


@pytest.mark.parametrize(
    ("said", "planned", "expected", "is_short"),
    [
        (ALL_ON_GPU, ALL_LAYERS, GpuLayers(planned=31, loaded=31, total=31), False),
        (PART_ON_GPU, 12, GpuLayers(planned=12, loaded=12, total=25), False),
        (PART_ON_GPU, 25, GpuLayers(planned=25, loaded=12, total=25), True),
        (COUNT_WITHOUT_WEIGHTS, 33, GpuLayers(planned=33, loaded=0, total=33), True),
        (CPU_BUILD, 31, GpuLayers(planned=31, loaded=0), True),
        ("", 31, GpuLayers(planned=31, loaded=0), True),
    ],
    ids=["all, and a draft model", "as planned", "fewer than planned", "a count and no weights", "CPU build", "silent"],
)
def test_layers_are_those_that_the_engine_confirms(
    said: str, planned: int, expected: GpuLayers, is_short: bool
) -> None:
    layers = gpu_layers(said.splitlines(), planned)
    assert layers == expected
    assert layers.is_short == is_short


@pytest.mark.parametrize(("offloads", "is_short"), [(None, True), (0, True), (33, False)])
def test_own_server_tells_its_layers(
    make_settings: MakeSettings,
    some_gguf: Path,
    llama_server: Path,
    log: EngineLog,
    offloads: int | None,
    is_short: bool,
) -> None:
    args = {} if offloads is None else {"offloads": offloads}

    async def scenario() -> None:
        process = EngineProcess(make_settings(some_gguf, engine_path=llama_server, gpu_layers=33, args=args), log)
        address = await process.start()
        assert address.gpu_layers is not None
        assert (address.gpu_layers.loaded, address.gpu_layers.is_short) == (offloads or 0, is_short)
        await process.stop()

    uvloop.run(scenario())


@pytest.mark.engine
def test_built_in_engine_without_a_gpu_is_short_of_all(
    make_settings: MakeSettings, smollm2_path: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path, gpu_layers=ALL_LAYERS), log)
        address = await process.start()
        assert address.gpu_layers == GpuLayers(planned=ALL_LAYERS, loaded=0)
        await process.stop()

    uvloop.run(scenario())


def test_nothing_is_told_where_nothing_was_planned(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(some_gguf, engine_path=llama_server), log)
        assert (await process.start()).gpu_layers is None
        await process.stop()

    uvloop.run(scenario())
