"""What counts as even, and what makes it so."""

from __future__ import annotations

import pytest
import torch

from laya.experts.balance import Balance
from laya.modeling import GateRule, LayaRouter
from laya.modeling.balance import expert_counts, load_balancing_loss, router_z_loss, update_choice_bias

RULE = GateRule(n_experts=8, top_k=2)


def test_loss_is_one_where_it_is_even_and_n_experts_where_one_has_all() -> None:
    ids = torch.arange(8).view(4, 2)
    assert load_balancing_loss(torch.zeros(4, 8), ids).item() == pytest.approx(1.0)
    skewed = torch.full((4, 8), -50.0)
    skewed[:, 3] = 50.0
    assert load_balancing_loss(skewed, torch.full((4, 1), 3)).item() == pytest.approx(8.0)


def test_skew_costs_more_and_the_gradient_lessens_it() -> None:
    logits = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    logits[:, 0] += 2
    logits.requires_grad_(True)
    loss = load_balancing_loss(logits, logits.topk(2).indices)
    loss.backward()
    assert loss > 1.2 and logits.grad is not None
    assert logits.grad[:, 0].sum() > 0 > logits.grad[:, 1:].sum()


def test_padding_does_not_count() -> None:
    logits, ids = torch.randn(6, 8), torch.tensor([[0, 1]] * 3 + [[2, 3]] * 3)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    assert expert_counts(ids, 8, mask).tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    torch.testing.assert_close(load_balancing_loss(logits, ids, mask), load_balancing_loss(logits[:3], ids[:3]))
    torch.testing.assert_close(router_z_loss(logits, mask), router_z_loss(logits[:3]))


def test_z_loss_is_of_raw_logits_in_float32() -> None:
    assert router_z_loss(torch.zeros(3, 8, dtype=torch.bfloat16)).item() == pytest.approx(torch.tensor(8.0).log() ** 2)


def test_bias_update_makes_use_even_without_a_loss() -> None:
    torch.manual_seed(0)
    router = LayaRouter(16, RULE, has_choice_bias=True).eval()
    router.weight.data[2] *= 6  # loved by half of the tokens
    x = torch.randn(4000, 16)
    with torch.no_grad():
        before = Balance.of(expert_counts(router(x).expert_ids, 8))
        for rate in [1e-3] * 400 + [1e-4] * 200:
            update_choice_bias(router, expert_counts(router(x).expert_ids, 8), rate)
        after = Balance.of(expert_counts(router(x).expert_ids, 8))
    assert router.choice_bias is not None and router.choice_bias.mean().abs() < 1e-6
    assert before.max_vio > 0.5 and after.max_vio < 0.1
    with pytest.raises(ValueError, match="no choice bias"):
        update_choice_bias(LayaRouter(16, RULE), torch.ones(8))


def test_measures_of_even_of_the_bands_edge_and_of_one_expert_alone() -> None:
    even = Balance.of(torch.full((8,), 10))
    assert (even.max_vio, even.cv, even.n_dead) == (0, 0, 0) and even.entropy == pytest.approx(1) and even.gini == 0
    edge = Balance.of(torch.tensor([10, 15] * 4))
    assert edge.max_vio == pytest.approx(0.2) and edge.cv == pytest.approx(0.2) and edge.gini == pytest.approx(0.1)
    assert 0.98 < edge.entropy < 1
    alone = Balance.of(torch.tensor([0, 7, 0, 0]))
    assert (alone.max_vio, alone.n_dead, alone.entropy, alone.gini) == (3, 3, 0, 0.75)
    with pytest.raises(ValueError, match="no assignment"):
        Balance.of(torch.zeros(4))
