"""Owns: `laya bench expert-router`: what choosing experts costs, one kernel before the next, in one run.

Sides: `fused` (the native gate, by address, as inference calls it), `op` (the same through torch's dispatcher),
`folded` (plain torch operations on the folded matrix), `eager` (projection, then expert embeddings, then the choice),
`compiled` (torch.compile of `folded`), and `selection` (logits in). Blocks of calls alternate between the sides, as
machines are shared and noisy; figures are medians of a call. Each side is held to the oracle before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from laya.bench.hardware import hardware

BLOCKS = 9
CALLS_A_BLOCK = 60
WARM_UP_CALLS = 8
SIDES = ("fused", "op", "folded", "eager", "compiled", "selection")
PROJECTION = 4  # hidden size over the width between projection and expert embeddings


class Case(NamedTuple):
    """One shape."""

    tokens: int
    hidden: int
    experts: int
    top_k: int


CASES = tuple(
    Case(tokens, hidden, experts, top_k)
    for experts, top_k in ((8, 2), (64, 8))
    for tokens in (128, 1)
    for hidden in (256, 2048, 4096)
)


def _sides(case: Case, compiles: bool) -> dict[str, Callable[[], Any]]:
    import torch
    from torch.nn import functional

    from laya.modeling import GateRule, LayaRouter
    from laya.modeling.kernels import cpu
    from laya.modeling.selection import select

    if not cpu.AVAILABLE:
        raise SystemExit("laya bench expert-router measures the native core, which is not built here")
    torch.manual_seed(0)
    rule = GateRule(n_experts=case.experts, top_k=case.top_k)
    width = max(case.experts, case.hidden // PROJECTION)
    router = LayaRouter(case.hidden, rule, projection_size=width).eval().requires_grad_(False)
    x = torch.randn(case.tokens, case.hidden)
    weight = router.folded_weight()

    def choose(logits: Any) -> tuple[Any, Any]:
        best, ids = torch.topk(logits.softmax(dim=-1), case.top_k)
        return best / best.sum(dim=-1, keepdim=True), ids

    def folded() -> tuple[Any, Any]:
        return choose(functional.linear(x, weight))

    def eager() -> tuple[Any, Any]:
        return choose(functional.linear(functional.linear(x, router.projection), router.expert_embeddings))

    logits = functional.linear(x, weight)
    sides: dict[str, Callable[[], Any]] = {
        "fused": lambda: cpu.gate_rows(x, weight, rule)[1:],
        "op": lambda: cpu.gate_op(x, weight, rule)[1:],
        "folded": folded,
        "eager": eager,
        "selection": lambda: cpu.select_rows(logits, rule),
    }
    if compiles:
        sides["compiled"] = torch.compile(folded)
    weights, ids = select(logits, rule)
    for name, side in sides.items():
        got_weights, got_ids = side()
        if not torch.equal(got_ids.long(), ids.long()) or (got_weights - weights).abs().max() > 1e-5:
            raise SystemExit(f"{name} does not choose as the oracle does, for {case}")
    return sides


def measure(case: Case, compiles: bool = True) -> dict[str, Any]:
    """Median microseconds of a call, a side each, and the ratios within blocks."""
    import torch

    sides = _sides(case, compiles)
    with torch.inference_mode():
        blocks: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(BLOCKS):
            for name, side in sides.items():
                blocks[name].append(_block_us(side))
    row: dict[str, Any] = case._asdict()
    row |= {f"{name}_us": round(statistics.median(blocks[name]), 2) for name in SIDES if name in blocks}
    for other in ("folded", "eager"):
        pairs = zip(blocks[other], blocks["fused"], strict=True)
        row[f"{other}_over_fused"] = round(statistics.median(theirs / ours for theirs, ours in pairs), 2)
    return row


def _block_us(side: Callable[[], Any]) -> float:
    for _ in range(WARM_UP_CALLS):
        side()
    took: list[float] = []
    for _ in range(CALLS_A_BLOCK):
        start = time.perf_counter_ns()
        side()
        took.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(took)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="laya bench expert-router", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which needs a C++ compiler")
    args = parser.parse_args(argv)
    rows = [measure(case, not args.no_compile) for case in CASES]
    if not args.json:
        _print(rows)
    from laya._core import gate_instructions

    machine = hardware() | {"instructions": gate_instructions()}
    layer = "one call from Python, tensors in, tensors out; selection: logits in"
    print(json.dumps({"bench": "expert-router", "layer": layer, "cases": rows, "hardware": machine}))


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What choosing experts costs, microseconds", box=None, header_style="dim")
    for column in rows[0]:
        table.add_column(column.removesuffix("_us").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(highlight=False, width=160).print(table)


if __name__ == "__main__":
    main()
