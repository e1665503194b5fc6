"""Owns: the rule by which an expert router turns logits into experts and weights: the union of what families do.

Knows no tensors: the vectors that a rule needs (biases, scales) belong to the router. Order, for each token:

    logits  = x @ W.T + logit_bias
    scores  = score_func(logits), over all experts or (softmax only) over the chosen ones
    choice  = logits, or scores + choice_bias; -inf outside the `topk_group` best of `n_group` groups
    ids     = the top_k largest of choice, the lower index first where two are equal
    weights = scores[ids]; / (their sum + renorm_eps); * routed_scaling_factor; * per_expert_scale[ids]
"""

from __future__ import annotations

from typing import Literal

import msgspec

ScoreFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "sum_top2"]


class GateRule(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One family's convention. Raises ValueError where it cannot be followed."""

    n_experts: int
    top_k: int
    score_func: ScoreFunc = "softmax"
    score_scope: Literal["all", "topk"] = "all"
    renormalize: bool = True
    renorm_eps: float = 0.0
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "max"
    weight_on: Literal["output", "input"] = "output"
    """What the weights multiply: an expert's output, or (Llama 4) its input. For who applies them."""
    jitter: float = 0.0
    """While training, x is multiplied by what is drawn from 1 - jitter .. 1 + jitter."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k is {self.top_k}; with {self.n_experts} experts it must be 1 to {self.n_experts}")
        if self.n_experts % self.n_group:
            raise ValueError(f"n_group is {self.n_group}, which does not divide {self.n_experts} experts")
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"topk_group is {self.topk_group}; with {self.n_group} groups it must be 1 to {self.n_group}"
            )
        n_choosable = self.topk_group * (self.n_experts // self.n_group)
        if self.top_k > n_choosable:
            raise ValueError(f"top_k is {self.top_k}, but the {self.topk_group} best groups have {n_choosable} experts")
        if self.score_scope == "topk" and self.score_func != "softmax":
            raise ValueError(f"score_scope 'topk' means something for softmax only, not for {self.score_func}")

    @property
    def is_grouped(self) -> bool:
        return self.topk_group < self.n_group
