"""A model that does not fit in any setting: which others here do, and that they load when they are asked for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from laya.bench.generated_models import GeneratedShape, generate
from laya.errors import InsufficientMemory
from tests.conftest import PROGRAM, ROOT, RunningServer

from .fleet_world import World, in_world, plans_of

__all__ = ["in_world"]


@pytest.mark.anyio
@pytest.mark.usefixtures("in_world")
async def test_models_here_that_fit_are_named_its_own_in_fewer_bits_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"m-f16": 2000, "m-q8_0": 1100, "m-q4_0": 700, "middle": 750, "small": 200, "smaller": 100, "embedder": 50}
    world = plans_of(World(tmp_path, needs, total_bytes=1000), monkeypatch)
    for name, need in needs.items():
        world.fleet.files[name] = msgspec.structs.replace(world.fleet.files[name], file_bytes=need)
    embedder = world.endpoint("embedder")
    embedder.settings = msgspec.structs.replace(embedder.settings, task="embed")
    with pytest.raises(InsufficientMemory, match="Of the models here 'm-q4_0', 'middle', 'small' would fit") as caught:
        await world.load("m-f16")
    assert caught.value.details["models"] == ["m-q4_0", "middle", "small"]
    for name in caught.value.details["models"]:
        await world.load(name)
    await world.close()


@pytest.mark.anyio
@pytest.mark.usefixtures("in_world")
async def test_models_that_are_loaded_or_fit_by_their_settings_are_named_whatever_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = plans_of(World(tmp_path, {"greedy": 5000, "twin": 200, "huge": 3000}, total_bytes=1000), monkeypatch)
    with pytest.raises(InsufficientMemory) as caught:
        await world.load("greedy")
    assert caught.value.details["models"] == ["twin"]
    await world.load("twin")
    world.needs["twin"] = 5000  # planned again it would not fit; but it runs
    with pytest.raises(InsufficientMemory) as caught:
        await world.load("greedy")
    assert caught.value.details["models"] == ["twin"]
    with pytest.raises(InsufficientMemory) as caught:
        await world.load("huge")
    assert caught.value.details["models"] == ["twin"]
    await world.close()


@pytest.mark.engine
def test_variant_that_a_refusal_and_a_plan_name_loads(
    start_server: Callable[..., RunningServer], smollm2_path: Path, laya_home: Path, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"n_layer": 6, "n_embd": 1024, "n_head": 8, "n_head_kv": 2, "n_ff": 4096}
    for weights in ("Q8_0", "Q4_1"):
        path = tmp_path / f"pair-{weights.lower()}.gguf"
        generate(path, GeneratedShape(weights=weights, **shape), vocabulary=smollm2_path)
    config = f"version: 1\nn_threads: 1\nmodels_dir: {tmp_path}\nmemory: {{budget: 215MiB}}\n"
    server = start_server(config=config)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with httpx.Client(base_url=f"{server.url}/v1", trust_env=False, timeout=60) as client:
        refused = client.post("/chat/completions", json=body | {"model": "pair-q8_0"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (422, "insufficient_memory")
        assert "pair-q4_1" in error["models"]
        for name in error["models"]:
            assert client.post("/chat/completions", json=body | {"model": name}).status_code == 200, name
    planned = subprocess.run(
        [*PROGRAM, "plan", "pair-q8_0", "--json"],
        env=os.environ | {"LAYA_HOME": str(laya_home), "PYTHONPATH": str(ROOT)},
        cwd=server.cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert planned.returncode == 3
    commands = [shlex.split(each["command"]) for each in json.loads(planned.stdout)["alternatives"]]
    assert ["laya", "plan", "pair-q4_1"] in commands
