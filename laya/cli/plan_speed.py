"""Owns: the speed of a plan as `laya plan` tells it: at 1, 2, 4 and 8 sessions, for people and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console

from laya.memory import size_text
from laya.memory.planner import Choice, Model, decide, load_of
from laya.memory.rates import MachineRates
from laya.memory.reading import bytes_per_token
from laya.memory.speed import SESSIONS, Range, Speed, predict_speed
from laya.types import AskedSettings, Plan

NOT_MEASURED = "not measured: `laya doctor` measures this machine once"
ON_GPU = "not predicted on cards: Laya has measured no card, only processors, and makes no figure up"
RAM = "cpu"


class PlanSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds, or why there are none."""

    speeds: tuple[Speed, ...] = ()
    why_not: str | None = None
    bytes_per_token: dict[str, int] = {}  # device -> what it reads for one token, where GPUs have a part
    most_per_s: float | None = None  # tokens a second that RAM's part lets through, whatever the GPUs do


def speed_of(model: Model, asked: AskedSettings, plan: Plan, rates: MachineRates | None) -> PlanSpeed | None:
    """The speed of the plan at 1, 2, 4 and 8 sessions, each with as many sequences; None where nothing is generated."""
    settings = plan.settings
    if settings.task != "chat" or not model.shape.is_causal:
        return None
    if model.gpu_free_bytes and settings.gpu_layers:
        read = bytes_per_token(load_of(model, settings))
        in_ram = read.get(RAM, 0)
        most_per_s = rates.read_bytes_per_s(in_ram, settings.n_threads) / in_ram if rates and in_ram else None
        return PlanSpeed(why_not=ON_GPU, bytes_per_token=read, most_per_s=most_per_s)
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
        fields: dict[str, Any] = {"estimate": None, "why": speed.why_not}
        if speed.bytes_per_token:
            most = float(f"{speed.most_per_s:.3g}") if speed.most_per_s else None
            fields |= {"bytes_per_token": speed.bytes_per_token, "most_per_s": most}
        return fields
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
        if speed.bytes_per_token:
            console.print(f" [dim]reads[/]    {_reads_text(speed)}", soft_wrap=True)
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


def _reads_text(speed: PlanSpeed) -> str:
    """`for each token 4.1 GiB on gpu0, 1.2 GiB in RAM: at most 12 tok/s by what RAM gives`."""
    parts = [
        f"{size_text(n_bytes)} {'in RAM' if device == RAM else f'on {device}'}"
        for device, n_bytes in sorted(speed.bytes_per_token.items(), key=lambda each: each[0] == RAM)
    ]
    if RAM not in speed.bytes_per_token:
        bound = "a card's own GiB/s over that are the most tokens/s it could give"
    elif speed.most_per_s is None:
        bound = "RAM's part is the slow one; `laya doctor` measures what it gives"
    else:
        bound = f"at most {speed.most_per_s:.3g} tok/s by what RAM gives here"
    return f"for each token {', '.join(parts)}  [dim]{bound}[/]"


def range_text(values: Range) -> str:
    """`30-42`, `0.8-1.3`: two figures or so."""
    digits = 0 if values.low >= 10 else 1 if values.low >= 1 else 2
    return f"{values.low:.{digits}f}-{values.high:.{digits}f}"
