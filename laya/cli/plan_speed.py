"""Owns: the speed of a plan as `laya plan` tells it: at 1, 2, 4 and 8 sessions, for people and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console

from laya.memory.planner import Choice, Model, decide
from laya.memory.rates import MachineRates
from laya.memory.speed import SESSIONS, Range, Speed, predict_speed
from laya.types import AskedSettings, Plan

NOT_MEASURED = "not measured: `laya doctor` measures this machine once"
ON_GPU = "not predicted on cards: Laya has measured no card, only processors, and makes no figure up"


class PlanSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds, or why there are none."""

    speeds: tuple[Speed, ...] = ()
    why_not: str | None = None


def speed_of(model: Model, asked: AskedSettings, plan: Plan, rates: MachineRates | None) -> PlanSpeed | None:
    """The speed of the plan at 1, 2, 4 and 8 sessions, each with as many sequences; None where nothing is generated."""
    settings = plan.settings
    if settings.task != "chat" or not model.shape.is_causal:
        return None
    if model.gpu_free_bytes and settings.gpu_layers:
        return PlanSpeed(why_not=ON_GPU)
    if rates is None:
        return PlanSpeed(why_not=NOT_MEASURED)
    speeds = []
    for n_sessions in SESSIONS:
        choice = Choice(
            max_num_seqs=max(n_sessions, settings.max_num_seqs),
            max_seq_len=settings.max_seq_len,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        planned = decide(model, asked, choice)
        speeds.append(predict_speed(model.facts, planned, rates, sessions=n_sessions))
    return PlanSpeed(speeds=tuple(speeds))


def speed_fields(speed: PlanSpeed | None, plan: Plan) -> dict[str, Any] | None:
    """As JSON: ranges in tokens a second and seconds; `needs_max_num_seqs` where the plan computes fewer at once."""
    if speed is None:
        return None
    if speed.why_not is not None:
        return {"estimate": None, "why": speed.why_not}
    rows = []
    for each in speed.speeds:
        more = each.sessions if each.sessions > plan.settings.max_num_seqs else None
        ranges = {name: _rounded(getattr(each, name)) for name in ("tokens_per_s", "each_per_s", "first_token_s")}
        rows.append(msgspec.to_builtins(each) | ranges | {"needs_max_num_seqs": more})
    return {"estimate": rows, "why": None}


def _rounded(values: Range) -> dict[str, float]:
    """Three figures: a range claims no more."""
    return {"low": float(f"{values.low:.3g}"), "high": float(f"{values.high:.3g}")}


def show_speed(console: Console, speed: PlanSpeed | None, plan: Plan) -> None:
    if speed is None:
        return
    if speed.why_not is not None:
        console.print(f" [dim]speed    {speed.why_not}[/]", soft_wrap=True)
        return
    one, more = speed.speeds[0], speed.speeds[1:]
    first = f"first token of a {one.prompt_tokens}-token prompt {range_text(one.first_token_s)} s"
    console.print(
        f" [dim]speed[/]    {range_text(one.tokens_per_s)} tok/s at {one.kept_tokens} tokens of context; {first}"
        "  [dim](estimate)[/]",
        soft_wrap=True,
    )
    parts = []
    for each in more:
        mark = "*" if each.sessions > plan.settings.max_num_seqs else ""
        parts.append(f"{each.sessions}: {range_text(each.tokens_per_s)}{mark}")
    has_more = more[-1].sessions > plan.settings.max_num_seqs
    note = f"  [dim]* with --max-num-seqs[/] [dim]{more[-1].sessions}[/]" if has_more else ""
    console.print(f"          [dim]sessions at once, tok/s in all[/]  {'   '.join(parts)}{note}", soft_wrap=True)


def range_text(values: Range) -> str:
    """`30-42`, `0.8-1.3`: two figures or so."""
    digits = 0 if values.low >= 10 else 1 if values.low >= 1 else 2
    return f"{values.low:.{digits}f}-{values.high:.{digits}f}"
