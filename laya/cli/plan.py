"""Owns: `laya plan`: what a model would need here, before a byte of it is read, as a ledger or as JSON.

With no model: all of the config. Exit codes: 0 it fits, 3 it does not, 2 a bad file, name or setting. Flags are read in
Laya's, vLLM's and llama.cpp's spellings, by the same code as those of `laya serve`. 1: an address that did not answer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from laya.cli.output import print_json
from laya.cli.plan_advice import alternatives
from laya.cli.plan_config import show_whole, whole_fields, whole_plan
from laya.cli.plan_line import Line, budget_of, clamped_notes
from laya.cli.plan_model import Asking, Subject, cards_of, subject_described
from laya.cli.plan_program import ProgramSubject, any_subject, show_program_plan
from laya.cli.plan_show import rule_of_thumb, show_alternatives, show_choices, show_devices, show_left, show_verdict
from laya.cli.plan_speed import show_speed, speed_fields, speed_of
from laya.cli.plan_table import compare_code, compare_fields, compared, show_compare, show_table, table_fields
from laya.cli.plan_vllm import is_vllm_here, show_vllm_plan
from laya.cli.rates import kept_rates
from laya.config import Config, load_config, parse_engine_flags
from laya.errors import ConfigError, InsufficientMemory
from laya.memory import Budget
from laya.memory.limits import model_budget


def _setting(*names: str, help: str | None = None) -> Any:
    """A flag of an engine setting; those without help are other servers' spellings and stay out of --help."""
    return typer.Option(*names, help=help, hidden=help is None, show_default=False)


