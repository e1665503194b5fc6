"""Owns: the native core's gate kernel for torch: by address, and as the op `torch.ops.laya.gate`, which compiles.

`gate_rows` is what inference calls: no dispatcher stands between, which for one token costs more than the kernel.
"""

from __future__ import annotations

import atexit
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from laya.modeling.rule import GateRule

try:
    from laya._core import Gate
except ImportError:
    Gate = None  # type: ignore[assignment, misc]

AVAILABLE = Gate is not None
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_GROUP_SCORES = ("max", "sum_top2")
_BFLOAT16 = torch.bfloat16
_INPUTS = (torch.float32, _BFLOAT16)
_is_inference = torch.is_inference_mode_enabled
_Outputs = tuple[Tensor, Tensor, Tensor]


def _padded(n_values: int) -> int:
    """To 16 bytes, from a multiple of which compiled code expects the results of an op to begin."""
    return -(-n_values // 4) * 4


class _FreshRows:
    """Results of one token, made many at a time: making three tensors takes as long as choosing the experts."""

    N_AT_A_TIME = 64

    def __init__(self, n_experts: int, top_k: int) -> None:
        self._sizes = (n_experts, top_k)
        self.left: list[tuple[_Outputs, int]] = []

    def make(self) -> tuple[_Outputs, int]:
        """((logits, weights, ids), where they begin): of nobody else, now or later. More are `left`."""
        n_experts, top_k = self._sizes
        weights_at = _padded(n_experts)
        ids_at = weights_at + _padded(top_k)
        width = ids_at + _padded(top_k)
        block = torch.empty(self.N_AT_A_TIME, width, dtype=torch.float32)
        parts = (
            block[:, :n_experts],
            block[:, weights_at : weights_at + top_k],
            block.view(torch.int32)[:, ids_at : ids_at + top_k],
        )
        # "unsafe": they are no views of a block that somebody could write to
        rows = zip(*(part.unsafe_split_with_sizes([1] * self.N_AT_A_TIME) for part in parts), strict=True)
        first = block.data_ptr()
        made = list(zip(rows, range(first, first + block.nbytes, 4 * width), strict=True))
        self.left += made[1:]
        return made[0]


def _scalars(rule: GateRule) -> tuple[int, int, bool, bool, float, float, int, int, int]:
    """What follows the number of experts, for the core's gate and for the op; `_rule_of` reads it back."""
    return (
        rule.top_k,
        _SCORES.index(rule.score_func),
        rule.score_scope == "topk",
        rule.renormalize,
        rule.renorm_eps,
        rule.routed_scaling_factor,
        rule.n_group,
        rule.topk_group,
        _GROUP_SCORES.index(rule.group_score),
    )


class _NativeGate:
    """The core's gate for one rule. Results of one token are kept ready, for inference mode apart: what is made in it
    stays a tensor of it, and is made sooner."""

    def __init__(self, rule: GateRule) -> None:
        gate = Gate(rule.n_experts, *_scalars(rule))
        self.run, self.run_one, self.select = gate.run, gate.run_one, gate.select
        self.fresh, self.fresh_in_inference = (_FreshRows(rule.n_experts, rule.top_k) for _ in range(2))


_gates: dict[GateRule, _NativeGate] = {}
atexit.register(_gates.clear)  # before the interpreter looks for what was left behind


def native_gate(rule: GateRule) -> _NativeGate:
    """What the core has for a rule, kept."""
    return _gates.get(rule) or _gates.setdefault(rule, _NativeGate(rule))


def can_take(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel reads these tensors as they are: on the CPU, rows without gaps, dtypes that it knows."""
    return (
        AVAILABLE
        and x.device.type == "cpu"
        and x.dtype in _INPUTS
        and weight.dtype is torch.float32
        and x.is_contiguous()
        and weight.is_contiguous()
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

    x: float32 or bfloat16; weight: [n_experts, hidden] float32; the vectors: [n_experts] float32. All
    contiguous, on the CPU (`can_take`). No gradient.
    """
    native = _gates.get(rule) or native_gate(rule)
    n_tokens, hidden = x.shape
    logit_bias_at = 0 if logit_bias is None else logit_bias.data_ptr()
    choice_bias_at = 0 if choice_bias is None else choice_bias.data_ptr()
    scale_at = 0 if expert_scale is None else expert_scale.data_ptr()
    if n_tokens == 1:
        fresh = native.fresh_in_inference if _is_inference() else native.fresh
        try:
            outputs, block = fresh.left.pop()
        except IndexError:
            outputs, block = fresh.make()
        native.run_one(
            x.data_ptr(),
            x.dtype is _BFLOAT16,
            weight.data_ptr(),
            hidden,
            logit_bias_at,
            choice_bias_at,
            scale_at,
            block,
        )
        return outputs
    logits = torch.empty(n_tokens, rule.n_experts, dtype=torch.float32)
    weights = torch.empty(n_tokens, rule.top_k, dtype=torch.float32)
    ids = torch.empty(n_tokens, rule.top_k, dtype=torch.int32)
    native.run(
        x.data_ptr(),
        x.dtype is _BFLOAT16,
        weight.data_ptr(),
        n_tokens,
        hidden,
        logit_bias_at,
        choice_bias_at,
        scale_at,
        logits.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return logits, weights, ids


def select_rows(
    logits: Tensor, rule: GateRule, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, ids) of float32 logits [n, n_experts]: the choice alone."""
    n_tokens = logits.shape[0]
    weights = torch.empty(n_tokens, rule.top_k, dtype=torch.float32)
    ids = torch.empty(n_tokens, rule.top_k, dtype=torch.int32)
    native_gate(rule).select(
        logits.data_ptr(),
        n_tokens,
        0 if choice_bias is None else choice_bias.data_ptr(),
        0 if expert_scale is None else expert_scale.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
    )
    return weights, ids


_OP = (
    "gate(Tensor x, Tensor weight, Tensor? logit_bias, Tensor? choice_bias, Tensor? expert_scale, int top_k, int score,"
    " bool over_top_k, bool renormalize, float renorm_eps, float scaling, int n_group, int topk_group, int group_score)"
    " -> (Tensor, Tensor, Tensor)"
)
_library = torch.library.Library("laya", "FRAGMENT")
_library.define(_OP, tags=(torch.Tag.pt2_compliant_tag,))


@lru_cache(maxsize=256)
def _rule_of(
    n_experts: int,
    top_k: int,
    score: int,
    over_top_k: bool,
    renormalize: bool,
    renorm_eps: float,
    scaling: float,
    n_group: int,
    topk_group: int,
    group_score: int,
) -> GateRule:
    return GateRule(
        n_experts=n_experts,
        top_k=top_k,
        score_func=_SCORES[score],  # type: ignore[arg-type]
        score_scope="topk" if over_top_k else "all",
        renormalize=renormalize,
        renorm_eps=renorm_eps,
        routed_scaling_factor=scaling,
        n_group=n_group,
        topk_group=topk_group,
        group_score=_GROUP_SCORES[group_score],  # type: ignore[arg-type]
    )


def _op_cpu(
    x: Tensor, weight: Tensor, logit_bias: Tensor | None, choice_bias: Tensor | None, scale: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return gate_rows(
        x.contiguous(), weight.contiguous(), _rule_of(weight.shape[0], *rule), logit_bias, choice_bias, scale
    )


def _op_fake(
    x: Tensor,
    weight: Tensor,
    logit_bias: Tensor | None,
    choice_bias: Tensor | None,
    expert_scale: Tensor | None,
    top_k: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    n_tokens = x.shape[0]
    return (
        x.new_empty((n_tokens, weight.shape[0]), dtype=torch.float32),
        x.new_empty((n_tokens, top_k), dtype=torch.float32),
        x.new_empty((n_tokens, top_k), dtype=torch.int32),
    )


_library.impl("gate", _op_cpu, "CPU")
torch.library.register_fake("laya::gate", _op_fake, lib=_library)


def gate_op(
    x: Tensor,
    weight: Tensor,
    rule: GateRule,
    logit_bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gate_rows` through the dispatcher: what torch.compile traces."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.laya.gate(
        x,
        weight,
        logit_bias,
        choice_bias,
        expert_scale,
        *_scalars(rule),
    )
    return result
