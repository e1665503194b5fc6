"""Owns: the expert router of a Mixture-of-Experts layer as a module of its own, whatever family its weights are of.

A router is a matrix [n_experts, hidden], or two that are folded into one for inference: a projection [width, hidden]
and learnable expert embeddings [n_experts, width]. What is done with its logits is a `GateRule`. While gradients are
wanted it computes in plain torch operations; otherwise in the native kernel where that takes the tensors. In float32.

Custom routers register by name (`register_router`) and are made by it (`make_router`), as LayaForCausalLM does.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from laya.modeling.kernels import cpu
from laya.modeling.rule import GateRule
from laya.modeling.selection import select

DEFAULT_ROUTER = "projected"


class RouterOutput(NamedTuple):
    """Of a token each; leading dimensions are those of the hidden states."""

    logits: Tensor
    """Raw, [..., n_experts] float32, biases included."""
    weights: Tensor
    """[..., top_k] float32, the best expert's first."""
    expert_ids: Tensor
    """[..., top_k] int32."""


class ExpertRouter(nn.Module):
    """What every router is, Laya's and those of a user's own: hidden states [..., hidden_size] -> `RouterOutput`.

    A model records the `logits` of each, and its balance losses judge them by `rule`. A subclass has `forward`, and
    `reset_parameters` where it has parameters of its own.
    """

    def __init__(self, hidden_size: int, rule: GateRule) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.rule = rule

    def reset_parameters(self) -> None:
        """What parameters are before training; not called where they are loaded."""


