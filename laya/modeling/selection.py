"""Owns: the choice of experts in plain torch operations: the oracle of every kernel, and what is differentiated.

Ties, and rows that are not finite: the lower index is chosen first; a row with a NaN among its logits gives ids
0..top_k-1 and weights NaN. (`torch.topk` promises no order of equal values, and counts NaN as the largest.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from laya.modeling.rule import GateRule


def select(
    logits: Tensor, rule: GateRule, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights [n, top_k] float32, ids [n, top_k] int32) of float32 logits [n, n_experts] with their bias in them.

    choice_bias, expert_scale: [n_experts] float32 or None. Gradients flow through the weights.
    """
    scores = _scores(logits, rule)
    ids = _ids(_choice(logits, scores, rule, choice_bias), rule.top_k)
    if rule.score_scope == "topk":
        weights = functional.softmax(logits.gather(-1, ids), dim=-1)
    else:
        weights = _gathered(logits, scores, ids, rule)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.renorm_eps)
    weights = weights * rule.routed_scaling_factor
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    is_lost = torch.isnan(logits).any(dim=-1, keepdim=True)
    ids = torch.where(is_lost, torch.arange(rule.top_k, device=ids.device), ids)
    weights = torch.where(is_lost, torch.full_like(weights, torch.nan), weights)
    return weights, ids.to(torch.int32)


def _scores(logits: Tensor, rule: GateRule) -> Tensor:
    if rule.score_func == "sigmoid":
        return torch.sigmoid(logits)
    if rule.score_func == "sqrtsoftplus":
        return functional.softplus(logits).sqrt()
    return functional.softmax(logits, dim=-1)


def _gathered(logits: Tensor, scores: Tensor, ids: Tensor, rule: GateRule) -> Tensor:
    # Softmax weights that are divided by their own sum are a softmax over the chosen: it does not underflow.
    if rule.score_func == "softmax" and rule.renormalize and rule.renorm_eps == 0.0:
        return functional.softmax(logits.gather(-1, ids), dim=-1)
    return scores.gather(-1, ids)


def _choice(logits: Tensor, scores: Tensor, rule: GateRule, choice_bias: Tensor | None) -> Tensor:
    """What is ranked. By logits where that is the same order: scores underflow and saturate, logits do not."""
    choice = logits
    if choice_bias is not None:
        choice = scores + choice_bias
    elif rule.is_grouped and rule.group_score == "sum_top2":
        choice = scores
    if not rule.is_grouped:
        return choice
    groups = choice.unflatten(-1, (rule.n_group, -1))
    if rule.group_score == "sum_top2":
        group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    else:
        group_scores = groups.amax(dim=-1)
    best = _ids(group_scores, rule.topk_group)
    stays = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, best, True)
    return groups.masked_fill(~stays.unsqueeze(-1), -torch.inf).flatten(-2)


def _ids(values: Tensor, n_best: int) -> Tensor:
    return torch.sort(values.detach(), dim=-1, descending=True, stable=True).indices[..., :n_best]
