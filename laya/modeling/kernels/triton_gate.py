# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Owns: the gate on a GPU, in Triton: linear layer, choice and weights of a block of tokens in one program.

A token's logits stay in registers. The best expert is found k times by one reduction over keys that are ordered as the
values are and, among equal ones, by the lower index; then it is out of the running. Groups of experts are left to plain
torch operations. Without a GPU the tests run it in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laya.modeling.rule import GateRule

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST_DOT = 16
_TAKEN = tl.constexpr(-(1 << 63))
_SOFTPLUS_IS_LINEAR_ABOVE = tl.constexpr(20.0)  # as torch


@triton.jit
def _score(logits, SCORE: tl.constexpr):
    if SCORE == 1:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        soft = tl.log(1.0 + tl.exp(tl.minimum(logits, _SOFTPLUS_IS_LINEAR_ABOVE)))
        return tl.sqrt(tl.where(logits > _SOFTPLUS_IS_LINEAR_ABOVE, logits, soft))


@triton.jit
def _gate(
    x_at,
    weight_at,
    logit_bias_at,
    choice_bias_at,
    scale_at,
    logits_at,
    weights_at,
    ids_at,
    n_tokens,
    hidden,
    renorm_eps,
    scaling,
    N_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    OVER_TOP_K: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_token, is_expert = tokens < n_tokens, experts < N_EXPERTS
    logits = tl.zeros((BLOCK_TOKENS, BLOCK_EXPERTS), dtype=tl.float32)
    for start in range(0, hidden, BLOCK_HIDDEN):
        columns = start + tl.arange(0, BLOCK_HIDDEN)
        is_column = columns < hidden
        x = tl.load(
            x_at + tokens[:, None].to(tl.int64) * hidden + columns[None, :],
            mask=is_token[:, None] & is_column[None, :],
            other=0.0,
        )
        rows = tl.load(
            weight_at + experts[:, None] * hidden + columns[None, :],
            mask=is_expert[:, None] & is_column[None, :],
            other=0.0,
        )
        logits += tl.dot(x.to(tl.float32), tl.trans(rows), input_precision="ieee")
    if logit_bias_at is not None:
        logits += tl.load(logit_bias_at + experts, mask=is_expert, other=0.0)[None, :]
    place = tokens[:, None].to(tl.int64) * N_EXPERTS + experts[None, :]
    tl.store(logits_at + place, logits, mask=is_token[:, None] & is_expert[None, :])

    is_lost = tl.max(tl.where(is_expert[None, :] & (logits != logits), 1, 0), axis=1) > 0
    logits = tl.where(is_expert[None, :] & (logits == logits), logits, float("-inf"))
    largest = tl.max(logits, axis=1)[:, None]
    total = tl.sum(tl.exp(logits - largest), axis=1)[:, None]
    choice = logits
    if choice_bias_at is not None:
        scores = tl.exp(logits - largest) / total if SCORE == 0 else _score(logits, SCORE)
        choice = scores + tl.load(choice_bias_at + experts, mask=is_expert, other=0.0)[None, :]
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # -0 is equal to 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    keys = tl.where(is_expert[None, :], (ordered << 32) | (0x7FFFFFFF - experts[None, :]), _TAKEN)

    ranks = tl.arange(0, BLOCK_K)
    chosen_logits = tl.full((BLOCK_TOKENS, BLOCK_K), float("-inf"), dtype=tl.float32)
    ids = tl.zeros((BLOCK_TOKENS, BLOCK_K), dtype=tl.int32)
    for rank in tl.static_range(TOP_K):
        best = 0x7FFFFFFF - (tl.max(keys, axis=1) & 0x7FFFFFFF).to(tl.int32)
        is_best = experts[None, :] == best[:, None]
        logit = tl.max(tl.where(is_best, logits, float("-inf")), axis=1)
        chosen_logits = tl.where(ranks[None, :] == rank, logit[:, None], chosen_logits)
        ids = tl.where(ranks[None, :] == rank, best[:, None], ids)
        keys = tl.where(is_best, _TAKEN, keys)

    is_rank = ranks < TOP_K
    if SCORE == 0:
        if OVER_TOP_K or (RENORMALIZES and renorm_eps == 0.0):
            powers = tl.exp(chosen_logits - tl.max(chosen_logits, axis=1)[:, None])
            weights = powers / tl.sum(powers, axis=1)[:, None]
        else:
            weights = tl.exp(chosen_logits - largest) / total
    else:
        weights = _score(chosen_logits, SCORE)
    weights = tl.where(is_rank[None, :], weights, 0.0)
    if RENORMALIZES:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + renorm_eps)
    weights = weights * scaling
    if scale_at is not None:
        weights = weights * tl.load(scale_at + ids)
    weights = tl.where(is_lost[:, None], float("nan"), weights)
    ids = tl.where(is_lost[:, None], ranks[None, :], ids)
    place = tokens[:, None].to(tl.int64) * TOP_K + ranks[None, :]
    is_wanted = is_token[:, None] & is_rank[None, :]
    tl.store(weights_at + place, weights, mask=is_wanted)
    tl.store(ids_at + place, ids, mask=is_wanted)


def can_take(x: Tensor, weight: Tensor, rule: GateRule) -> bool:
    """Whether the kernel reads these tensors as they are, and its rule."""
    return (
        x.dtype in _INPUTS
        and weight.dtype is torch.float32
        and x.is_contiguous()
        and weight.is_contiguous()
        and not rule.is_grouped
    )


def gate_rows(
    x: Tensor,
    weight: Tensor,
    rule: GateRule,
    logit_bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [n, n_experts] float32, weights [n, top_k] float32, ids [n, top_k] int32) of x [n, hidden].

    x: float32, bfloat16 or float16; the others float32, all on one device and contiguous. No gradient.
    """
    n_tokens, hidden = x.shape
    logits = torch.empty(n_tokens, rule.n_experts, dtype=torch.float32, device=x.device)
    weights = torch.empty(n_tokens, rule.top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(n_tokens, rule.top_k, dtype=torch.int32, device=x.device)
    block_tokens = _SMALLEST_DOT
    _gate[(triton.cdiv(n_tokens, block_tokens),)](
        x,
        weight,
        logit_bias,
        choice_bias,
        expert_scale,
        logits,
        weights,
        ids,
        n_tokens,
        hidden,
        rule.renorm_eps,
        rule.routed_scaling_factor,
        N_EXPERTS=rule.n_experts,
        TOP_K=rule.top_k,
        SCORE=_SCORES.index(rule.score_func),
        OVER_TOP_K=rule.score_scope == "topk",
        RENORMALIZES=rule.renormalize,
        BLOCK_TOKENS=block_tokens,
        BLOCK_EXPERTS=max(_SMALLEST_DOT, triton.next_power_of_2(rule.n_experts)),
        BLOCK_HIDDEN=min(128, max(_SMALLEST_DOT, triton.next_power_of_2(hidden))),
        BLOCK_K=triton.next_power_of_2(rule.top_k),
    )
    return logits, weights, ids
