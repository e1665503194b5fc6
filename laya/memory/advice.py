"""Owns: what to do when a plan does not fit: changes that do, planned the same way, and the hardware rule. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from laya.memory.limits import MEMORY_LIMIT, is_within, limits_of, model_budget, totals
from laya.memory.machine import Budget
from laya.memory.placement import CPU
from laya.memory.planner import Choice, Model, decide, kv_types_for, need_bytes, price, uses_gpus
from laya.memory.sizes import flag_text, size_text
from laya.types import GIB, MIB, AskedSettings, Plan, Suggestion

MAX_SUGGESTIONS = 4
SHORTEST_TOKENS = 256
BUDGET_STEP_BYTES = 10 * MIB
RULE_SEQS, RULE_SHARE = 2, 0.8  # at this many sequences the need must stay below this share of the memory
CARD_GIB = (8, 12, 16, 24, 32, 48, 80, 96, 141, 192)
SOLD_GIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


_FREE: dict[str, Any] = {"gpu_layers": None, "experts_on_cpu": None, "gpus": ()}


class _Change(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to try instead of the wanted ones; None = as wanted."""

    note: str
    max_num_seqs: int | None = None
    max_seq_len: int | None = None
    kv_cache_dtype: str | None = None
    kv_pool_tokens: int | None = None
    is_read: bool = False  # weights read into memory instead of mapped
    forgets: bool = False  # no cache of old prompts
    frees: tuple[str, ...] = ()  # of gpu_layers, experts_on_cpu and gpus, those that the plan chooses instead


def suggestions(model: Model, asked: AskedSettings, wanted: Choice, budget: Budget) -> list[Suggestion]:
    """Up to four changes of `wanted` that fit, the least intrusive first; raising the user's own limits comes last."""
    found: dict[str, Suggestion] = {}
    for change in _changes(model, asked, wanted, budget):
        flags, need, fits = _tried(model, asked, wanted, change, budget)
        if flags and fits:
            found.setdefault(flags, Suggestion(flags=flags, total_bytes=need, note=change.note))
    chosen = list(found.values())[:MAX_SUGGESTIONS]
    for suggestion in _larger_limits(model, asked, wanted, budget):
        if len(chosen) < MAX_SUGGESTIONS:
            chosen.append(suggestion)
    return chosen


def _changes(model: Model, asked: AskedSettings, wanted: Choice, budget: Budget) -> Iterator[_Change]:
    yield from _splits(model, asked)
    small_types = [name for name in kv_types_for(model, ("q8_0", "q4_0")) if name != wanted.kv_cache_dtype]
    full = wanted.max_seq_len
    if asked.mmap and any(name in model.engine.repack_types for name in model.facts.matrix_bytes):
        read = _Change(note="weights read, not mapped: no second copy of them", is_read=True)
        yield read
        yield from _read_and_less(model, asked, wanted, budget, read, small_types)
    if asked.prompt_cache_bytes:
        yield _Change(note="a conversation that left its sequence is read again", forgets=True)
    yield _Change(note=f"one sequence of {full} tokens", max_num_seqs=1)
    for name in small_types:
        yield _Change(note=f"the same with a {name} cache", kv_cache_dtype=name)
    yield from _longest(model, asked, wanted, budget, _Change(note="all sequences"))
    if wanted.max_num_seqs > 1:
        yield from _pools(model, asked, wanted, budget)
    yield from _longest(model, asked, wanted, budget, _Change(note="one sequence", max_num_seqs=1))
    for name in small_types:
        yield _Change(note=f"one sequence with a {name} cache", max_num_seqs=1, kv_cache_dtype=name)
        change = _Change(note=f"one sequence with a {name} cache", max_num_seqs=1, kv_cache_dtype=name)
        yield from _longest(model, asked, wanted, budget, change)
    yield from _longest(model, asked, wanted, budget, _Change(note="one sequence", max_num_seqs=1), steps=4)


def _splits(model: Model, asked: AskedSettings) -> Iterator[_Change]:
    """Fewer layers on the GPUs, more experts in RAM or other GPUs, where the user's own choice is what binds."""
    if not any(model.gpu_free_bytes):
        return
    has_layers, has_experts = bool(asked.gpu_layers), asked.experts_on_cpu is not None and model.shape.n_expert > 0
    if asked.gpus and len(asked.gpus) < sum(map(bool, model.gpu_free_bytes)):
        yield _Change(note="on other GPUs too", frees=("gpus",))
    if has_experts:
        yield _Change(note="more experts in RAM", frees=("experts_on_cpu",))
    if has_layers:
        yield _Change(note="the other layers in RAM", frees=("gpu_layers",))
    if has_layers and has_experts:
        yield _Change(note="other layers and experts in RAM", frees=("gpu_layers", "experts_on_cpu"))


