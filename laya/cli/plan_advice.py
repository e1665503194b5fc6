"""Owns: what to do about a plan that does not fit, as command lines that work when pasted.

Settings come from the memory room; here they become whole commands, and other models of the catalogue, cards and
memory that would do are added. Each is planned as it would be when pasted, and none is named that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from laya.cli.plan_line import Alternative, Line
from laya.cli.plan_model import Subject, subject_named
from laya.config import parse_budget
from laya.config.quantization import split_kind
from laya.errors import LayaError
from laya.memory import size_text
from laya.memory.advice import CARD_GIB, SOLD_GIB
from laya.memory.fit import choices
from laya.memory.placement import CPU
from laya.memory.rates import MachineRates
from laya.memory.sizes import flag_text
from laya.models import available, entries
from laya.models.catalogue import suggested
from laya.types import GIB, MIB, Plan

ENOUGH = 3
OTHER_MODELS = 3
SIDE_BY_SIDE = (2, 4, 8)  # cards, where none that is sold is large enough
MODEST_TOKENS, LEAST_TOKENS = 4096, 512
SHARE = 0.8  # of memory that is to be bought, for engines
MEMORY_MIB = (*range(128, 1024, 64), 1024, 2048, *(size * GIB // MIB for size in SOLD_GIB))
MODEL_SETTINGS = ("max_seq_len", "max_num_seqs", "kv_cache_dtype", "task")  # what is asked of another model too
LIMITS = ("memory_limit",)  # what bounds any model


def alternatives(subject: Subject, plan: Plan, line: Line, rates: MachineRates | None = None) -> list[Alternative]:
    """Everything that fits instead: changed settings, the same model in fewer bits, smaller ones, a card.

    Where this leaves fewer than ENOUGH: the same with settings of their own, several cards, and memory to be had.
    """
    found: list[Alternative | None] = [
        _tried(line.changed(each.flags), subject, each.note, rates) for each in plan.suggestions
    ]
    others = _other_models(subject, line, MODEL_SETTINGS, rates)
    found += others or _other_models(subject, line, (), rates)
    cards = _cards(subject, line, (1,), rates)
    found += cards
    chosen = _distinct(found)
    if not others and not plan.suggestions:
        chosen = _distinct([*chosen, *_least(subject, line, rates)])
    if len(chosen) < ENOUGH or not cards:
        chosen = _distinct([*chosen, *_cards(subject, line, SIDE_BY_SIDE, rates)])
    more = _more(subject, line, rates)
    while len(chosen) < ENOUGH:
        each = next(more, None)
        if each is None:
            break
        chosen = _distinct([*chosen, each])
    return chosen


def _distinct(found: Sequence[Alternative | None]) -> list[Alternative]:
    return list({each.command: each for each in found if each is not None}.values())


def _tried(line: Line, subject: Subject, note: str, rates: MachineRates | None) -> Alternative | None:
    try:
        return line.tried(subject, note, rates)
    except LayaError:  # trained for less than was asked
        return None


def _kept(line: Line, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in line.asking.settings.items() if name in names}


def _other_models(
    subject: Subject, line: Line, names: tuple[str, ...], rates: MachineRates | None
) -> list[Alternative]:
    """The same model in fewer bits, if one is known, and the largest smaller models of the catalogue."""
    bare = _bare(line, (*names, *LIMITS))
    fewer = (_named(name, bare, "the same model in fewer bits", rates) for name in _variants(subject, line))
    found = [each for each in fewer if each is not None][:1]
    weights, base = subject.model.facts.weights_bytes, split_kind(subject.model.id)[0]
    known = [entry for entry in suggested(subject.asked.task) if entry.file_bytes < weights]
    for entry in sorted(known, key=lambda entry: -entry.file_bytes):
        other = _named(entry.id, bare, f"smaller: {entry.what_for}", rates) if split_kind(entry.id)[0] != base else None
        if other is not None and len(found) < OTHER_MODELS:
            found.append(other)
    return found


def _bare(line: Line, names: tuple[str, ...]) -> Line:
    """The line with these settings alone, on the CPU."""
    asking = msgspec.structs.replace(line.asking, settings=_kept(line, names), card_bytes=())
    return msgspec.structs.replace(line, asking=asking, gpu_memory=None)


def _named(name: str, line: Line, note: str, rates: MachineRates | None) -> Alternative | None:
    try:
        return line.tried(subject_named(name, line.asking), note, rates)
    except LayaError:  # trained for less than was asked, or a file that is broken: not this one
        return None


def _variants(subject: Subject, line: Line) -> list[str]:
    """Other quantizations of this model, on this disk and in the catalogue, the largest first."""
    base, config = split_kind(subject.model.id)[0], line.asking.config
    here = available(models_dir=Path(config.models_dir))
    sizes = {entry.id: entry.file_bytes for entry in entries()} | {file.id: file.file_bytes for file in here}
    smaller = [name for name, n_bytes in sizes.items() if n_bytes < subject.model.facts.weights_bytes]
    return sorted((name for name in smaller if split_kind(name)[0] == base), key=lambda name: -sizes[name])


def _cards(subject: Subject, line: Line, counts: tuple[int, ...], rates: MachineRates | None) -> list[Alternative]:
    """The fewest, then smallest cards on which all layers fit, with these settings or modest ones."""
    modest = {"max_num_seqs": 1, "max_seq_len": _tokens(subject, MODEST_TOKENS)}
    settings = line.asking.settings
    for tried in (settings, settings | modest):
        for count in counts:
            found = _smallest_cards(subject, line.set(tried), count, rates)
            if found is not None:
                return [found]
    return []


def _smallest_cards(subject: Subject, line: Line, count: int, rates: MachineRates | None) -> Alternative | None:
    for size in CARD_GIB:
        asking = msgspec.structs.replace(line.asking, card_bytes=(size * GIB,) * count)
        on_cards = msgspec.structs.replace(line, asking=asking, gpu_memory=",".join([f"{size}GiB"] * count))
        made = on_cards.plan(subject, rates, all_on_cards=True, suggests=False)
        if made.fits:
            there = sum(device.total_bytes for device in made.devices if device.device != CPU)
            which = f"a {size} GB card" if count == 1 else f"{count} cards of {size} GB (one is not enough)"
            return on_cards.tried(subject, f"on {which}, all layers there: {size_text(there)}", rates)
        if any(device.total_bytes > device.budget_bytes for device in made.devices if device.device == CPU):
            return None  # what stays in RAM is too much: no card changes that
    return None


def _least(subject: Subject, line: Line, rates: MachineRates | None) -> Iterator[Alternative]:
    """Where no model fits: the least that the smallest one of the catalogue does with."""
    smallest = min(suggested(subject.asked.task), key=lambda entry: entry.file_bytes)
    bare = _bare(line, LIMITS)
    other = subject_named(smallest.id, bare.asking)
    for each in bare.plan(other, rates).suggestions[-1:]:
        raised = _tried(bare.changed(each.flags), other, f"the least of all: {each.note}", rates)
        if raised is not None:
            yield raised
            return
    least = bare.changed(f"--max-num-seqs 1 --max-seq-len {LEAST_TOKENS}")
    found = _in_memory(other, least, "the least of all", rates)
    if found is not None:
        yield found


def _more(subject: Subject, line: Line, rates: MachineRates | None) -> Iterator[Alternative]:
    """The memory that would do, for what was asked, for all of it, and for less."""
    most = next(choices(subject.model, subject.asked))
    shapes = [(most.max_num_seqs, most.max_seq_len)]
    shapes += [(1, _tokens(subject, n_tokens)) for n_tokens in (MODEST_TOKENS, LEAST_TOKENS)]
    wanted = [("", "what was asked")]
    wanted += [(f"--max-num-seqs {n} --max-seq-len {tokens}", f"{n} x {tokens} tokens") for n, tokens in shapes]
    seen = set()
    for flags, what in wanted:
        found = _in_memory(subject, line.changed(flags), what, rates)
        if found is not None and found.total_bytes not in seen:
            seen.add(found.total_bytes)
            yield found


def _in_memory(subject: Subject, line: Line, what: str, rates: MachineRates | None) -> Alternative | None:
    """The least memory of a machine, or of its container, in which this line fits; own limits grow with it."""
    config = line.asking.config.memory.budget
    is_amount = line.budget is not None or isinstance(parse_budget(config), int)
    for size in MEMORY_MIB:
        note = f"{what}, in a machine or container with {size_text(size * MIB)} free"
        larger = msgspec.structs.replace(line, memory=f"{size}MiB" if size < 1024 else f"{size // 1024}GiB")
        larger = msgspec.structs.replace(larger, budget=f"{SHARE:.0%}" if is_amount else None)
        if "memory_limit" in line.asking.settings:
            larger = larger.changed(f"--memory-limit {flag_text(int(SHARE * size) * MIB)}")
        found = _tried(larger, subject, note, rates)
        if found is not None:
            return found
    return None


def _tokens(subject: Subject, most: int) -> int:
    return min(most, subject.model.shape.n_ctx_train, subject.asked.max_seq_len or most)
