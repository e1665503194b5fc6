"""The handle of an engine on a node: how a start ends that fails, or is not wanted any more. Its cluster is played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from laya.engines.cluster import Cluster
from laya.engines.cluster_words import Node
from laya.engines.log import EngineLog
from laya.engines.placed import PlacedEngine, PlacedSettings
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed
from laya.types import PlannedSettings
from tests.engines.conftest import SMALL


class PlayedCluster:
    """Places one engine, with the number 7, and does something just before it is told."""

    def __init__(self, answer: dict[str, Any], just_before: Callable[[], None] = lambda: None) -> None:
        self.ended: list[int] = []
        self.just_before = just_before
        self._answer = answer

    async def start(self, *_: Any, **__: Any) -> tuple[int, dict[str, Any]]:
        await asyncio.sleep(0)
        self.just_before()
        return 7, self._answer

    def end(self, number: int) -> None:
        self.ended.append(number)

    def forget(self, number: int) -> None:
        """Nothing is told of it later."""


def engine_on(cluster: PlayedCluster, log: EngineLog) -> PlacedEngine:
    settings = EngineSettings(
        model_id="m",
        path=Path("m.gguf"),
        planned=PlannedSettings(**SMALL),
        ceiling_bytes=1,  # type: ignore[arg-type]
    )
    node = Node(id="0", name="n1", address="10.0.0.1", memory_bytes=1, others_bytes=0)
    return PlacedEngine(PlacedSettings(node=node, engine=settings), log, cast(Cluster, cluster))


@pytest.mark.anyio
async def test_one_that_is_ready_when_it_is_not_wanted_any_more_is_ended() -> None:
    cluster = PlayedCluster({"address": {"host": "10.0.0.1", "port": 1}})
    loading = asyncio.ensure_future(engine_on(cluster, EngineLog()).start())
    cluster.just_before = loading.cancel  # type: ignore[assignment]
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert cluster.ended == [7]


@pytest.mark.anyio
async def test_last_words_of_one_that_did_not_start_are_in_its_log() -> None:
    cluster, log = PlayedCluster({"error": "it would not", "limit_hit": None, "log": ["why", "why not"]}), EngineLog()
    with pytest.raises(EngineFailed, match=r"it would not \(on node n1\)"):
        await engine_on(cluster, log).start()
    assert log.tail(2) == ["why", "why not"]
