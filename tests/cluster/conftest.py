"""A Ray cluster of three nodes with little memory on this machine, and a gateway that places its engines there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from laya.engines.builds import RECORD, Build, builds_folder, bundled, use
from laya.types import MIB
from tests.conftest import ROOT, PlayedNvml

OBJECT_STORE_BYTES = 80 * MIB  # the least that Ray takes
# The ceiling of `wide` and of `broad` is 449 MiB, that of `short` 273: n0 has no place for a wide one, and the others
# none for two.
NODES_MIB = {"n0": 340, "n1": 820, "n2": 860}
CONFIG = """
version: 1
n_threads: 1
kv_cache_dtype: f16
server: {waiting_note_s: 0}
models:
  wide: {source: smollm2, max_num_seqs: 2, max_seq_len: 4096}
  short: {source: smollm2, max_num_seqs: 2, max_seq_len: 512}
  broad: {source: smollm2, max_num_seqs: 2, max_seq_len: 4096}
  vast: {source: smollm2, max_num_seqs: 8, max_seq_len: 8192}
"""
# A ceiling of some 95 MiB each: one of them on either.
FEW_NODES_MIB = {"n1": 170, "n2": 180}
FEW_CONFIG = """
version: 1
n_threads: 1
kv_cache_dtype: f16
max_num_seqs: 2
max_seq_len: 1024
server: {waiting_note_s: 0}
models:
  one: {source: laya-nano}
  two: {source: laya-nano}
  three: {source: laya-nano}
  on-a-card: {source: laya-nano, gpu_layers: all}
  on-another: {source: laya-nano, gpu_layers: all}
"""
# An engine package that is the real one and names two cards that it has not.
NAMES_CARDS = """
import sys
from importlib import import_module
here = __file__.rpartition("/xllamacpp/")[0]
sys.path = [each for each in sys.path if each != here]
del sys.modules["xllamacpp"]
real = import_module("xllamacpp")
class Kind:
    name = "GGML_BACKEND_DEVICE_TYPE_GPU"
real.get_device_info = lambda: [{"name": f"CUDA{n}", "description": "a card", "type": Kind} for n in range(2)]
"""


class Nodes:
    """The cluster's nodes by name."""

    def __init__(self, nodes_mib: dict[str, int]) -> None:
        from ray.cluster_utils import Cluster

        own = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False, "include_log_monitor": False}
        head = {"num_cpus": 0, "memory": 0, "node_name": "head", "no_monitor": True}  # the gateway's own
        self._cluster = Cluster(initialize_head=True, head_node_args=own | head)
        self._own, self._nodes = own, dict[str, Any]()
        for name, n_mib in nodes_mib.items():
            self.add(name, n_mib)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, n_mib: int, *, n_gpus: int = 0, environment: dict[str, str] | None = None) -> None:
        """environment: of what runs there, beside this one."""
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in (environment or {}).items():
                patch.setenv(variable, value)
            self._nodes[name] = self._cluster.add_node(
                num_cpus=1, num_gpus=n_gpus, memory=n_mib * MIB, node_name=name, **self._own
            )

    def kill(self, name: str) -> None:
        """As when its power goes: nothing is told to anybody."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def shutdown(self) -> None:
        folder = self._cluster.head_node.get_session_dir_path()
        self._cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)  # what ends late may still write its last lines


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Nodes(NODES_MIB)
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def few_nodes() -> Iterator[Nodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Nodes(FEW_NODES_MIB)
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def few(few_nodes: Nodes, start_server: Callable[..., Any]) -> Any:
    """A gateway of those, with small models; killed by its last test."""
    return start_server("--ray", few_nodes.address, config=FEW_CONFIG)


@pytest.fixture(scope="module")
def with_cards(few_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> PlayedNvml:
    """A node more, whose build of llama.cpp names two cards, and whose NVML does too."""
    folder = tmp_path_factory.mktemp("cards")
    nvml = PlayedNvml(folder / "nvml.json")
    nvml.play(*({"name": "A card", "total": 8192 * MIB, "free": 8000 * MIB} for _ in range(2)))
    package = builds_folder(folder) / "cards" / "xllamacpp" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(NAMES_CARDS)
    build = Build(name="cards", kind="cuda", version=bundled().version)
    (package.parents[1] / RECORD).write_bytes(msgspec.json.encode(build))
    use(folder, build)
    path = os.pathsep.join([str(nvml.folder), str(ROOT)])
    variables = {"LAYA_HOME": str(folder), "PYTHONPATH": path, "PLAYED_NVML": str(nvml.script)}
    few_nodes.add("cards", 2000, n_gpus=2, environment=variables)
    return nvml


@pytest.fixture(scope="module")
def placed(nodes: Nodes, start_server: Callable[..., Any]) -> Iterator[Any]:
    """A gateway of that cluster, with nothing loaded."""
    server = start_server("--ray", nodes.address, config=CONFIG)
    yield server
    assert server.stop() == 0
