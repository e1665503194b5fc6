"""Routers of other families' checkpoints give what those families' own code in transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from laya.modeling import LayaRouter

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 12, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen2_moe": {"num_experts": 12, "norm_topk_prob": False, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 16, "norm_topk_prob": False, "num_key_value_heads": 4},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 8},
}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of random weights, biases included, and the folder that transformers saved it in."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(request.param, **SMALL | FAMILIES[request.param])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if ".gate." in name or ".router." in name:
            torch.nn.init.normal_(tensor, std=0.5)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def reference(model: Any, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mlp = model.model.layers[layer].mlp
    module = mlp.gate if hasattr(mlp, "gate") else mlp.router
    with torch.no_grad():
        logits, weights, ids = module(x)
    order = weights.argsort(dim=-1, descending=True)
    return logits, weights.gather(-1, order), ids.gather(-1, order)


@pytest.mark.parametrize("layer", [None, 2])
def test_ids_and_weights_are_the_familys_own(saved: tuple[Any, Path], layer: int | None) -> None:
    model, folder = saved
    router = LayaRouter.from_pretrained(folder, layer=layer)
    first = next(index for index in range(3) if "Router" in str(model.model.layers[index].mlp))
    x = torch.randn(200, 32)
    logits, weights, ids = reference(model, first if layer is None else layer, x)
    out = router(x)
    torch.testing.assert_close(out.logits, logits, rtol=0, atol=1e-5)
    order = out.weights.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(out.expert_ids.gather(-1, order).long(), ids)
    torch.testing.assert_close(out.weights.gather(-1, order), weights, rtol=0, atol=1e-6)


def test_articles_snippet_runs(saved: tuple[Any, Path]) -> None:
    router = LayaRouter.from_pretrained(str(saved[1]))
    out = router(torch.randn(1, 128, router.hidden_size))
    assert out.weights.shape == out.expert_ids.shape == (1, 128, 3)


def test_file_alone_is_enough_beside_its_config(saved: tuple[Any, Path]) -> None:
    file = next(saved[1].glob("*.safetensors"))
    assert torch.equal(LayaRouter.from_pretrained(file).weight, LayaRouter.from_pretrained(saved[1]).weight)


def test_layer_without_experts_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **SMALL, "num_local_experts": 8}))
    save_file({"model.layers.1.block_sparse_moe.gate.weight": torch.zeros(8, 32)}, tmp_path / "model.safetensors")
    assert LayaRouter.from_pretrained(tmp_path).hidden_size == 32
    with pytest.raises(ValueError, match=r"layer 0 of .* has no expert router; layers with one: 1 to 1"):
        LayaRouter.from_pretrained(tmp_path, layer=0)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        LayaRouter.from_pretrained(tmp_path)
    save_file({"model.layers.0.mlp.gate.weight": torch.zeros(8, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        LayaRouter.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type is 'llama'; routers are known of deepseek_v3"):
        LayaRouter.from_pretrained(tmp_path)
    config = {"model_type": "qwen3_moe", "num_experts": 9, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"8 rows, but config\.json says 9 experts"):
        LayaRouter.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file"):
        LayaRouter.from_pretrained(tmp_path)
