"""The native gate chooses and weighs as the oracle in plain torch does, for every rule and row."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from laya.modeling import GateRule
from laya.modeling.kernels import cpu
from laya.modeling.selection import select

N_TOKENS = 37  # no multiple of what a thread takes at a time
EXPERTS = (2, 3, 8, 17, 64, 160, 512)
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
if cpu.AVAILABLE:
    from laya._core import gate_instructions, gate_instructions_here, use_gate_instructions
pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="NOT RUN: no native core here")


def equal(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-6, atol=1e-6, equal_nan=True)


def vectors(n_experts: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_experts, generator=generator) * 0.3, torch.rand(n_experts, generator=generator) + 0.5


def rules(n_experts: int) -> list[GateRule]:
    """Each score function, scope and norm, with and without groups, for several k."""
    groups: list[dict[str, Any]] = [{}]
    if n_experts % 8 == 0 and n_experts >= 16:
        groups += [{"n_group": 8, "topk_group": 3, "group_score": score} for score in ("max", "sum_top2")]
    found = []
    for score, renormalize, group, k in itertools.product(
        SCORES, (True, False), groups, {1, 2, min(8, n_experts), n_experts}
    ):
        if group and k > 3 * (n_experts // 8):
            continue
        rule = {"n_experts": n_experts, "top_k": k, "score_func": score, "renormalize": renormalize} | group
        found.append(GateRule(**rule, renorm_eps=1e-20 if score == "sigmoid" else 0.0, routed_scaling_factor=1.5))
        if score == "softmax":
            found.append(GateRule(**rule, score_scope="topk"))
    return found


@pytest.mark.parametrize("n_experts", EXPERTS)
def test_choice_is_the_oracles_for_every_rule(n_experts: int) -> None:
    generator = torch.Generator().manual_seed(n_experts)
    logits = torch.randn(N_TOKENS, n_experts, generator=generator) * 3
    bias, scale = vectors(n_experts, 1)
    for rule, choice_bias, expert_scale in itertools.product(rules(n_experts), (None, bias), (None, scale)):
        equal(cpu.select_rows(logits, rule, choice_bias, expert_scale), select(logits, rule, choice_bias, expert_scale))


@pytest.mark.parametrize("score", SCORES)
def test_equal_values_go_to_the_lower_index(score: Any) -> None:
    rule = GateRule(n_experts=8, top_k=3, score_func=score)
    logits = torch.tensor([[1.0] * 8, [0, 1, 0, 1, 0, 1, 0, 1], [0.0, -0.0, 0.0, -0.0, -1, -1, -1, -1], [-200.0] * 8])
    ids = cpu.select_rows(logits, rule)[1]
    assert ids.tolist() == [[0, 1, 2], [1, 3, 5], [0, 1, 2], [0, 1, 2]]
    equal(cpu.select_rows(logits, rule), select(logits, rule))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_rows_that_are_not_finite_are_defined(score: Any, renormalize: bool) -> None:
    rule = GateRule(n_experts=4, top_k=2, score_func=score, renormalize=renormalize)
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, 1, -inf, -inf], [-inf, -inf, 2, 1], [nan, 1, 2, 3], [1, 2, 3, nan], [-inf] * 4, [-3, -2, -4, -1]]
    logits = torch.tensor(rows)
    weights, ids = cpu.select_rows(logits, rule)
    equal((weights, ids), select(logits, rule))
    assert ids.tolist() == [[1, 0], [2, 3], [0, 1], [0, 1], [0, 1], [3, 1]]
    assert weights[2:4].isnan().all()
    assert not weights[[0, 1, 5]].isnan().any()


def test_softmax_ranks_what_underflows() -> None:
    rule = GateRule(n_experts=4, top_k=3, renormalize=False)
    assert cpu.select_rows(torch.tensor([[0.0, -300.0, -200.0, -250.0]]), rule)[1].tolist() == [[0, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_tokens", "hidden", "n_experts"), [(1, 64, 8), (37, 100, 5), (128, 4096, 8), (50, 2051, 64)]
)
def test_logits_are_those_of_the_matrix_product(dtype: torch.dtype, n_tokens: int, hidden: int, n_experts: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(n_tokens, hidden, generator=generator).to(dtype)
    weight = torch.randn(n_experts, hidden, generator=generator) * hidden**-0.5
    bias = torch.randn(n_experts, generator=generator)
    rule = GateRule(n_experts=n_experts, top_k=2)
    logits, weights, ids = cpu.gate_rows(x, weight, rule, bias)
    wanted = (x.double() @ weight.double().T + bias.double()).float()
    torch.testing.assert_close(logits, wanted, rtol=0, atol=4e-6)
    equal((weights, ids), select(logits, rule))


def test_threads_give_what_one_thread_gives() -> None:
    x, weight, rule = torch.randn(600, 2048), torch.randn(16, 2048), GateRule(n_experts=16, top_k=4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu.gate_rows(x, weight, rule)
        torch.set_num_threads(4)
        for _ in range(20):
            for got, wanted in zip(cpu.gate_rows(x, weight, rule), alone, strict=True):
                assert torch.equal(got, wanted)
    finally:
        torch.set_num_threads(before)


def test_op_is_right_by_torchs_own_checks() -> None:
    x, weight = torch.randn(5, 64), torch.randn(8, 64)
    args = (x, weight, None, None, None, 2, 0, False, True, 0.0, 1.0, 1, 1, 0)
    torch.library.opcheck(torch.ops.laya.gate.default, args, test_utils=("test_schema", "test_faketensor"))
    rule = GateRule(n_experts=8, top_k=2)
    for got, wanted in zip(cpu.gate_op(x, weight, rule), cpu.gate_rows(x, weight, rule), strict=True):
        assert torch.equal(got, wanted)


def test_results_of_one_token_are_its_callers_own() -> None:
    """More of them than are made at a time, held while others are made."""
    rule, weight = GateRule(n_experts=8, top_k=2), torch.randn(8, 64)
    x = torch.randn(150, 1, 64)
    with torch.inference_mode():
        held = [cpu.gate_rows(token, weight, rule) for token in x]
    logits, weights, ids = (torch.cat(parts) for parts in zip(*held, strict=True))
    torch.testing.assert_close(logits, x[:, 0] @ weight.T)
    equal((weights, ids), select(logits, rule))
    scale = torch.ones(1, requires_grad=True)
    (cpu.gate_rows(x[0], weight, rule)[1] * scale).sum().backward()
    assert scale.grad == pytest.approx(1.0)


@pytest.mark.parametrize(("n_experts", "top_k"), [(8, 2), (7, 3), (5, 1), (64, 6)])
def test_results_of_one_token_lie_where_compiled_code_expects_them(n_experts: int, top_k: int) -> None:
    """torch.compile's code ends on a result of an op that does not begin at a multiple of 16 bytes."""
    rule, weight, x = GateRule(n_experts=n_experts, top_k=top_k), torch.randn(n_experts, 32), torch.randn(5, 1, 32)
    wanted = cpu.gate_rows(x[:, 0], weight, rule)
    for token, *rows in zip(x, *wanted, strict=True):
        for got, row in zip(cpu.gate_op(token, weight, rule), rows, strict=True):
            assert got.data_ptr() % 16 == 0
            torch.testing.assert_close(got[0], row)


def test_every_kind_of_instructions_gives_the_same_choice() -> None:
    x, weight, rule = torch.randn(20, 300), torch.randn(8, 300), GateRule(n_experts=8, top_k=2)
    best = gate_instructions()
    assert gate_instructions_here()[0] == best and gate_instructions_here()[-1] == "baseline"
    try:
        for name in gate_instructions_here():
            use_gate_instructions(name)
            assert gate_instructions() == name
            logits, weights, ids = cpu.gate_rows(x, weight, rule)
            torch.testing.assert_close(logits, x @ weight.T, rtol=0, atol=1e-4)
            equal((weights, ids), select(logits, rule))
    finally:
        use_gate_instructions(best)
    with pytest.raises(ValueError, match="no such instructions: sse9"):
        use_gate_instructions("sse9")
