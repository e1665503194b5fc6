"""Owns: what to do about a plan that does not fit, as command lines that work when pasted.

Settings come from the memory room; here they become whole commands, and a smaller model of the catalogue and the card
that would do are added, planned the same way.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import msgspec

from laya.cli.plan_model import Asking, Subject, subject_named, usable_of
from laya.config import parse_engine_flags
from laya.errors import LayaError
from laya.memory import Budget, size_text
from laya.memory.advice import CARD_GIB
from laya.memory.fit import fit
from laya.memory.planner import Model
from laya.models import available, entries
from laya.types import GIB, AskedSettings, Plan, Suggestion

BUDGET_FLAG = "--memory-budget"
ENOUGH = 3
MODEST_TOKENS = 4096
_QUANTIZATION = re.compile(r"[-.:_](?:ud-)?(?:i?q\d\w*|[bf]?f(?:16|32)|mxfp4\w*|fp8|awq|gptq)$")
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

    def command(self, word: str, flags: str = "", gpu_memory: str | None = None) -> str:
        """`laya plan WORD` with the settings of this line and `flags` over them."""
        words, budget = shlex.split(flags), self.budget
        if BUDGET_FLAG in words:
            at = words.index(BUDGET_FLAG)
            budget = words[at + 1]
            del words[at : at + 2]
        settings = self.asking.settings | parse_engine_flags(words)
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
    """Everything that fits instead: changed settings, the same model in fewer bits, a smaller one, a card.

    Where this leaves fewer than ENOUGH, a smaller model and a card with settings of their own are added.
    """
    word = subject.word if subject.word.startswith("--params ") else shlex.quote(subject.word)
    found = [_changed(line, word, suggestion) for suggestion in plan.suggestions]
    asked = {name: value for name, value in line.asking.settings.items() if name in MODEL_SETTINGS}
    found += _other_models(subject, line, budget, asked)
    found += _card(subject, line, word, budget, subject.asked)
    if len(found) < ENOUGH:
        found += _other_models(subject, line, budget, {})
    if len(found) < ENOUGH:
        modest = msgspec.structs.replace(subject.asked, max_num_seqs=1, max_seq_len=_modest_tokens(subject))
        found += _card(subject, line, word, budget, modest)
    return list({each.command: each for each in found}.values())


def _changed(line: Line, word: str, suggestion: Suggestion) -> Alternative:
    return Alternative(
        command=line.command(word, suggestion.flags), total_bytes=suggestion.total_bytes, note=suggestion.note
    )


def _other_models(subject: Subject, line: Line, budget: Budget, settings: dict[str, Any]) -> list[Alternative]:
    """The same model in fewer bits, if one is known, and the largest smaller model of the catalogue."""
    known = [entry for entry in entries() if entry.file_bytes < subject.model.facts.weights_bytes]
    known = [entry for entry in known if entry.task == subject.asked.task]
    notes = {entry.id: f"smaller: {entry.what_for}" for entry in sorted(known, key=lambda entry: -entry.file_bytes)}
    found = []
    for names, note in ((_variants(subject, line), "the same model in fewer bits"), (list(notes), None)):
        for name in names:
            other = _fitting(name, line, budget, settings, note or notes[name])
            if other is not None:
                found.append(other)
                break
    return found


def _fitting(name: str, line: Line, budget: Budget, settings: dict[str, Any], note: str) -> Alternative | None:
    asking = msgspec.structs.replace(line.asking, settings=settings, card_bytes=())
    try:
        other = subject_named(name, asking).plan(budget)
    except LayaError:  # trained for less than was asked, or a file that is broken: not this one
        return None
    if not other.fits:
        return None
    bare = msgspec.structs.replace(line, asking=asking, gpu_memory=None)
    return Alternative(command=bare.command(shlex.quote(name)), total_bytes=other.need_bytes, note=note)


def _variants(subject: Subject, line: Line) -> list[str]:
    """Other quantizations of this model, on this disk and in the catalogue, the largest first."""
    base, config = base_name(subject.model.id), line.asking.config
    here = available(models_dir=Path(config.models_dir))
    sizes = {entry.id: entry.file_bytes for entry in entries()} | {file.id: file.file_bytes for file in here}
    smaller = [name for name, n_bytes in sizes.items() if n_bytes < subject.model.facts.weights_bytes]
    return sorted((name for name in smaller if base_name(name) == base), key=lambda name: -sizes[name])


def base_name(model_id: str) -> str:
    """`qwen3-8b:q4_k_m`, `Qwen3-8B-Q4_K_M` -> `qwen3-8b`."""
    return _QUANTIZATION.sub("", model_id.rpartition("/")[2].casefold().removesuffix(".gguf"))


def _card(subject: Subject, line: Line, word: str, budget: Budget, asked: AskedSettings) -> list[Alternative]:
    """The smallest card on which all of it fits with these settings, the rest of it in this machine's memory."""
    flags = "" if asked == subject.asked else f"--max-num-seqs {asked.max_num_seqs} --max-seq-len {asked.max_seq_len}"
    for size in CARD_GIB:
        model = with_cards(subject.model, (size * GIB,))
        other = fit(model, msgspec.structs.replace(asked, gpu_layers=model.shape.n_layer + 1), budget)
        if other.fits:
            gpu = next(device.total_bytes for device in other.devices if device.device == "gpu0")
            note = f"on a {size} GB card, all layers on it: {size_text(gpu)} there"
            command = line.command(word, flags, gpu_memory=f"{size}GiB")
            return [Alternative(command=command, total_bytes=other.need_bytes, note=note)]
    return []


def _modest_tokens(subject: Subject) -> int:
    return min(MODEST_TOKENS, subject.model.shape.n_ctx_train, subject.asked.max_seq_len or MODEST_TOKENS)


def with_cards(model: Model, card_bytes: tuple[int, ...]) -> Model:
    """The same model beside these cards."""
    return msgspec.structs.replace(model, gpu_free_bytes=usable_of(card_bytes))