def _read_and_less(
    model: Model, asked: AskedSettings, wanted: Choice, budget: Budget, read: _Change, small_types: list[str]
) -> Iterator[_Change]:
    """Where weights that are read do not fit either: smaller wishes that fit with them and not without, one of all
    sequences and one of a single one."""
    if _tried(model, asked, wanted, read, budget)[2]:
        return
    replace = msgspec.structs.replace
    alone = replace(read, max_num_seqs=1)
    of_all = [replace(read, kv_cache_dtype=name, note=f"{read.note}, a {name} cache") for name in small_types]
    of_all += _longest(model, asked, wanted, budget, replace(read, note=f"{read.note}; all sequences"))
    of_one = [replace(alone, note=f"{read.note}, one sequence")]
    of_one += _longest(model, asked, wanted, budget, replace(alone, note=f"{read.note}; one sequence"))
    for changes in (of_all, of_one):
        for change in changes:
            fits, mapped = _tried(model, asked, wanted, change, budget)[2], replace(change, is_read=False)
            if fits and not _tried(model, asked, wanted, mapped, budget)[2]:
                yield change
                break


def _longest(
    model: Model, asked: AskedSettings, wanted: Choice, budget: Budget, change: _Change, steps: int = 1
) -> Iterator[_Change]:
    """The change with the longest contexts that fit, powers of two below the wanted one."""
    tokens = 1 << max(wanted.max_seq_len - 1, 1).bit_length() - 1
    while tokens >= SHORTEST_TOKENS and steps:
        shorter = msgspec.structs.replace(change, max_seq_len=tokens, note=f"{change.note}, {tokens} tokens each")
        if _tried(model, asked, wanted, shorter, budget)[2]:
            yield shorter
            steps -= 1
        tokens //= 2


def _pools(model: Model, asked: AskedSettings, wanted: Choice, budget: Budget) -> Iterator[_Change]:
    """The largest shared pool that fits and still holds one whole sequence."""
    worst_case = wanted.max_seq_len * wanted.max_num_seqs
    pool = min(asked.kv_pool_tokens or worst_case, worst_case)
    while pool >= 2 * wanted.max_seq_len:
        pool //= 2
        change = _Change(note=f"all sequences share {pool} tokens", kv_pool_tokens=pool)
        if _tried(model, asked, wanted, change, budget)[2]:
            yield change
            return


def _tried(
    model: Model, asked: AskedSettings, wanted: Choice, change: _Change, budget: Budget
) -> tuple[str, int, bool]:
    """The change as flags, what it needs, and whether it fits."""
    choice = Choice(
        max_num_seqs=change.max_num_seqs or wanted.max_num_seqs,
        max_seq_len=change.max_seq_len or wanted.max_seq_len,
        kv_cache_dtype=change.kv_cache_dtype or wanted.kv_cache_dtype,
    )
    pool, mmap = change.kv_pool_tokens or asked.kv_pool_tokens, asked.mmap and not change.is_read
    settings = msgspec.structs.replace(asked, kv_pool_tokens=pool, mmap=mmap)
    if change.forgets:
        settings = msgspec.structs.replace(settings, prompt_cache_bytes=0)
    if change.frees:
        settings = msgspec.structs.replace(settings, **{name: _FREE[name] for name in change.frees})
        choice = msgspec.structs.replace(choice, offloads=True)
    flags = _flags(choice, wanted)
    if change.is_read:
        flags.append("--no-mmap")
    if change.forgets:
        flags.append("--prompt-cache 0")
    if change.kv_pool_tokens:
        flags.append(f"--kv-pool-tokens {change.kv_pool_tokens}")
    decided = decide(model, settings, choice)
    for name in change.frees:
        value = getattr(decided, name)
        flags.append(f"--{name.replace('_', '-')} {','.join(map(str, value)) if name == 'gpus' else value}")
    priced = price(model, decided)
    return " ".join(flags), sum(totals(priced).values()), is_within(priced, limits_of(model, settings, budget))


def _flags(choice: Choice, wanted: Choice) -> list[str]:
    """What differs, as typed on the command line."""
    names = (name for name in Choice.__struct_fields__ if name != "offloads")
    changed = [name for name in names if getattr(choice, name) != getattr(wanted, name)]
    return [f"--{name.replace('_', '-')} {getattr(choice, name)}" for name in changed]


def _larger_limits(model: Model, asked: AskedSettings, wanted: Choice, budget: Budget) -> Iterator[Suggestion]:
    """Where the user's own limit binds: the limits that would do, if the machine has them."""
    choices = (
        wanted,
        msgspec.structs.replace(wanted, max_num_seqs=1),
        Choice(max_num_seqs=1, max_seq_len=min(wanted.max_seq_len, 4096), kv_cache_dtype=wanted.kv_cache_dtype),
        Choice(max_num_seqs=1, max_seq_len=min(wanted.max_seq_len, 512), kv_cache_dtype=wanted.kv_cache_dtype),
    )
    limits = limits_of(model, asked, budget)
    for choice in dict.fromkeys(choices):
        used = totals(price(model, decide(model, asked, choice)))
        flags = _raised(asked, budget, used[CPU])
        if not flags or any(used[device] > limits[device] for device in used if device != CPU):
            continue
        note = f"{choice.max_num_seqs} x {choice.max_seq_len} tokens, with more of this machine's memory"
        yield Suggestion(flags=" ".join([*flags, *_flags(choice, wanted)]), total_bytes=sum(used.values()), note=note)


