"""Owns: `laya bench expert-router`: what choosing experts costs, one kernel before the next, in one run.

Sides: `fused` (the native gate, by address, as inference calls it), `op` (the same through torch's dispatcher),
`folded` (plain torch operations on the folded matrix), `eager` (projection, then expert embeddings, then the choice),
`compiled` (torch.compile of `folded`), `selection` (logits in). Then each step alone: `choice_in_core` (eager's linear
layers), `folded_choice_in_core`, the one pass on one thread and with each kind of instructions, one token after the
other, and `selection_core` (no tensor is made). Blocks of calls alternate between the sides, as machines are shared and
noisy; figures are medians of a call, `fused_mean_us` and `folded_mean_us` means of a block: of one token, results are
made for many calls at a time. `profile`: the router alone over 100 runs under torch's profiler, the first dropped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from laya.bench.expert_router_sides import Case, as_said, operations, sides
from laya.bench.hardware import hardware
from laya.bench.help import description

BLOCKS = 9
CALLS_A_BLOCK = 64
WARM_UP_CALLS = 8
PROFILED_RUNS = 100
PROFILED = ("eager", "folded")
MAIN = ("fused", "op", "folded", "eager", "compiled", "selection")
GROUPS = {
    "linear": ("linear", "addmm", "mm", "matmul", "t", "transpose", "mkldnn_linear", "mkldnn_rnn_layer", "as_strided"),
    "softmax": ("softmax", "_softmax"),
    "top-k": ("topk",),
    "renormalise": ("sum", "div", "gather"),
    "copies": ("copy_", "to", "_to_copy", "clone", "contiguous", "empty", "empty_strided", "resize_", "fill_"),
}

CASES = tuple(
    Case(tokens, hidden, experts, top_k)
    for experts, top_k in ((8, 2), (64, 8))
    for tokens in (128, 1)
    for hidden in (256, 2048, 4096)
)


def measure(case: Case, compiles: bool = True) -> dict[str, Any]:
    """Microseconds of a call, a side each, the ratios within blocks, and the profile."""
    import torch

    with torch.inference_mode():
        found = sides(case, compiles)
        medians: dict[str, list[float]] = {name: [] for name in found}
        means: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(BLOCKS):
            for name, side in found.items():
                with as_said(side):
                    median, mean = _block_us(side.call)
                medians[name].append(median)
                means[name].append(mean)
        profile = {name: _profile(found[name].call) for name in PROFILED}
    row: dict[str, Any] = case._asdict()
    names = [*MAIN, *(name for name in found if name not in MAIN)]
    row |= {f"{name}_us": round(statistics.median(medians[name]), 2) if name in found else None for name in names}
    row |= {f"{name}_mean_us": round(statistics.median(means[name]), 2) for name in ("fused", "folded")}
    for other in ("folded", "eager"):
        pairs = zip(medians[other], medians["fused"], strict=True)
        row[f"{other}_over_fused"] = round(statistics.median(theirs / ours for theirs, ours in pairs), 2)
    return row | {"profile": profile}


def _block_us(call: Callable[[], Any]) -> tuple[float, float]:
    for _ in range(WARM_UP_CALLS):
        call()
    took: list[float] = []
    for _ in range(CALLS_A_BLOCK):
        start = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(took), statistics.fmean(took)


def _profile(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of a run by kind of operation; the profiler's own cost is in them."""
    call()
    totals = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, (_, own_us) in operations(call, PROFILED_RUNS).items():
        plain = name.removeprefix("aten::")
        totals[next((group for group, members in GROUPS.items() if plain in members), "other")] += own_us
    return {group: round(total / PROFILED_RUNS, 2) for group, total in totals.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="laya bench expert-router", description=description(__doc__))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which needs a C++ compiler")
    args = parser.parse_args(argv)
    rows = [measure(case, not args.no_compile) for case in CASES]
    if not args.json:
        _print(rows)
    import torch

    from laya._core import gate_instructions

    machine = hardware() | {"instructions": gate_instructions(), "torch": torch.__version__}
    machine |= {"threads": torch.get_num_threads(), "layer": "one call from Python, tensors in, tensors out"}
    print(json.dumps({"cases": rows, "hardware": machine}))


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=160)
    shape = list(Case._fields)
    ratios = [name for name in rows[0] if name.endswith("_over_fused")]
    together = [f"{name}_us" for name in MAIN]
    alone = [name for name in rows[0] if name.endswith("_us") and name not in together]
    for title, columns in (
        ("What choosing experts costs, microseconds", together + ratios),
        ("Each step alone, microseconds", alone),
    ):
        table = Table(title=title, box=None, header_style="dim")
        for column in shape + columns:
            table.add_column(column.removesuffix("_us").replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(str(row.get(column, "-")) for column in shape + columns))
        console.print(table)
    table = Table(
        title=f"torch.profiler, {PROFILED_RUNS} runs, microseconds a run and share", box=None, header_style="dim"
    )
    for column in (*shape, "side", *GROUPS, "other"):
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        for side, groups in row["profile"].items():
            whole = sum(groups.values())
            shares = (f"{value:g} {value / whole:4.0%}" for value in groups.values())
            table.add_row(*(str(row[column]) for column in shape), side, *shares)
    console.print(table)


if __name__ == "__main__":
    main()
