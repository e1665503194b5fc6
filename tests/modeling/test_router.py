"""The router as a module: folded for inference, differentiated for training, compiled, custom ones by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laya.modeling import ExpertRouter, GateRule, LayaRouter, RouterOutput, make_router, register_router

RULE = GateRule(n_experts=8, top_k=2)


@pytest.fixture
def router() -> LayaRouter:
    torch.manual_seed(0)
    return LayaRouter(96, RULE, projection_size=24, has_logit_bias=True, has_choice_bias=True).eval()


def test_inference_is_what_training_computes(router: LayaRouter) -> None:
    nn.init.normal_(router.logit_bias)
    x = torch.randn(2, 7, 96)
    trained = router.train()(x)
    with torch.inference_mode():
        served = router.eval()(x)
    assert served.weights.shape == (2, 7, 2) and served.expert_ids.dtype is torch.int32
    assert torch.equal(served.expert_ids, trained.expert_ids)
    torch.testing.assert_close(served.weights, trained.weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(served.logits, trained.logits, rtol=0, atol=1e-5)


def test_fold_follows_the_parameters(router: LayaRouter) -> None:
    x = torch.randn(4, 96)
    with torch.no_grad():
        before = router(x).logits
        assert router.folded_weight() is router.folded_weight()
        router.expert_embeddings.mul_(2)
        torch.testing.assert_close(router(x).logits, before * 2)
        router.load_state_dict({name: value / 2 for name, value in router.state_dict().items()})
        torch.testing.assert_close(router(x).logits, before / 2)


def test_router_that_is_made_in_inference_mode_routes() -> None:
    with torch.inference_mode():
        router = LayaRouter(32, RULE, projection_size=8).eval()
        x = torch.randn(4, 32)
        before = router(x).logits
        router.expert_embeddings.mul_(2)
        torch.testing.assert_close(router(x).logits, before * 2)


def test_every_parameter_gets_a_gradient(router: LayaRouter) -> None:
    out = router.train()(torch.randn(16, 96))
    (out.weights[:, 0] * torch.arange(16.0)).sum().backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_choice_bias_moves_the_choice_and_not_the_weight(router: LayaRouter) -> None:
    x = torch.randn(64, 96)
    router.choice_bias[5] = 100.0
    with torch.no_grad():
        out = router(x)
    assert (out.expert_ids[:, 0] == 5).all()
    chosen = out.logits.softmax(-1).gather(-1, out.expert_ids.long())
    torch.testing.assert_close(out.weights, chosen / chosen.sum(-1, keepdim=True))


def test_jitter_is_for_training_alone() -> None:
    router = LayaRouter(32, GateRule(n_experts=4, top_k=1, jitter=0.1))
    x = torch.randn(8, 32)
    assert not torch.equal(router.train()(x).logits, router(x).logits)
    with torch.no_grad():
        assert torch.equal(router.eval()(x).logits, router(x).logits)


def test_compiles_in_one_graph(router: LayaRouter) -> None:
    router.requires_grad_(False)
    x = torch.randn(3, 96)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(x), router(x), strict=True):
        torch.testing.assert_close(got, wanted)


def test_bfloat16_is_routed_in_float32(router: LayaRouter) -> None:
    x = torch.randn(9, 96)
    with torch.no_grad():
        whole = router(x.bfloat16().float())
        half = router(x.bfloat16())
    assert half.logits.dtype is torch.float32
    torch.testing.assert_close(half.logits, whole.logits)


def test_wrong_width_and_wrong_rules_are_named(router: LayaRouter) -> None:
    with pytest.raises(ValueError, match="95 wide; this router takes hidden_size 96"):
        router(torch.randn(1, 95))
    with pytest.raises(ValueError, match="top_k is 9; with 8 experts it must be 1 to 8"):
        GateRule(n_experts=8, top_k=9)
    with pytest.raises(ValueError, match="n_group is 3, which does not divide 8"):
        GateRule(n_experts=8, top_k=2, n_group=3)
    with pytest.raises(ValueError, match="the 1 best groups have 2 experts"):
        GateRule(n_experts=8, top_k=3, n_group=4, topk_group=1)


class _First(ExpertRouter):
    """Always the first experts."""

    def forward(self, hidden_states: torch.Tensor) -> RouterOutput:
        leading = hidden_states.shape[:-1]
        ids = torch.arange(self.rule.top_k, dtype=torch.int32).expand(*leading, -1)
        weights = torch.full(ids.shape, 1 / self.rule.top_k)
        return RouterOutput(torch.zeros(*leading, self.rule.n_experts), weights, ids)


def test_custom_router_is_made_by_its_name() -> None:
    register_router("first", _First)
    register_router("first", _First)
    assert make_router("first", 16, RULE)(torch.randn(2, 16)).expert_ids.tolist() == [[0, 1], [0, 1]]
    with pytest.raises(ValueError, match="'first' is registered already"):
        register_router("first", LayaRouter)
    register_router("none", lambda hidden_size, rule: nn.Linear(hidden_size, rule.n_experts))
    with pytest.raises(TypeError, match=r"'none' is a Linear: make it a subclass of laya\.modeling"):
        make_router("none", 16, RULE)
    with pytest.raises(
        ValueError, match=r"no router is registered as 'frist'; there are .*first, linear, none, projected"
    ):
        make_router("frist", 16, RULE)