def _raised(asked: AskedSettings, budget: Budget, need: int) -> list[str]:
    """The user's own limits raised for so many bytes of RAM; none where that is not enough."""
    flags = []
    if need > budget.bytes:
        limit = stepped(need + budget.taken_bytes)
        if not budget.is_users or limit > budget.ceiling_bytes:
            return []
        flags.append(f"--memory-budget {flag_text(limit)}")
    if asked.memory_limit_bytes is not None and asked.memory_limit_bytes < need:
        flags.append(f"--memory-limit {flag_text(stepped(need))}")
    return flags


def stepped(n_bytes: int) -> int:
    """So many bytes or a little more: what a person would set as a limit."""
    return -(-n_bytes // BUDGET_STEP_BYTES) * BUDGET_STEP_BYTES


def verdict(model: Model, asked: AskedSettings, chosen: Choice, budget: Budget) -> str:
    """The hardware rule in one line: two sequences at this context must stay below 80 % of the memory."""
    two = msgspec.structs.replace(chosen, max_num_seqs=RULE_SEQS)
    if uses_gpus(model, asked):
        return _card_verdict(model, asked, two)
    need, budget = need_bytes(model, asked, two), model_budget(asked, budget)
    text = f"{RULE_SEQS} sequences of {chosen.max_seq_len} tokens need {size_text(need)}"
    memory = size_text(budget.memory_bytes)
    if need <= RULE_SHARE * budget.memory_bytes:
        return f"{text}, {100 * need / budget.memory_bytes:.0f} % of {memory}: this memory is enough (rule: below 80 %)"
    if budget.is_users:
        own = MEMORY_LIMIT if budget.limit == MEMORY_LIMIT else "memory.budget"
        return f"{text}, more than 80 % of the {memory} they may use ({own})"
    wanted_gib = need / RULE_SHARE / GIB
    sold = next((size for size in SOLD_GIB if size >= wanted_gib), None)
    buy = f"{sold} GiB of memory" if sold else "more memory than one machine has"
    return f"{text}, more than 80 % of {memory}: {buy}, or a smaller model or context"


def _card_verdict(model: Model, asked: AskedSettings, two: Choice) -> str:
    """The same rule for all layers on the cards that are used."""
    whole = msgspec.structs.replace(asked, gpu_layers=None, experts_on_cpu=0)
    settings = decide(model, whole, msgspec.structs.replace(two, offloads=False))
    used = totals(price(model, settings))
    need = sum(n_bytes for device, n_bytes in used.items() if device != CPU)
    cards = sum(model.gpu_free_bytes[number] for number in settings.gpus)
    text = f"{RULE_SEQS} sequences of {two.max_seq_len} tokens need {size_text(need)} of the cards' {size_text(cards)}"
    if need <= RULE_SHARE * cards:
        return f"{text}: these cards are enough (rule: below 80 %)"
    return f"{text}, more than 80 %: {card_text(need / RULE_SHARE)}, or a smaller model or context"


def card_text(n_bytes: float) -> str:
    """The smallest card of those sold that has so many bytes, in words."""
    sold = next((size for size in CARD_GIB if size * GIB >= n_bytes), None)
    return f"a {sold} GB card" if sold else f"more than one card of {CARD_GIB[-1]} GB"


def what_fits(plan: Plan) -> str:
    """The suggestions of a plan as sentences; empty where there are none."""
    if not plan.suggestions:
        return ""
    first, flags = plan.suggestions[0].flags, "; ".join(suggestion.flags for suggestion in plan.suggestions)
    return f"What fits: {flags}. The first, set: {how_to_set(plan.model, first)}."


def how_to_set(model_id: str, flags: str) -> str:
    """Where flags go for a server, which takes none while it runs: its command line, or config.yaml."""
    words, keys = flags.split(), []
    for at, word in enumerate(words):
        if word.startswith("--no-"):
            keys.append(f"`models.{model_id}.{_key_of(word[5:])}: false`")
        elif word == "--gpus":
            keys.append(f"`models.{model_id}.gpus: [{words[at + 1].replace(',', ', ')}]`")
        elif word == "--memory-budget":
            keys.append(f"`memory.budget: {words[at + 1]}`")
        elif word.startswith("--"):
            keys.append(f"`models.{model_id}.{_key_of(word[2:])}: {words[at + 1]}`")
    return f"`laya serve {flags}`, or {' and '.join(keys)} in config.yaml"


def _key_of(flag: str) -> str:
    return flag.replace("-", "_")
