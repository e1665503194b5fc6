"""Owns: what makes a Laya model, as a Hugging Face configuration: Mixtral's keys, and the router's."""

from __future__ import annotations

from typing import Any

from transformers import MixtralConfig

from laya.modeling.router import DEFAULT_ROUTER
from laya.modeling.rule import GateRule


class LayaConfig(MixtralConfig):  # type: ignore[misc]
    """Pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU experts, and a router of its own.

    router_type: a registered router's name; router_options: what its maker takes beside (`projection_size`, ...);
    router_rule: fields of `GateRule` other than n_experts and top_k. router_aux_loss_coef and router_z_loss_coef weigh
    the losses of `laya.modeling.balance`, per layer, then averaged: 0 leaves one out.
    """

    model_type = "laya"

    router_type: str = DEFAULT_ROUTER
    router_options: dict[str, Any] | None = None
    router_rule: dict[str, Any] | None = None
    router_aux_loss_coef: float = 0.01
    router_z_loss_coef: float = 0.001

    def __post_init__(self, **kwargs: Any) -> None:
        self.router_options = self.router_options or {}
        self.router_rule = self.router_rule or {}
        super().__post_init__(**kwargs)

    @property
    def gate_rule(self) -> GateRule:
        """Raises ValueError where the router's keys do not go together."""
        rule = {"jitter": self.router_jitter_noise} | (self.router_rule or {})
        return GateRule(n_experts=self.num_local_experts, top_k=self.num_experts_per_tok, **rule)
