"""Owns: `laya plan`: what a model would need here, before a byte of it is read, as a ledger or as JSON.

Exit codes: 0 it fits, 3 it does not, 2 a bad file, name or setting. Flags are read in Laya's, vLLM's and llama.cpp's
spellings, by the same code as those of `laya serve`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from laya.cli.fit import model_shape
from laya.cli.output import knows_unicode, print_json, shown
from laya.config import Config, load_config, parse_engine_flags, with_settings
from laya.errors import BadModelFile, InsufficientMemory, ModelNotPulled
from laya.memory import Budget, Machine, plan_before_download, plan_file, size_text
from laya.models import entries, home_path, resolve
from laya.types import KIB, MIB, AskedSettings, DevicePlan, Plan, Task

BAR_WIDTH = 32
LABELS = {"kv_cache": "KV"}
# The rule of thumb that goes round, shown beside the plan: it knows neither context nor sequences.
RULE_OF_THUMB = (1.5, 2)


def _setting(*names: str, help: str | None = None) -> Any:
    """A flag of an engine setting; those without help are other servers' spellings and stay out of --help."""
    return typer.Option(*names, help=help, hidden=help is None, show_default=False)


ModelName = Annotated[str, typer.Argument(help="A name that `laya list` shows, or the path of a .gguf file.")]
Budgeted = Annotated[str | None, _setting("--memory-budget", help="Bytes engines may use in all, e.g. 8GiB or 50%.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: ./config.yaml if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# Parameters that are settings: their flags are read by the same code as those of `laya serve`.
SETTINGS = frozenset(
    (
        "max_seq_len", "max_num_seqs", "kv_cache_dtype", "kv_pool_tokens", "task", "n_threads", "mmproj", "draft",
        "max_model_len", "ctx_size", "parallel", "cache_type_k", "cache_type_v",
    )
)  # fmt: skip


def plan(
    context: typer.Context,
    model: ModelName,
    max_seq_len: Annotated[str | None, _setting("--max-seq-len", help="Tokens a sequence.")] = None,
    max_num_seqs: Annotated[str | None, _setting("--max-num-seqs", help="Sequences at once.")] = None,
    kv_cache_dtype: Annotated[str | None, _setting("--kv-cache-dtype", help="f16, q8_0, q4_0, ...")] = None,
    kv_pool_tokens: Annotated[str | None, _setting("--kv-pool-tokens", help="Tokens all sequences share.")] = None,
    task: Annotated[str | None, _setting("--task", help="chat, embed or rerank.")] = None,
    memory_budget: Budgeted = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
    n_threads: Annotated[str | None, _setting("--n-threads", "--threads", "-t")] = None,
    mmproj: Annotated[str | None, _setting("--mmproj", "-mm")] = None,
    draft: Annotated[str | None, _setting("--draft", "--model-draft", "-md")] = None,
    mmap: Annotated[bool, _setting("--mmap/--no-mmap")] = True,
    max_model_len: Annotated[str | None, _setting("--max-model-len")] = None,
    ctx_size: Annotated[str | None, _setting("--ctx-size", "-c")] = None,
    parallel: Annotated[str | None, _setting("--parallel", "-np")] = None,
    cache_type_k: Annotated[str | None, _setting("--cache-type-k", "-ctk")] = None,
    cache_type_v: Annotated[str | None, _setting("--cache-type-v", "-ctv")] = None,
) -> None:
    """Show what a model would need here, what is chosen for it and why; nothing is loaded."""
    said = {name: value for name, value in context.params.items() if name in SETTINGS and value is not None}
    words = [word for name, value in said.items() for word in (f"--{name.replace('_', '-')}", value)]
    settings = parse_engine_flags([*words, *([] if mmap else ["--no-mmap"]), *context.args])
    config = load_config(config_file, os.environ)
    budget = Machine().budget(memory_budget if memory_budget is not None else config.memory.budget)
    made = _plan(model, config, settings, budget)
    if ctx_size is not None:
        total = f"--ctx-size {ctx_size} is llama.cpp's total of all slots: max_seq_len {settings['max_seq_len']} each"
        made = msgspec.structs.replace(made, notes=[*made.notes, total])
    if as_json:
        print_json(msgspec.to_builtins(made) | {"limit": budget.limit})
    else:
        show(Console(highlight=False), made, budget, set(settings))
    if not made.fits:
        raise typer.Exit(InsufficientMemory.exit_code)


def _plan(name: str, config: Config, settings: dict[str, Any], budget: Budget) -> Plan:
    """The plan of a model on this disk, or of one in the catalogue that is not here yet."""
    source = config.for_model(name).source or name
    try:
        file = resolve(source, models_dir=Path(config.models_dir), home=home_path())
    except ModelNotPulled:
        entry = next(entry for entry in entries() if source in entry.names)
        asked = _asked(config, settings, name, entry.task)
        shape = model_shape(entry.shape)
        return plan_before_download(shape, entry.file_bytes, entry.weights_type, asked, budget, model_id=entry.id)
    if file.format != "gguf":
        raise BadModelFile(f"{file.path} is a Hugging Face folder; plans are made from GGUF files.", param="model")
    model_id = name if name in config.models else file.id
    return plan_file(file.path, _asked(config, settings, model_id, file.task), budget, model_id=model_id)


def _asked(config: Config, settings: dict[str, Any], model_id: str, task: Task | None) -> AskedSettings:
    """What the config says of this model, with the command line over it; else the task it was made for."""
    resolved = with_settings(config, settings, model_id).for_model(model_id)
    asked = resolved.asked()
    return asked if task is None or "task" in resolved.fixed else msgspec.structs.replace(asked, task=task)


def show(console: Console, made: Plan, budget: Budget, yours: set[str]) -> None:
    """The ledger as a person reads it."""
    for device in made.devices:
        _show_device(console, made, device, budget)
    settings = made.settings
    for name, reason in made.reasons.items():
        console.print(f" [dim]chosen[/]   {name} [bold]{getattr(settings, name)}[/]  [dim]{reason}[/]", soft_wrap=True)
    said = [f"{name} {getattr(settings, name)}" for name in sorted(yours) if hasattr(settings, name)]
    if said:
        console.print(f" [dim]yours[/]    {shown(', '.join(said))}", soft_wrap=True)
    for note in made.notes:
        console.print(f" [dim]note[/]     {shown(note)}", soft_wrap=True)
    if made.suggestions:
        _show_suggestions(console, made)
    console.print(f" [dim]rule[/]     {shown(made.verdict)}", soft_wrap=True)
    low, high = (factor * made.devices[0].terms["weights"] for factor in RULE_OF_THUMB)
    console.print(f' [dim]"weights x 1.5-2" would have said {size_text(round(low))} to {size_text(round(high))}[/]')
    if not made.fits:
        console.print(" Nothing was loaded.")


def _show_device(console: Console, made: Plan, device: DevicePlan, budget: Budget) -> None:
    console.print(f" [bold]{device.device}[/]      budget {size_text(device.budget_bytes)} ({budget.limit})")
    largest = max(device.terms.values())
    for name, n_bytes in device.terms.items():
        bar = _bar(n_bytes / largest, knows_unicode(console))
        detail = f"  [dim]{_kv_text(made)}[/]" if name == "kv_cache" else ""
        console.print(f"   {LABELS.get(name, name):<10}{n_bytes / MIB:9.1f}  [cyan]{bar}[/]{detail}", soft_wrap=True)
    left = device.budget_bytes - device.total_bytes
    share = f"{100 * device.total_bytes / device.budget_bytes:.0f} % of budget" if device.budget_bytes else "no budget"
    if made.fits:
        verdict = f"[bold green]FITS[/], {size_text(left)} left"
    else:
        verdict = f"[bold red]DOES NOT FIT[/]: {size_text(-left)} over"
    console.print(f"   {'total':<10}{device.total_bytes / MIB:9.1f}  MiB = {share}      {verdict}")


def _bar(share: float, has_blocks: bool) -> str:
    if not has_blocks:
        return "#" * max(1, round(share * BAR_WIDTH))
    eighths = round(share * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip() or "▏"


def _kv_text(made: Plan) -> str:
    settings = made.settings
    if settings.kv_unified:
        tokens, text = settings.slot_tokens, f"{settings.max_num_seqs} sequences share {settings.slot_tokens} tokens"
    else:
        tokens = settings.slot_tokens * settings.max_num_seqs
        text = f"{settings.max_num_seqs} x {settings.max_seq_len} tokens"
    each = made.devices[0].terms["kv_cache"] / tokens / KIB
    return f"{text}, {settings.kv_cache_dtype}, {each:.1f} KiB each"


def _show_suggestions(console: Console, made: Plan) -> None:
    console.print("\n These do (planned the same way):")
    width = max(len(suggestion.flags) for suggestion in made.suggestions)
    for letter, suggestion in zip("abcdef", made.suggestions, strict=False):
        figures = f"{suggestion.flags:<{width}}  {size_text(suggestion.total_bytes):>9}"
        console.print(f"   {letter}  {figures}   [dim]{shown(suggestion.note)}[/]", soft_wrap=True)
    console.print()
