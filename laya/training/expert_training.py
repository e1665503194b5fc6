"""Owns: the training of an upcycled model's experts on text, so that they come to differ; everything else stays.

Each expert gets the gradient of the tokens that chose it. A tensor is updated, and its gradient dropped, as soon as
that is there (Adafactor, whose state is of rows and columns): no more than one layer's gradients are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from laya.modeling.balance import expert_counts
from laya.modeling.model import LayaForCausalLM

_LEARNING_RATE = 5e-4  # of a tensor's own size: Adafactor scales by it


def load_for_training(folder: Path) -> LayaForCausalLM:
    """In float32, only its experts trainable."""
    model = LayaForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(True)
    trainable: LayaForCausalLM = model.eval()
    return trainable


def train_experts(
    model: LayaForCausalLM, windows: Tensor, n_steps: int, seed: int, on_step: Callable[[int, int | None, str], None]
) -> None:
    """A window a step, drawn anew whenever all were had. windows: ids, [windows, tokens].

    on_step: gets how many are done, of how many, and the loss in words.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers: dict[Tensor, Any] = {p: torch.optim.Adafactor([p], lr=_LEARNING_RATE) for p in trained}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in trained]
    draw = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(n_steps):
        order = order or torch.randperm(len(windows), generator=draw).tolist()
        ids = windows[order.pop()][None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        on_step(step + 1, n_steps, f"loss {float(loss.detach()):.3f}")
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def measure(model: LayaForCausalLM, windows: Tensor) -> tuple[float, list[Tensor]]:
    """Loss, nats a token, and each layer's assignments, [n_experts], of windows [windows, tokens]."""
    rule = model.config.gate_rule
    losses: list[Tensor] = []
    counts = [torch.zeros(rule.n_experts) for _ in model.model.layers]
    for ids in windows:
        out = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
        losses.append(functional.cross_entropy(out.logits[0, :-1].double(), ids[1:]))
        for of_layer, logits in zip(counts, out.router_logits, strict=True):
            chosen = logits.reshape(-1, rule.n_experts).topk(rule.top_k, dim=-1).indices
            of_layer += expert_counts(chosen, rule.n_experts)
    return float(torch.stack(losses).mean()), counts