class LayaRouter(ExpertRouter):
    """A matrix, or a projection and expert embeddings."""

    def __init__(
        self,
        hidden_size: int,
        rule: GateRule,
        *,
        projection_size: int | None = None,
        has_logit_bias: bool = False,
        has_choice_bias: bool = False,
        has_expert_scale: bool = False,
        normalizes_input: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        """projection_size: width between projection and expert embeddings; None for one matrix.

        normalizes_input: x is divided by its root mean square and multiplied by a learnt scale and hidden_size**-0.5
        first (Gemma 4).
        """
        super().__init__(hidden_size, rule)
        n_experts = rule.n_experts
        if projection_size is None:
            self.weight = nn.Parameter(torch.empty(n_experts, hidden_size))
        else:
            self.projection = nn.Parameter(torch.empty(projection_size, hidden_size))
            self.expert_embeddings = nn.Parameter(torch.empty(n_experts, projection_size))
        self.is_projected = projection_size is not None
        self.logit_bias = nn.Parameter(torch.zeros(n_experts)) if has_logit_bias else None
        self.choice_bias: Tensor | None
        self.register_buffer("choice_bias", torch.zeros(n_experts) if has_choice_bias else None)
        self.expert_scale = nn.Parameter(torch.ones(n_experts)) if has_expert_scale else None
        self.input_scale = nn.Parameter(torch.ones(hidden_size)) if normalizes_input else None
        self.norm_eps = norm_eps
        self._folded: tuple[tuple[int, ...], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random logits: no expert is preferred before training."""
        if self.is_projected:
            nn.init.normal_(self.projection, std=self.hidden_size**-0.5)
            nn.init.normal_(self.expert_embeddings, std=self.expert_embeddings.shape[1] ** -0.5)
        else:
            nn.init.normal_(self.weight, std=self.hidden_size**-0.5)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, layer: int | None = None) -> LayaRouter:
        """The router of a checkpoint's MoE layer, from a safetensors file or a folder of them with its config.json.

        Reads that router's tensors only. layer: default the first one with experts. Raises FileNotFoundError where
        there is no checkpoint, ValueError where it has no router that is known, or none in that layer.
        """
        from laya.modeling.checkpoint import load_router

        return load_router(path, layer=layer)

    def folded_weight(self) -> Tensor:
        """[n_experts, hidden_size] float32: the matrix that gives the same logits, kept until a parameter changes."""
        if not self.is_projected and self.weight.dtype is torch.float32:
            return self.weight
        parts = (self.expert_embeddings, self.projection) if self.is_projected else (self.weight,)
        if any(part.is_inference() for part in parts):  # such tensors don't tell that they were changed
            return self._fold()
        version = tuple(number for part in parts for number in (part._version, part.data_ptr()))
        if self._folded is None or self._folded[0] != version:
            self._folded = (version, self._fold())
        return self._folded[1]

    def _fold(self) -> Tensor:
        with torch.no_grad():
            if not self.is_projected:
                return self.weight.float()
            return self.expert_embeddings.float() @ self.projection.float()

    def forward(self, hidden_states: Tensor) -> RouterOutput:
        if hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden states are {hidden_states.shape[-1]} wide; this router takes hidden_size {self.hidden_size}"
            )
        is_flat = hidden_states.dim() == 2
        x = hidden_states if is_flat else hidden_states.reshape(-1, self.hidden_size)
        if self.training and self.rule.jitter > 0:
            x = x.float() * torch.empty_like(x, dtype=torch.float32).uniform_(
                1 - self.rule.jitter, 1 + self.rule.jitter
            )
        if self.input_scale is not None:
            x = functional.rms_norm(x.float(), (self.hidden_size,), eps=self.norm_eps)
            x = x * self.input_scale.float() * self.hidden_size**-0.5
        logits, weights, ids = self._route(x)
        if is_flat:
            return RouterOutput(logits, weights, ids)
        leading = hidden_states.shape[:-1]
        return RouterOutput(logits.view(*leading, -1), weights.view(*leading, -1), ids.view(*leading, -1))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wants_gradient = torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        if wants_gradient:
            self._folded = None  # an optimizer that is fused changes weights without their version telling it
        if not wants_gradient:
            if torch.compiler.is_compiling():
                if cpu.AVAILABLE and x.device.type == "cpu":
                    return cpu.gate_op(x, self._fold(), self.rule, *self._vectors())
            elif kernel := _kernel_for(x, weight := self.folded_weight(), self.rule):
                return kernel.gate_rows(x, weight, self.rule, *self._vectors())
        logits = self._logits(x.float())
        weights, ids = select(logits, self.rule, _float(self.choice_bias), _float(self.expert_scale))
        return logits, weights, ids

    def _logits(self, x: Tensor) -> Tensor:
        """In two steps where there are two matrices, so that each gets its gradient."""
        if self.is_projected:
            logits = functional.linear(functional.linear(x, self.projection.float()), self.expert_embeddings.float())
        else:
            logits = functional.linear(x, self.weight.float())
        return logits if self.logit_bias is None else logits + self.logit_bias.float()

    def _vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _float(self.logit_bias), _float(self.choice_bias), _float(self.expert_scale)

    def extra_repr(self) -> str:
        form = f"projection {self.projection.shape[0]}, " if self.is_projected else ""
        return f"hidden_size={self.hidden_size}, {form}{self.rule}"


def _kernel_for(x: Tensor, weight: Tensor, rule: GateRule) -> ModuleType | None:
    if x.device.type == "cpu":
        return cpu if cpu.can_take(x, weight) else None
    kernel = _triton() if x.device.type == "cuda" else None
    return kernel if kernel is not None and kernel.can_take(x, weight, rule) else None


@lru_cache(maxsize=1)
def _triton() -> ModuleType | None:
    """Where torch is a build for a GPU, triton comes with it."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("laya.modeling.kernels.triton_gate")


def _float(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.detach().float().contiguous()


RouterMaker = Callable[..., ExpertRouter]
_MAKERS: dict[str, RouterMaker] = {}


def register_router(name: str, maker: RouterMaker) -> None:
    """Makes a kind of router known by name: `maker(hidden_size, rule, **options)` -> an `ExpertRouter`.

    Raises ValueError where the name is taken by another one.
    """
    if _MAKERS.get(name, maker) is not maker:
        raise ValueError(f"a router named '{name}' is registered already")
    _MAKERS[name] = maker


def make_router(name: str, hidden_size: int, rule: GateRule, **options: Any) -> ExpertRouter:
    """Raises ValueError for a name that nobody registered, TypeError where what it makes is no `ExpertRouter`."""
    if name not in _MAKERS:
        raise ValueError(f"no router is registered as '{name}'; there are {', '.join(sorted(_MAKERS))}")
    router = _MAKERS[name](hidden_size, rule, **options)
    if not isinstance(router, ExpertRouter):
        raise TypeError(
            f"router '{name}' is a {type(router).__name__}: make it a subclass of laya.modeling.ExpertRouter"
        )
    return router


def _projected(hidden_size: int, rule: GateRule, **options: Any) -> ExpertRouter:
    return LayaRouter(hidden_size, rule, **({"projection_size": max(rule.n_experts, hidden_size // 4)} | options))


register_router(DEFAULT_ROUTER, _projected)
register_router("linear", LayaRouter)
