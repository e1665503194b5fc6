"""Owns: what keeps the use of a router's experts even: losses, and the bias update that needs none.

Everything is of one layer, as the measures are (`Balance`, which needs no torch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from laya.experts.balance import Balance as Balance
from laya.modeling.router import LayaRouter


def expert_counts(expert_ids: Tensor, n_experts: int, mask: Tensor | None = None) -> Tensor:
    """[n_experts] float32: how many of the assignments [n, top_k] each expert got. mask: [n], true where it counts."""
    ids = expert_ids.reshape(-1, expert_ids.shape[-1]).long()
    if mask is not None:
        ids = ids[mask.reshape(-1).bool()]
    return torch.bincount(ids.flatten(), minlength=n_experts).float()


def load_balancing_loss(logits: Tensor, expert_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Switch Transformer's auxiliary loss (arXiv 2101.03961, eq. 4-6): n_experts * sum of f_i * P_i; 1 is even.

    logits: [n, n_experts], raw; expert_ids: [n, top_k]. f_i: share of the assignments, whatever top_k
    is; P_i: mean probability over all experts' softmax, through which the gradient flows. In float32.
    """
    n_experts = logits.shape[-1]
    counts = expert_counts(expert_ids, n_experts, mask)
    probabilities = logits.reshape(-1, n_experts).float().softmax(dim=-1)
    if mask is not None:
        probabilities = probabilities[mask.reshape(-1).bool()]
    return n_experts * (counts / counts.sum().clamp(min=1) * probabilities.mean(dim=0)).sum()


def router_z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of logsumexp(logits)**2 (ST-MoE, arXiv 2202.08906, eq. 5): keeps logits small. logits: [n, n_experts]."""
    sizes = torch.logsumexp(logits.reshape(-1, logits.shape[-1]).float(), dim=-1) ** 2
    return sizes.mean() if mask is None else sizes[mask.reshape(-1).bool()].mean()


@torch.no_grad()
def update_choice_bias(router: LayaRouter, counts: Tensor, rate: float = 1e-3) -> None:
    """Loss-free balancing (arXiv 2408.15664): once a step, the bias of who had less than the mean grows by `rate`.

    counts: [n_experts] of the whole step, training forwards only. The mean of the bias stays 0. Raises ValueError where
    the router has no choice bias.
    """
    if router.choice_bias is None:
        raise ValueError("this router has no choice bias: make it with has_choice_bias=True")
    bias = router.choice_bias + rate * torch.sign(counts.mean() - counts).to(router.choice_bias)
    router.choice_bias.copy_(bias - bias.mean())
