"""Owns: the command line of a plan as a value: written again with changes, and planned as it would be when pasted."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from laya.cli.plan_model import Asking, Subject
from laya.config import parse_budget, parse_bytes, parse_engine_flags
from laya.config.units import parse_limit
from laya.errors import ConfigError
from laya.memory import Budget, Machine, size_text
from laya.memory.machine import GATEWAY_BYTES, MAX_SHARE, budget_within
from laya.memory.rates import MachineRates
from laya.memory.sizes import flag_text
from laya.types import ALL_LAYERS, Plan

BUDGET_FLAG = "--memory-budget"


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A command that plans something that fits."""

    command: str
    total_bytes: int
    note: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The words of `laya plan` beside the model's name."""

    asking: Asking
    budget: str | None = None
    config: str | None = None
    gpu_memory: str | None = None
    memory: str | None = None

    def command(self, word: str) -> str:
        """`laya plan WORD` with all of this line."""
        pairs = (
            (BUDGET_FLAG, self.budget),
            ("--memory", self.memory),
            ("--config", self.config),
            ("--gpu-memory", self.gpu_memory),
        )
        parts = ["laya plan", word, *flags_of(self.asking.settings)]
        return " ".join([*parts, *(f"{flag} {shlex.quote(value)}" for flag, value in pairs if value is not None)])

    def changed(self, flags: str) -> Line:
        """The line with these flags over it."""
        words, line = shlex.split(flags), self
        if BUDGET_FLAG in words:
            at = words.index(BUDGET_FLAG)
            line = msgspec.structs.replace(line, budget=words[at + 1])
            del words[at : at + 2]
        return line.set(self.asking.settings | parse_engine_flags(words))

    def set(self, settings: dict[str, Any]) -> Line:
        """The line with these settings and no others."""
        return msgspec.structs.replace(self, asking=msgspec.structs.replace(self.asking, settings=settings))

    def budget_now(self) -> Budget:
        """What may be planned with. Raises ConfigError."""
        asked = self.budget if self.budget is not None else self.asking.config.memory.budget
        return budget_of(self.memory, asked)

    def tried(self, subject: Subject, note: str, rates: MachineRates | None) -> Alternative | None:
        """This line for the model, where it fits. Raises ConfigError for settings that no memory could give."""
        made = self.plan(subject, rates, suggests=False)
        command = self.command(word_of(subject))
        return Alternative(command=command, total_bytes=made.need_bytes, note=note) if made.fits else None

    def plan(
        self, subject: Subject, rates: MachineRates | None, *, all_on_cards: bool = False, suggests: bool = True
    ) -> Plan:
        """The model's plan as this line asks for it. all_on_cards: nothing but the embedding may stay in RAM."""
        name = subject.word if subject.word in self.asking.config.models else subject.model.id
        asked, settings = self.asking.of(name, subject.asked.task)
        if all_on_cards:
            asked = msgspec.structs.replace(asked, gpu_layers=ALL_LAYERS, experts_on_cpu=0)
        gpu_bytes, why_no_gpu = self.asking.gpus_for(settings.engine_path)
        model = msgspec.structs.replace(subject.model, gpu_free_bytes=gpu_bytes, why_no_gpu=why_no_gpu)
        there = msgspec.structs.replace(subject, model=model, asked=asked)
        return there.plan(self.budget_now(), rates, suggests=suggests)


def word_of(subject: Subject) -> str:
    """The model as the command line names it."""
    return subject.word if subject.word.startswith("--params ") else shlex.quote(subject.word)


def budget_of(memory: str | None, asked: str | int | None) -> Budget:
    """The budget of this machine, or of one where programs can have `memory`. Raises ConfigError."""
    if memory is None:
        return Machine().budget(asked)
    try:
        n_bytes = parse_limit(memory)
    except ConfigError as error:
        raise ConfigError(f"--memory {error.message}", param="memory") from None
    usable = max(0, n_bytes - GATEWAY_BYTES)
    return budget_within(usable, f"a machine with {size_text(n_bytes)} free", n_bytes, asked)


def clamped_notes(asked: str | int | None, budget: Budget) -> tuple[str, ...]:
    """What is to be said where more was asked than this machine has."""
    wanted = parse_budget(asked)
    if wanted <= (budget.ceiling_bytes if isinstance(wanted, int) else MAX_SHARE):
        return ()
    return (
        f"memory.budget {asked} is more than can be had here: {size_text(budget.bytes)}, 95 % of what is free "
        f"({budget.limit}), is planned with",
    )


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Settings as Laya's own flags."""
    flags = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            flags.append(f"--no-{name.replace('_', '-')}")
        elif value is True:
            flags.append(flag)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            text = flag_text(parse_bytes(value)) if name == "memory_limit" else text
            flags.append(f"{flag} {shlex.quote(text)}")
    return flags
