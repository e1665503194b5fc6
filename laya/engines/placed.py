"""Owns: an engine on a node of a cluster: its start there, what is known of it here, and its end, also with its node.

The child, its ceiling and its log are made on the node by the same code as here (process.py); this is the handle.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from laya.engines.ceiling import LimitHit
from laya.engines.cluster import Cluster
from laya.engines.cluster_words import EngineNews, Node, encode_settings
from laya.engines.held_memory import MemoryReading
from laya.engines.log import EngineLog
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed, EngineOutOfMemory
from laya.types import EngineAddress, PlannedSettings

CONNECT_TIMEOUT_S = 5.0  # a node without power does not even refuse
GRACE_S = 10.0  # beyond its load's own deadline, which is kept on the node


class PlacedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to start on that node; as many of its bytes as the ceiling are promised by Ray, too."""

    node: Node
    engine: EngineSettings
    n_gpus: int = 0

    @property
    def model_id(self) -> str:
        return self.engine.model_id

    @property
    def engine_name(self) -> str:
        return self.engine.engine_name

    @property
    def planned(self) -> PlannedSettings:
        return self.engine.planned

    @property
    def ceiling_bytes(self) -> int | None:
        return self.engine.ceiling_bytes

    @property
    def load_timeout_s(self) -> float:
        return self.engine.load_timeout_s


class PlacedEngine:
    """See hooks.Engine."""

    pid: int | None = None  # it has none on this machine

    def __init__(self, settings: PlacedSettings, log: EngineLog, cluster: Cluster) -> None:
        self.node: str | None = settings.node.name
        self.limit_hit: LimitHit | None = None
        self.load_percent: int | None = None
        self.cpu_s: float | None = None
        self.is_lost = False  # it ended with its node, through no fault of its own
        self._settings = settings
        self._log = log
        self._cluster = cluster
        self._number: int | None = None
        self._memory: MemoryReading | None = None
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> EngineAddress:
        """Return once it has really answered, on its node. Raises EngineFailed; nothing is left there then."""
        settings, node = self._settings, self._settings.node
        assert settings.ceiling_bytes is not None, "what is placed has a ceiling"
        self._log.begin(f"{settings.engine_name} goes to node {node.name} ({node.address})")
        deadline_s = settings.load_timeout_s + GRACE_S
        placing = asyncio.ensure_future(
            self._cluster.start(
                node,
                encode_settings(settings.engine),
                self._heard,
                n_bytes=settings.ceiling_bytes,
                n_gpus=settings.n_gpus,
            )
        )
        try:
            ends: set[asyncio.Future[Any]] = {placing, self._gone}
            await asyncio.wait(ends, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not placing.done():
                why = self._gone.result() if self._gone.done() else f"not ready after {deadline_s:g} s (load_timeout_s)"
                raise self._failure(why)
            self._number, answer = placing.result()
        finally:
            if not placing.cancel() and self._number is None and not placing.cancelled() and not placing.exception():
                self._cluster.end(placing.result()[0])  # it was ready at the moment when it was not wanted any more
        for line in answer.get("log", ()):
            self._log.feed(line.encode() + b"\n")
        if "lost" in answer:
            self.is_lost = True
            raise self._failure(answer["lost"])
        if "address" not in answer:
            hit = answer["limit_hit"]
            if hit is not None:
                self.limit_hit = msgspec.convert(hit, LimitHit)
                raise EngineOutOfMemory(settings.engine_name, self.limit_hit.limit_bytes, self.limit_hit.peak_bytes)
            raise EngineFailed(f"{answer['error']} (on node {node.name})", param="model", retry_after_s=1.0)
        address = msgspec.convert(answer["address"], EngineAddress)
        return msgspec.structs.replace(address, connect_timeout_s=CONNECT_TIMEOUT_S)

    async def stop(self) -> bool:
        is_gone = True
        if self._number is not None and not self._gone.done():
            is_gone = await self._cluster.stop(self._number)
        self._end("asked to stop")
        return is_gone

    def kill(self) -> None:
        if self._number is not None and not self._gone.done():
            self._cluster.end(self._number)
        self._end("asked to stop")

    def lose(self, why: str) -> None:
        """Take it for lost with its node; what may be left there is ended."""
        self.is_lost = not self._gone.done()
        if self._number is not None:
            self._cluster.end(self._number)
        self._end(f"lost with node {self.node}: {why}")

    async def wait_exit(self) -> str:
        return await asyncio.shield(self._gone)

    def measure(self) -> MemoryReading | None:
        """What it held when its node last said so."""
        return self._memory

    def _heard(self, news: EngineNews | None, lost: str) -> None:
        if news is None:
            self.is_lost = not self._gone.done()
            self._end(f"lost with node {self.node}: {lost}")
            return
        for line in news.log:
            self._log.feed(line.encode() + b"\n")
        self._memory = news.memory or self._memory
        self.load_percent, self.cpu_s, self.limit_hit = news.load_percent, news.cpu_s, news.limit_hit
        if news.exit_reason is not None:
            self._end(news.exit_reason)

    def _end(self, reason: str) -> None:
        if self._number is not None:
            self._cluster.forget(self._number)
        if not self._gone.done():
            self._log.note(f"engine ended: {reason}")
            self._gone.set_result(reason)

    def _failure(self, words: str) -> EngineFailed:
        told = f"The engine for '{self._settings.engine_name}' did not start on node {self.node}: {words}"
        return EngineFailed(told, param="model", retry_after_s=1.0)
