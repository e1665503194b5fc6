"""A Ray cluster of three nodes with little memory on this machine, and a gateway that places its engines there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from laya.types import MIB

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


class Nodes:
    """The cluster's nodes by name."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        own = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False, "include_log_monitor": False}
        head = {"num_cpus": 0, "memory": 0, "node_name": "head", "no_monitor": True}  # the gateway's own
        self._cluster = Cluster(initialize_head=True, head_node_args=own | head)
        self._nodes = {
            name: self._cluster.add_node(num_cpus=1, memory=n_mib * MIB, node_name=name, **own)
            for name, n_mib in NODES_MIB.items()
        }

    @property
    def address(self) -> str:
        return str(self._cluster.address)

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
    nodes = Nodes()
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def placed(nodes: Nodes, start_server: Callable[..., Any]) -> Iterator[Any]:
    """A gateway of that cluster, with nothing loaded."""
    server = start_server("--ray", nodes.address, config=CONFIG)
    yield server
    assert server.stop() == 0
