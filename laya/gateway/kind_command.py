"""Owns: models that a program of the user's own serves: found as a program, planned by what is declared or learned."""

from __future__ import annotations

from pathlib import Path

from laya.config import Program, ResolvedModel
from laya.engines.settings import CommandSettings
from laya.gateway.corrections import Corrections
from laya.memory import Budget, Machine, ProgramBytes, after_run, ceiling_bytes, plan_program
from laya.types import AskedSettings, ModelFile, Plan


class CommandKind:
    """See kinds.Kind."""

    def find(self, settings: ResolvedModel, *, models_dir: Path, home: Path) -> ModelFile:
        program = _program(settings)
        return ModelFile(id=settings.id, path=program.path(), format="program", file_bytes=0, origin="config")

    def check(self, settings: ResolvedModel, file: ModelFile) -> None:
        _program(settings).path()

    def plan(
        self, settings: ResolvedModel, file: ModelFile, asked: AskedSettings, budget: Budget, learned: Corrections
    ) -> Plan:
        program = _program(settings)
        seen_bytes = learned.of_program(settings.id, program) if program.memory_bytes is None else None
        known = ProgramBytes(declared=program.memory_bytes, learned=seen_bytes)
        return plan_program(settings.id, known, asked, budget, n_cores=Machine().cores())

    def start(
        self, settings: ResolvedModel, file: ModelFile, plan: Plan, threads_file: str | None, *, name: str = ""
    ) -> CommandSettings:
        program = _program(settings)
        return CommandSettings(
            model_id=settings.id,
            name=name,
            program=file.path,
            words=program.words,
            folder=program.cwd,
            planned=plan.settings,
            health=program.health,
            env=program.env,
            served_model_name=program.served_model_name,
            cancels_whole=program.cancels_whole,
            keeps_streams=program.keeps_streams,
            ceiling_bytes=ceiling_bytes(plan, plan.need_bytes),
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
        program = _program(settings)
        if program.memory_bytes is None and peak_bytes:
            known_bytes = learned.of_program(settings.id, program)
            learned.keep_program(settings.id, program, after_run(known_bytes, peak_bytes, was_killed=was_killed))


def _program(settings: ResolvedModel) -> Program:
    assert settings.program is not None, "an entry with engine: command has a cmd"
    return settings.program
