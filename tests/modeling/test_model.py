"""LayaForCausalLM as transformers sees it: made, trained, saved, loaded, generating."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from laya.modeling import LayaConfig, LayaForCausalLM, LayaRouter

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


def small(**kwargs: object) -> LayaConfig:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    return LayaConfig(**sizes | kwargs)


@pytest.fixture
def model() -> LayaForCausalLM:
    torch.manual_seed(0)
    return LayaForCausalLM(small(router_options={"has_choice_bias": True})).eval()


def test_saved_model_comes_back_by_its_type_and_answers_the_same(model: LayaForCausalLM, tmp_path: Path) -> None:
    model.model.layers[1].mlp.gate.choice_bias[3] = 0.5
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "laya"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is LayaForCausalLM
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    arguments = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(PROMPT, **arguments), loaded.generate(PROMPT, **arguments))
    router = LayaRouter.from_pretrained(tmp_path, layer=1)
    assert torch.equal(router.folded_weight(), model.model.layers[1].mlp.gate.folded_weight())
    assert router.choice_bias is not None and router.choice_bias[3] == 0.5


def test_cache_changes_nothing(model: LayaForCausalLM) -> None:
    with torch.no_grad():
        whole = model(input_ids=PROMPT).logits
        first = model(input_ids=PROMPT[:, :4], use_cache=True)
        rest = model(input_ids=PROMPT[:, 4:], cache=first.cache, use_cache=True)
    torch.testing.assert_close(rest.logits, whole[:, 4:], rtol=1e-4, atol=1e-5)


def test_router_logits_are_recorded_raw_for_each_layer(model: LayaForCausalLM) -> None:
    with torch.no_grad():
        logits = model(input_ids=PROMPT, output_router_logits=True).router_logits
    assert [layer.shape for layer in logits] == [(12, 8), (12, 8)]
    assert all((layer.sum(dim=-1) - 1).abs().min() > 1e-3 for layer in logits)
    assert model(input_ids=PROMPT).router_logits is None


def test_loss_of_training_has_the_routers_part_unasked(model: LayaForCausalLM) -> None:
    out = model.train()(input_ids=PROMPT, labels=PROMPT)
    plain = model.eval()(input_ids=PROMPT, labels=PROMPT)
    assert out.aux_loss is not None and out.aux_loss > 0 and plain.aux_loss is None
    torch.testing.assert_close(out.loss - out.aux_loss, plain.loss, rtol=1e-4, atol=1e-4)
    out.loss.backward()
    gate = model.model.layers[0].mlp.gate
    assert gate.projection.grad.abs().sum() > 0 and gate.expert_embeddings.grad.abs().sum() > 0


def test_balance_loss_is_one_a_layer_where_use_is_even() -> None:
    model = LayaForCausalLM(small(router_aux_loss_coef=1.0, router_z_loss_coef=0.0))
    logits = torch.cat([torch.eye(8), torch.eye(8).roll(1, 1)])
    logits = logits + logits.roll(2, 1)
    even = model.balance_loss((logits, logits))
    assert even.item() == pytest.approx(1.0, abs=1e-5)
    skewed = logits.clone()
    skewed[:, 0] += 9
    assert model.balance_loss((logits, skewed)) > 1.5, "one layer's skew is not averaged away"


def test_every_experts_implementation_gives_the_same(model: LayaForCausalLM) -> None:
    with torch.no_grad():
        wanted = model(input_ids=PROMPT).logits
        for name in ("eager", "batched_mm", "grouped_mm"):
            model.set_experts_implementation(name)
            torch.testing.assert_close(model(input_ids=PROMPT).logits, wanted, rtol=1e-4, atol=1e-5)


def test_wrong_router_keys_are_told() -> None:
    with pytest.raises(ValueError, match="no router is registered as 'linaer'"):
        LayaForCausalLM(small(router_type="linaer"))
    with pytest.raises(ValueError, match="top_k is 9; with 8 experts"):
        LayaForCausalLM(small(num_experts_per_tok=9))
