"""What is said of a cluster that cannot be joined, and of files that a node lacks. Ray is not loaded unasked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laya.config import load_config
from laya.config.ray import address_fault
from laya.engines.cluster import Cluster
from laya.errors import ConfigError, EngineFailed, LayaError
from laya.gateway.node_accounts import cores_account, free_cores, gpus_for_one
from laya.memory import Ledger
from laya.memory.gpu import GpuMemory
from laya.types import PlannedSettings
from tests.engines.conftest import SMALL


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://10.0.0.1:10001", "start Ray here"),
        ("10.0.0.1", "such as 10.0.0.1:6379, or auto, got '10.0.0.1'"),
        ("10.0.0.1:6379:1", "expected HOST:PORT"),
        ("10.0.0.1:65536", "expected HOST:PORT"),
        ("10.0.0.1:0", "expected HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused(address: str, words: str, tmp_path: Path) -> None:
    assert words in (address_fault(address) or "")
    (tmp_path / "config.yaml").write_text(f"version: 1\nray: {{address: '{address}'}}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:2: ray\.address: "):
        load_config(tmp_path / "config.yaml", {})


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head.lan:6379", "[fd00::1]:6379"])
def test_addresses(address: str) -> None:
    assert address_fault(address) is None


def test_nothing_listens_there() -> None:
    with pytest.raises(EngineFailed, match="cannot be joined: "):
        asyncio.run(Cluster("127.0.0.1:1").connect())


def test_ray_is_not_loaded_unasked() -> None:
    code = "import sys, laya.cli.main, laya.gateway.server; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_file_of_a_model_is_found_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from laya.gateway.ray_actor import find

    monkeypatch.setenv("LAYA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    here, there = tmp_path / "here" / "m.gguf", tmp_path / "models" / "m.gguf"
    there.parent.mkdir()
    there.write_bytes(b"GGUF")
    assert find(here, 4, "m").samefile(there)  # by its name, in the node's own models
    with pytest.raises(LayaError, match=r"m.gguf has 4 bytes there and 5 here"):
        find(here, 5, "m")
    with pytest.raises(LayaError, match="is not there"):
        find(here, 4, None)
    with pytest.raises(LayaError):
        find(here, 4, "another")


def test_layers_go_to_the_gpus_that_ray_gave(make_planned: Callable[..., PlannedSettings]) -> None:
    from laya.gateway.ray_actor import on_these

    planned = make_planned(gpu_layers=31, tensor_split=(20, 11))
    assert on_these(planned, [2, 5]).tensor_split == (0, 0, 20, 0, 0, 11)
    assert on_these(planned, [2, 5]).gpus == (2, 5)
    assert on_these(make_planned(), []) == make_planned()


def test_gpus_are_found_by_the_names_that_ray_has_for_them() -> None:
    from laya.gateway.ray_actor import numbers_of

    cards = [
        GpuMemory(index=n, name="A card", uuid=f"GPU-{n}a", total_bytes=1, free_bytes=1, own_bytes=0, process_bytes={})
        for n in range(3)
    ]
    assert numbers_of([2, "0"], cards) == [0, 2]
    assert numbers_of(["GPU-2a", "GPU-1a"], cards) == [1, 2]
    with pytest.raises(EngineFailed, match="Ray gave the GPU 'MIG-7'"):
        numbers_of(["MIG-7"], cards)


def test_an_engine_counts_on_whole_gpus_that_are_free() -> None:
    assert gpus_for_one([500, 23000, 22000], 2) == (22000, 22000)
    assert gpus_for_one([23000], 0) == gpus_for_one([], 2) == ()


def test_engines_of_a_node_share_its_cores() -> None:
    ledger = Ledger()
    given = []
    for name in ("a", "b", "c"):
        given.append(free_cores(ledger, name, "n1", 4))
        assert free_cores(ledger, name, "n1", 4) == given[-1]  # asked again, as each plan of it does
        ledger.reserve(name, cores_account("n1"), min(3, given[-1]), overdraw=True)
    assert given == [4, 1, 1]
    assert free_cores(ledger, "d", "n2", 8) == 8
    ledger.release("a")
    ledger.release("b")
    assert free_cores(ledger, "d", "n1", 4) == 3


@pytest.fixture
def make_planned() -> Callable[..., PlannedSettings]:
    return lambda **fields: PlannedSettings(**SMALL | fields)