ModelName = Annotated[
    str | None, typer.Argument(help="A name of `laya list`, a path, a config.json, hf://org/repo; none: the config.")
]
Budgeted = Annotated[str | None, _setting("--memory-budget", help="Bytes engines may use in all, e.g. 8GiB or 50%.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: ./config.yaml if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsTable = Annotated[bool, typer.Option("--table", help="The grid of contexts and sequences.")]
Compare = Annotated[tuple[Path, Path] | None, typer.Option(help="Two config files, side by side.", metavar="OLD NEW")]
Params = Annotated[Path | None, typer.Option(help="A JSON description of an architecture instead of a model.")]
Cards = Annotated[str | None, typer.Option("--gpu-memory", help="Plan for cards of these sizes: 24GiB, 24GiB,12GiB.")]
FreeMemory = Annotated[
    str | None, typer.Option("--memory", help="Plan for a machine or container with so much memory free, e.g. 64GiB.")
]
ForVllm = Annotated[bool, typer.Option("--vllm", help="As vLLM would run it, on --gpu-memory cards or those here.")]
# Parameters that are settings: their flags are read by the same code as those of `laya serve`.
SETTINGS = frozenset(
    (
        "max_seq_len", "max_num_seqs", "kv_cache_dtype", "kv_pool_tokens", "prompt_cache", "task", "memory_limit",
        "n_threads", "mmproj", "draft", "max_model_len", "parallel", "cache_type_k", "cache_type_v",
    )
)  # fmt: skip


def plan(
    context: typer.Context,
    model: ModelName = None,
    max_seq_len: Annotated[str | None, _setting("--max-seq-len", help="Tokens a sequence.")] = None,
    max_num_seqs: Annotated[str | None, _setting("--max-num-seqs", help="Sequences at once.")] = None,
    kv_cache_dtype: Annotated[str | None, _setting("--kv-cache-dtype", help="f16, q8_0, q4_0, ...")] = None,
    kv_pool_tokens: Annotated[str | None, _setting("--kv-pool-tokens", help="Tokens all sequences share.")] = None,
    prompt_cache: Annotated[str | None, _setting("--prompt-cache", help="RAM for old prompts, 256MiB or auto.")] = None,
    task: Annotated[str | None, _setting("--task", help="chat, embed, rerank or decide.")] = None,
    memory_limit: Annotated[str | None, _setting("--memory-limit", help="RAM this model may use, e.g. 4GiB.")] = None,
    memory_budget: Budgeted = None,
    gpu_memory: Cards = None,
    memory: FreeMemory = None,
    table: AsTable = False,
    compare: Compare = None,
    params: Params = None,
    vllm: ForVllm = False,
    config_file: ConfigFile = None,
    as_json: Json = False,
    n_threads: Annotated[str | None, _setting("--n-threads", "--threads")] = None,
    mmproj: Annotated[str | None, _setting("--mmproj", "-mm")] = None,
    draft: Annotated[str | None, _setting("--draft", "--model-draft", "-md")] = None,
    mmap: Annotated[bool, _setting("--mmap/--no-mmap")] = True,
    max_model_len: Annotated[str | None, _setting("--max-model-len")] = None,
    parallel: Annotated[str | None, _setting("--parallel", "-np")] = None,
    cache_type_k: Annotated[str | None, _setting("--cache-type-k", "-ctk")] = None,
    cache_type_v: Annotated[str | None, _setting("--cache-type-v", "-ctv")] = None,
) -> None:
    """Show what a model would need here, what is chosen for it and why, and how fast it is; nothing is loaded."""
    rest = list(context.args)
    bare: list[str] | None = None
    if model is not None and model.startswith("-"):  # the flag of a setting stands before the model
        rest, model, bare = [model, *rest], None, []
    said = {name: value for name, value in context.params.items() if name in SETTINGS and value is not None}
    words = [word for name, value in said.items() for word in (f"--{name.replace('_', '-')}", value)]
    more = [*(["--engine", "vllm"] if vllm else []), *([] if mmap else ["--no-mmap"]), *rest]
    own = [name for option in context.command.params for name in option.opts]
    settings = parse_engine_flags([*words, *more], own, bare)
    asked = _Question(
        model=bare[0] if bare else model,
        table=table,
        compare=compare,
        params=params,
        vllm=vllm,
        config_file=config_file,
        memory_budget=memory_budget,
        gpu_memory=gpu_memory,
        memory=memory,
        as_json=as_json,
    )
    asked.check()
    if vllm and settings["engine"] != "vllm":
        raise ConfigError(f"--vllm and --engine {settings['engine']} are two questions: leave one out", param="vllm")
    if settings.get("engine") == "vllm" and (vllm or gpu_memory is not None or not is_vllm_here()):
        asked = msgspec.structs.replace(asked, vllm=True)
        asked.check()
    asked = msgspec.structs.replace(asked, total_context=_value_of(rest, "--ctx-size", "-c"))
    raise typer.Exit(_answer(asked, settings))


def _value_of(words: Sequence[str], *names: str) -> str | None:
    """What follows a flag; None where it is not there."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        name, separator, value = word.partition("=")
        if name in names:
            return value if separator else after
    return None


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned and shown, beside the settings."""

    model: str | None
    table: bool
    compare: tuple[Path, Path] | None
    params: Path | None
    vllm: bool
    config_file: Path | None
    memory_budget: str | None
    gpu_memory: str | None
    memory: str | None
    as_json: bool
    total_context: str | None = None  # llama.cpp's --ctx-size

    def budget_text(self, config: Config) -> str | int | None:
        """The budget as it was written."""
        return self.memory_budget if self.memory_budget is not None else config.memory.budget

    def budget(self, config: Config) -> Budget:
        """What may be planned with. Raises ConfigError."""
        return budget_of(self.memory, self.budget_text(config))

    def check(self) -> None:
        """Raise ConfigError where two ways to plan are asked for at once."""
        if self.params is not None and self.model is not None:
            raise ConfigError(f"--params {self.params} is a model of its own: leave out '{self.model}'", param="params")
        modes = (
            ("--compare", self.compare is not None),
            ("--vllm", self.vllm),
            ("--table", self.table),
            ("--params", self.params is not None),
        )
        first, *others = [name for name, is_asked in modes if is_asked] or [""]
        if others and first in ("--compare", "--vllm"):
            raise ConfigError(f"{first} and {others[0]} are two questions: ask one at a time", param=first[2:])


def _answer(asked: _Question, settings: dict[str, Any]) -> int:
    """Plan and show what was asked; the exit code."""
    if asked.compare is not None:
        return _compare(asked, asked.compare, settings)
    config = load_config(asked.config_file, os.environ)
    budget = asked.budget(config)
    cards = cards_of(asked.gpu_memory)
    asking = Asking(config=config, settings=settings, card_bytes=cards, is_elsewhere=asked.memory is not None)
    file = str(asked.config_file) if asked.config_file else None
    line = Line(
        asking=asking, budget=asked.memory_budget, config=file, gpu_memory=asked.gpu_memory, memory=asked.memory
    )
    if asked.vllm or (cards and asked.model is not None and asking.of(asked.model)[1].engine == "vllm"):
        return _exit_code(show_vllm_plan(asked.model, line, budget, as_json=asked.as_json))
    if asked.params is not None:
        subject = subject_described(asked.params, asking)
    elif asked.model is not None:
        found = any_subject(asked.model, asking)
        if isinstance(found, ProgramSubject):
            return _exit_code(show_program_plan(found, budget, asking, as_table=asked.table, as_json=asked.as_json))
        subject = found
    else:
        return _whole(asking, budget, asked)
    if asked.total_context is not None:
        each = f"llama.cpp's total of all slots: max_seq_len {settings['max_seq_len']} each"
        subject = msgspec.structs.replace(
            subject, notes=(*subject.notes, f"--ctx-size {asked.total_context} is {each}")
        )
    more = clamped_notes(asked.budget_text(config), budget)
    subject = msgspec.structs.replace(subject, notes=(*subject.notes, *more))
    if asked.table:
        return _table(subject.of_variant(subject.plan(budget)), budget, asked.as_json)
    return _one(subject, budget, line, asked.as_json)


def _one(subject: Subject, budget: Budget, line: Line, as_json: bool) -> int:
    """One model's ledger."""
    rates = kept_rates()
    made = subject.plan(budget, rates)
    subject = subject.of_variant(made)
    speed = speed_of(subject.model, subject.asked, made, rates)
    instead = [] if made.fits else alternatives(subject, made, line, rates)
    budget = model_budget(subject.asked, budget)
    weights = subject.model.facts.weights_bytes
    if as_json:
        low, high = rule_of_thumb(weights)
        rule = {"low_bytes": low, "high_bytes": high, "need_over_high": round(made.need_bytes / max(1, high), 3)}
        more = {
            "limit": budget.limit,
            "speed": speed_fields(speed, made),
            "weights_rule": rule,
            "alternatives": instead,
        }
        print_json(msgspec.to_builtins(made) | more)
        return _exit_code(made.fits)
    console = Console(highlight=False)
    show_devices(console, made, budget)
    show_choices(console, made, line.asking.settings)
    show_speed(console, speed, made)
    show_left(console, made, subject.model.facts)
    if instead:
        show_alternatives(console, instead)
    show_verdict(console, made, weights)
    return _exit_code(made.fits)


def _table(subject: Subject, budget: Budget, as_json: bool) -> int:
    if as_json:
        print_json(table_fields(subject, budget))
    else:
        show_table(Console(highlight=False), subject, budget)
    return 0


def _compare(asked: _Question, files: tuple[Path, Path], settings: dict[str, Any]) -> int:
    """Both configs; the exit code is that of the second, the one to change to, and 2 where one names what is not."""
    configs: tuple[Config, Config] = (load_config(files[0], os.environ), load_config(files[1], os.environ))
    found = compared(configs, asked.model, settings, asked.budget, cards_of(asked.gpu_memory), asked.memory is not None)
    if asked.as_json:
        print_json(compare_fields(found, files))
    else:
        show_compare(Console(highlight=False), found, files)
    return compare_code(found)


def _whole(asking: Asking, budget: Budget, asked: _Question) -> int:
    if asked.table:
        raise ConfigError("--table is of one model: laya plan MODEL --table", param="table")
    whole = whole_plan(asking, budget, kept_rates())
    notes = clamped_notes(asked.budget_text(asking.config), budget)
    if asked.as_json:
        print_json(whole_fields(whole, budget) | {"notes": list(notes)})
    else:
        show_whole(Console(highlight=False), whole, budget, notes)
    return whole.exit_code


def _exit_code(fits: bool) -> int:
    return 0 if fits else InsufficientMemory.exit_code
