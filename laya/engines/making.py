"""Owns: which engine is made of these settings: a child of ours, one on a node of a cluster, or another server."""

from __future__ import annotations

from laya.engines.ceiling import Ceilings
from laya.engines.cluster import Cluster
from laya.engines.hooks import Engine
from laya.engines.launcher import StartSettings
from laya.engines.log import EngineLog
from laya.engines.placed import PlacedEngine, PlacedSettings
from laya.engines.process import EngineProcess
from laya.engines.remote import RemoteEngine
from laya.engines.settings import RemoteSettings


def make_engine(
    settings: StartSettings, log: EngineLog, *, ceilings: Ceilings | None = None, cluster: Cluster | None = None
) -> Engine:
    """ceilings: where the memory of children is limited; None: nowhere."""
    if isinstance(settings, PlacedSettings):
        assert cluster is not None, "what is placed is placed on a cluster"
        return PlacedEngine(settings, log, cluster)
    if isinstance(settings, RemoteSettings):
        return RemoteEngine(settings, log)
    return EngineProcess(settings, log, ceilings=ceilings)
