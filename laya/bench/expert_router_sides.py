"""Owns: the ways to choose experts that `laya bench expert-router` compares: all together, and each step alone.

Each is held to the oracle, and what ran is looked at: a side that took another way than its name says is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

PROJECTION = 4  # hidden size over the width between projection and expert embeddings
MOST_DIFFERENCE = 1e-5  # of a weight
COMPILED = "Torch-Compiled Region"


class Case(NamedTuple):
    """One shape."""

    tokens: int
    hidden: int
    experts: int
    top_k: int


class Side(NamedTuple):
    """One way to (weights, ids)."""

    call: Callable[[], Any]
    runs: dict[str, int] = {}
    """Operations of torch's that must run, and how often; of those in `WATCHED` no other may."""
    instructions: str | None = None
    n_threads: int | None = None


WATCHED = ("aten::linear", "aten::softmax", "aten::topk", "laya::gate")


def sides(case: Case, compiles: bool) -> dict[str, Side]:
    """By name. Raises SystemExit where one does not do what it is called."""
    import torch
    from torch.nn import functional

    from laya.modeling import GateRule, LayaRouter, select
    from laya.modeling.kernels import cpu

    if not cpu.AVAILABLE:
        raise SystemExit("laya bench expert-router measures the native core, which is not built here")
    from laya._core import gate_instructions_here

    torch.manual_seed(0)
    rule = GateRule(n_experts=case.experts, top_k=case.top_k)
    width = max(case.experts, case.hidden // PROJECTION)
    router = LayaRouter(case.hidden, rule, projection_size=width).eval().requires_grad_(False)
    x = torch.randn(case.tokens, case.hidden)
    weight = router.folded_weight()
    rows = x[:, None].unbind(0)

    def choose(logits: Any) -> tuple[Any, Any]:
        best, ids = torch.topk(logits.softmax(dim=-1), case.top_k)
        return best / best.sum(dim=-1, keepdim=True), ids

    def two_step() -> Any:
        return functional.linear(functional.linear(x, router.projection), router.expert_embeddings)

    def folded() -> tuple[Any, Any]:
        return choose(functional.linear(x, weight))

    def token_by_token() -> tuple[Any, Any]:
        done = [cpu.gate_rows(row, weight, rule) for row in rows]
        return torch.cat([each[1] for each in done]), torch.cat([each[2] for each in done])

    def fused() -> Any:
        return cpu.gate_rows(x, weight, rule)

    logits = functional.linear(x, weight)
    weights_made = torch.empty(case.tokens, case.top_k)
    ids_made = torch.empty(case.tokens, case.top_k, dtype=torch.int32)
    addresses = (logits.data_ptr(), case.tokens, 0, 0, weights_made.data_ptr(), ids_made.data_ptr())
    native = cpu.native_gate(rule)

    def selection_core() -> tuple[Any, Any]:
        native.select(*addresses)
        return weights_made, ids_made

    choice = {"aten::softmax": 1, "aten::topk": 1}
    found = {
        "fused": Side(fused),
        "op": Side(lambda: cpu.gate_op(x, weight, rule), {"laya::gate": 1}),
        "folded": Side(folded, {"aten::linear": 1} | choice),
        "eager": Side(lambda: choose(two_step()), {"aten::linear": 2} | choice),
        "selection": Side(lambda: cpu.select_rows(logits, rule)),
        "selection_core": Side(selection_core),
        "choice_in_core": Side(lambda: cpu.select_rows(two_step(), rule), {"aten::linear": 2}),
        "folded_choice_in_core": Side(lambda: cpu.select_rows(functional.linear(x, weight), rule), {"aten::linear": 1}),
        "fused_one_thread": Side(fused, n_threads=1),
    }
    if case.tokens > 1:
        found["fused_token_by_token"] = Side(token_by_token, n_threads=1)
    for name in gate_instructions_here():
        found[f"fused_{name}"] = Side(fused, instructions=name, n_threads=1)
    if compiles:
        found["compiled"] = Side(torch.compile(folded), {COMPILED: 1})
    wanted = select(logits, rule)
    for name, side in found.items():
        with as_said(side):
            _hold(name, case, side, wanted)
    return found


@contextmanager
def as_said(side: Side) -> Iterator[None]:
    """With the threads and the instructions that a side is measured with."""
    import torch

    from laya._core import gate_instructions, use_gate_instructions

    best, n_threads = gate_instructions(), torch.get_num_threads()
    use_gate_instructions(side.instructions or best)
    torch.set_num_threads(side.n_threads or n_threads)
    try:
        yield
    finally:
        use_gate_instructions(best)
        torch.set_num_threads(n_threads)


def _hold(name: str, case: Case, side: Side, wanted: tuple[Any, Any]) -> None:
    import torch

    from laya._core import gate_instructions

    weights, ids = side.call()[-2:]
    if not torch.equal(ids.long(), wanted[1].long()) or (weights - wanted[0]).abs().max() > MOST_DIFFERENCE:
        raise SystemExit(f"{name} does not choose as the oracle does, for {case}")
    ran = operations(side.call, 1)
    counts = {each: ran[each][0] for each in WATCHED if each in ran}
    counts |= {COMPILED: 1} if any(each.startswith(COMPILED) for each in ran) else {}
    if COMPILED in side.runs:
        counts = {each: n for each, n in counts.items() if each == COMPILED}  # what is in it is the compiler's
    if counts != side.runs:
        raise SystemExit(f"{name} is to run {side.runs} and ran {counts}, for {case}")
    if side.instructions is not None and gate_instructions() != side.instructions:
        raise SystemExit(f"{name} ran with {gate_instructions()}")


def operations(call: Callable[[], Any], n_runs: int) -> dict[str, tuple[int, float]]:
    """What torch's profiler saw: operation -> how often, and its own microseconds, in all runs together."""
    from torch.autograd.profiler import profile

    with profile(use_kineto=False) as seen:  # which takes seconds to start, for GPUs
        for _ in range(n_runs):
            call()
    return {event.key: (event.count, event.self_cpu_time_total) for event in seen.key_averages()}
