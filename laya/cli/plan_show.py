"""Owns: the ledger of one plan as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from rich.console import Console

from laya.cli.output import knows_unicode, shown
from laya.cli.plan_line import Alternative
from laya.memory import Budget, ModelFacts, size_text
from laya.memory.caches import kv_bytes_per_token
from laya.memory.ggml import KV_CACHE_TYPES
from laya.types import KIB, MIB, DevicePlan, Plan

BAR_WIDTH = 32
LABELS = {"kv_cache": "KV", "prompt_cache": "prompts"}
# The rule of thumb that goes round, shown beside the plan: it knows neither context nor sequences.
RULE_OF_THUMB = (1.5, 2)


def show_devices(console: Console, made: Plan, budget: Budget) -> None:
    """What each device would hold, term by term."""
    for device in made.devices:
        _show_device(console, made, device, budget)


def show_choices(console: Console, made: Plan, yours: Mapping[str, Any]) -> None:
    """What was chosen and why, what was asked, and what is to be known. yours: settings as they were asked."""
    settings = made.settings
    if made.variant is not None:
        chosen, reason = made.variant, made.variant.reason
        console.print(
            f" [dim]chosen[/]   quantization [bold]{shown(chosen.quantization)}[/]  {shown(chosen.path)}  "
            f"[dim]{shown(reason)}[/]",
            soft_wrap=True,
        )
    for name, reason in made.reasons.items():
        text = _value_text(name, getattr(settings, name))
        console.print(f" [dim]chosen[/]   {name} [bold]{text}[/]  [dim]{reason}[/]", soft_wrap=True)
    said = [
        _yours_text(name, yours[name], getattr(settings, name)) for name in sorted(yours) if hasattr(settings, name)
    ]
    if said:
        console.print(f" [dim]yours[/]    {shown(', '.join(said))}", soft_wrap=True)
    for note in made.notes:
        console.print(f" [dim]note[/]     {shown(note)}", soft_wrap=True)


def _yours_text(name: str, asked: Any, value: Any) -> str:
    """A count that the model or the cards bound is told with what was asked."""
    text = f"{name} {_value_text(name, value)}"
    if not isinstance(asked, int) or isinstance(asked, bool) or asked == value:
        return text
    return f"{text} (of {asked} asked)"


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return size_text(value) if name.endswith("_bytes") else str(value)


def show_left(console: Console, made: Plan, facts: ModelFacts) -> None:
    """How many more tokens of cache would fit, where the cache grows with each."""
    kv_type = KV_CACHE_TYPES.get(made.settings.kv_cache_dtype)
    each = kv_bytes_per_token(facts, kv_type) if kv_type is not None and made.fits else 0
    holding = [device for device in made.devices if "kv_cache" in device.terms]
    left = min((device.budget_bytes - device.total_bytes for device in holding), default=0)
    if each and left >= each:
        tokens = float(f"{left // each:.2g}")  # their cells and masks take a little too
        console.print(
            f" [dim]left[/]     about {tokens:.0f} more tokens of {made.settings.kv_cache_dtype} cache would fit"
        )


def show_verdict(console: Console, made: Plan, weights_bytes: int) -> None:
    """The hardware rule, and beside it the rule of thumb with what it is off by."""
    console.print(
        f" [dim]machine[/]  is right for a model where two chats at once take less than 80 %: {shown(made.verdict)}",
        soft_wrap=True,
    )
    low, high = rule_of_thumb(weights_bytes)
    off = off_text(made.need_bytes, low, high)
    guess = f"1.5 to 2 times the weights, the usual guess, is {size_text(low)} to {size_text(high)}: {off}"
    console.print(f"          [dim]{guess}[/]", soft_wrap=True)
    if not made.fits:
        console.print(" Nothing was loaded.")


def rule_of_thumb(weights_bytes: int) -> tuple[int, int]:
    """What 1.5 to 2 times the weights are, in bytes."""
    low, high = (round(factor * weights_bytes) for factor in RULE_OF_THUMB)
    return low, high


def off_text(need: int, low: int, high: int) -> str:
    """By how much the rule of thumb is wrong here."""
    if need > high:
        return f"{size_text(need - high)} too little, {need / high:.1f} x less than needed"
    if need < low:
        return f"{size_text(low - need)} too much, {low / need:.1f} x what is needed"
    return "right for these settings alone: it knows neither context nor sequences"


def _show_device(console: Console, made: Plan, device: DevicePlan, budget: Budget) -> None:
    limit = budget.limit if device.device == "cpu" else "the card, less what is kept free"
    console.print(f" [bold]{device.device:<4}[/]     budget {size_text(device.budget_bytes)} ({limit})")
    largest = max(device.terms.values(), default=1)
    for name, n_bytes in device.terms.items():
        bar = _bar(n_bytes / largest, knows_unicode(console))
        detail = f"  [dim]{_kv_text(made)}[/]" if name == "kv_cache" else ""
        console.print(f"   {LABELS.get(name, name):<11}{n_bytes / MIB:9.1f}  [cyan]{bar}[/]{detail}", soft_wrap=True)
    left = device.budget_bytes - device.total_bytes
    share = f"{100 * device.total_bytes / device.budget_bytes:.0f} % of budget" if device.budget_bytes else "no budget"
    if left >= 0:
        verdict = f"[bold green]FITS[/], {size_text(left)} left"
    else:
        verdict = f"[bold red]DOES NOT FIT[/]: {size_text(-left)} over"
    console.print(f"   {'total':<11}{device.total_bytes / MIB:9.1f}  MiB = {share}      {verdict}")


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
    kv_bytes = sum(device.terms.get("kv_cache", 0) for device in made.devices)
    each = kv_bytes / tokens / KIB
    return f"{text}, {settings.kv_cache_dtype}, {each:.1f} KiB each"


def show_alternatives(console: Console, found: list[Alternative]) -> None:
    """Commands that plan something that fits."""
    console.print("\n These do (planned the same way):")
    width = max(len(each.command) for each in found)
    for letter, each in zip(ascii_lowercase, found, strict=False):
        figures = f"{shown(each.command):<{width}}  {size_text(each.total_bytes):>9}"
        console.print(f"   {letter}  {figures}   [dim]{shown(each.note)}[/]", soft_wrap=True)
    console.print()
