"""Owns: what to do about a plan that does not fit, as command lines that work when pasted.

Settings come from the memory room; here they become whole commands, and a smaller model of the catalogue and the card
that would do are added, planned the same way.
"""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from laya.cli.plan_model import Asking, Subject, subject_named, usable_of
from laya.config import parse_engine_flags
from laya.errors import LayaError
from laya.memory import Budget
from laya.memory.advice import CARD_GIB
from laya.memory.fit import fit
from laya.memory.planner import Model
from laya.models import entries
from laya.types import GIB, MIB, Plan, Suggestion

BUDGET_FLAG = "--memory-budget"
MODEL_SETTINGS = ("max_seq_len", "max_num_seqs", "kv_cache_dtype", "task")  # what is asked of another model too


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A command that plans something that fits."""

    command: str
    total_bytes: int
    note: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of a plan, to be written again with changes."""

    asking: Asking
    budget: str | None = None
    config: str | None = None
    gpu_memory: str | None = None

    def command(self, word: str, flags: str = "", gpu_memory: str | None = None, *, is_same_model: bool = True) -> str:
        """`laya plan WORD` with the settings of this line and `flags` over them."""
        words, budget = shlex.split(flags), self.budget
        if BUDGET_FLAG in words:
            at = words.index(BUDGET_FLAG)
            budget = words[at + 1]
            del words[at : at + 2]
        settings = self.asking.settings | parse_engine_flags(words)
        if not is_same_model:
            settings = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
        parts = ["laya plan", word, *flags_of(settings)]
        pairs = ((BUDGET_FLAG, budget), ("--config", self.config), ("--gpu-memory", gpu_memory or self.gpu_memory))
        return " ".join([*parts, *(f"{flag} {shlex.quote(value)}" for flag, value in pairs if value is not None)])


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Settings as Laya's own flags."""
    flags = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            flags.append(f"--no-{name.replace('_', '-')}")
        else:
            flags.append(flag if value is True else f"{flag} {shlex.quote(str(value))}")
    return flags


def alternatives(subject: Subject, plan: Plan, line: Line, budget: Budget) -> list[Alternative]:
    """Everything that fits instead: changed settings, a smaller model of the catalogue, a card."""
    word = subject.word if subject.word.startswith("--params ") else shlex.quote(subject.word)
    found = [_changed(line, word, suggestion) for suggestion in plan.suggestions]
    others = (_smaller_model(subject, plan, line, budget), _card(subject, plan, line, word, budget))
    return [*found, *(other for other in others if other is not None)]


def _changed(line: Line, word: str, suggestion: Suggestion) -> Alternative:
    return Alternative(
        command=line.command(word, suggestion.flags), total_bytes=suggestion.total_bytes, note=suggestion.note
    )


def _smaller_model(subject: Subject, plan: Plan, line: Line, budget: Budget) -> Alternative | None:
    """The largest model of the catalogue below this one that fits with what was asked, else with its own settings."""
    settings = {name: value for name, value in line.asking.settings.items() if name in MODEL_SETTINGS}
    smaller = [
        entry
        for entry in entries()
        if entry.file_bytes < subject.model.facts.weights_bytes and entry.task == subject.asked.task
    ]
    for wanted in (settings, {}):
        asking = msgspec.structs.replace(line.asking, settings=wanted)
        for entry in sorted(smaller, key=lambda entry: -entry.parameters):
            try:
                other = subject_named(entry.id, asking).plan(budget)
            except LayaError:  # a shorter training, or a file that is broken: not this one
                continue
            if other.fits:
                bare = msgspec.structs.replace(line, asking=asking)
                command = bare.command(entry.id, is_same_model=False)
                return Alternative(command=command, total_bytes=other.need_bytes, note=f"smaller: {entry.what_for}")
    return None


def _card(subject: Subject, plan: Plan, line: Line, word: str, budget: Budget) -> Alternative | None:
    """The smallest card on which all of it fits as asked, the rest of it in this machine's memory."""
    for size in CARD_GIB:
        model = with_cards(subject.model, (size * GIB,))
        other = fit(model, subject.asked, budget)
        wanted = other.settings.gpu_layers > model.shape.n_layer
        if other.fits and wanted and _as_wanted(other, plan):
            gpu = next(device.total_bytes for device in other.devices if device.device == "gpu0")
            note = f"a {size} GB card, all layers on it: {gpu / MIB:.0f} MiB there"
            command = line.command(word, gpu_memory=f"{size}GiB")
            return Alternative(command=command, total_bytes=other.need_bytes, note=note)
    return None


def _as_wanted(other: Plan, plan: Plan) -> bool:
    """Whether nothing is smaller than in the plan that does not fit."""
    names = ("max_seq_len", "max_num_seqs")
    return all(getattr(other.settings, name) >= getattr(plan.settings, name) for name in names)


def with_cards(model: Model, card_bytes: tuple[int, ...]) -> Model:
    """The same model beside these cards."""
    return msgspec.structs.replace(model, gpu_free_bytes=usable_of(card_bytes))
