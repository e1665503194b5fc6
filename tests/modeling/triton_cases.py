"""The Triton gate against the oracle, in Triton's interpreter or on a GPU. A program of its own: the interpreter is
chosen before triton is imported, and for the whole process. Prints how many cases were right."""

from __future__ import annotations

import itertools
import sys

import torch

from laya.modeling import GateRule
from laya.modeling.kernels import triton_gate
from laya.modeling.selection import select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rules(n_experts: int) -> list[GateRule]:
    found = []
    for score, renormalize, top_k in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"), (True, False), {1, min(8, n_experts)}
    ):
        rule = {"n_experts": n_experts, "top_k": top_k, "score_func": score, "renormalize": renormalize}
        found.append(GateRule(**rule, renorm_eps=1e-20 if score == "sigmoid" else 0.0, routed_scaling_factor=2.5))
    found.append(GateRule(n_experts=n_experts, top_k=min(2, n_experts), score_scope="topk", renormalize=False))
    return found


def check(rule: GateRule, x: torch.Tensor, weight: torch.Tensor, vectors: list[torch.Tensor | None]) -> None:
    on_device = [None if vector is None else vector.to(DEVICE) for vector in vectors]
    logits, weights, ids = (
        tensor.cpu() for tensor in triton_gate.gate_rows(x.to(DEVICE), weight.to(DEVICE), rule, *on_device)
    )
    wanted = x.double() @ weight.double().T + (0 if vectors[0] is None else vectors[0].double())
    torch.testing.assert_close(logits, wanted.float(), rtol=0, atol=1e-5, equal_nan=True)
    wanted_weights, wanted_ids = select(logits, rule, vectors[1], vectors[2])
    assert torch.equal(ids, wanted_ids), (rule, ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-6, atol=1e-6, equal_nan=True)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    n_right = 0
    for n_experts in (5, 8, 60):
        x = torch.randn(19, 70, generator=generator)
        weight = torch.randn(n_experts, 70, generator=generator) * 70**-0.5
        bias = torch.randn(n_experts, generator=generator) * 0.3
        scale = torch.rand(n_experts, generator=generator) + 0.5
        for rule, vectors in itertools.product(rules(n_experts), ([None] * 3, [bias, bias, scale])):
            check(rule, x, weight, vectors)
            n_right += 1
    rule = GateRule(n_experts=8, top_k=3)
    same = torch.ones(8, 16)
    check(rule, torch.ones(4, 16), same, [None] * 3)  # all equal: the lower indices
    check(rule, torch.ones(4, 16, dtype=torch.bfloat16), -same, [None] * 3)
    bias = torch.tensor([0.0, float("-inf"), 1.0] + [float("-inf")] * 5)
    check(rule, torch.zeros(2, 16), same, [bias, None, None])  # fewer finite ones than are chosen
    lost = torch.zeros(3, 16)
    lost[1, 0] = float("nan")
    check(rule, lost, same, [None] * 3)
    sys.stdout.write(f"{n_right + 4} right on {DEVICE}\n")


if __name__ == "__main__":
    main()
