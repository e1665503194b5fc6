"""The example of a router of one's own: trained, saved, loaded, its logits recorded as those of Laya's are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from laya.modeling import LayaConfig, LayaForCausalLM
from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "custom_router.py"


def test_example_trains_and_its_model_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    example["main"](2)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["step 0", "step 1", "layer 0", "layer 1"]

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LayaForCausalLM(
        LayaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, router_type="cosine")
    ).eval()
    assert type(model.model.layers[0].mlp.gate).__name__ == "CosineRouter"
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(input_ids=tokens, output_router_logits=True)
        assert [logits.shape for logits in wanted.router_logits] == [(12, 4), (12, 4)]
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=tokens).logits, wanted.logits)
