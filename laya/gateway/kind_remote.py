"""Owns: models of other servers: nothing of them is here, so nothing is found, planned in bytes or learned."""

from __future__ import annotations

from pathlib import Path

from laya.config import Remote, ResolvedModel
from laya.engines.settings import RemoteSettings
from laya.gateway.corrections import Corrections
from laya.memory import Budget, plan_remote
from laya.types import AskedSettings, ModelFile, Plan


class RemoteKind:
    """See kinds.Kind."""

    def find(self, settings: ResolvedModel, *, models_dir: Path, home: Path) -> ModelFile:
        host = _remote(settings).urls[0].host
        return ModelFile(id=settings.id, path=Path(host), format="remote", file_bytes=0, origin="config")

    def check(self, settings: ResolvedModel, file: ModelFile) -> None:
        _remote(settings).key()

    def plan(
        self, settings: ResolvedModel, file: ModelFile, asked: AskedSettings, budget: Budget, learned: Corrections
    ) -> Plan:
        return plan_remote(settings.id, asked)

    def start(
        self, settings: ResolvedModel, file: ModelFile, plan: Plan, threads_file: str | None, *, name: str = ""
    ) -> RemoteSettings:
        remote = _remote(settings)
        number = name.rpartition("#")[2].rstrip("'") if len(remote.urls) > 1 else "1"  # as the shelf names engines
        return RemoteSettings(
            model_id=settings.id,
            name=name,
            url=remote.urls[int(number) - 1],
            remote=remote,
            is_watched=settings.peer is not None,
            planned=plan.settings,
            load_timeout_s=settings.load_timeout_s,
        )

    def learn(
        self,
        settings: ResolvedModel,
        file: ModelFile,
        plan: Plan,
        peak_bytes: int,
        learned: Corrections,
        *,
        was_killed: bool,
    ) -> None:
        """It held nothing here."""


def _remote(settings: ResolvedModel) -> Remote:
    assert settings.remote is not None, "an entry with engine: remote has an address"
    return settings.remote
