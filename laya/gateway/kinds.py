"""Owns: the kinds of engines that a model's settings may name, and what the gateway asks of each.

The meeting place of config, memory and engines rooms for one model: how it is planned, started and learned from. A new
kind is one module with a `Kind`, and one line in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from laya.config import ResolvedModel
from laya.engines.launcher import StartSettings
from laya.gateway.corrections import Corrections
from laya.gateway.kind_command import CommandKind
from laya.gateway.kind_llamacpp import LlamaCppKind
from laya.gateway.kind_remote import RemoteKind
from laya.gateway.kind_vllm import VllmKind
from laya.memory import Budget
from laya.types import AskedSettings, ModelFile, Plan


class Kind(Protocol):
    """One kind of engine. Every call may read the disk."""

    def find(self, settings: ResolvedModel, *, models_dir: Path, home: Path) -> ModelFile:
        """What serves the model. Raises ModelNotFound, ConfigError and what else is wrong with it."""

    def check(self, settings: ResolvedModel, file: ModelFile) -> None:
        """Raise what would make every start of it fail."""

    def plan(
        self, settings: ResolvedModel, file: ModelFile, asked: AskedSettings, budget: Budget, learned: Corrections
    ) -> Plan:
        """What it would be started with inside this budget."""

    def start(
        self, settings: ResolvedModel, file: ModelFile, plan: Plan, threads_file: str | None, *, name: str = ""
    ) -> StartSettings:
        """What one engine is started with. name: of the engine, where its model has several."""

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
        """An engine of this plan has ended, and held so much at most."""


KINDS: Mapping[str, Kind] = {
    "llamacpp": LlamaCppKind(),
    "vllm": VllmKind(),
    "command": CommandKind(),
    "remote": RemoteKind(),
}


def kind_of(settings: ResolvedModel) -> Kind:
    return KINDS[settings.engine]
