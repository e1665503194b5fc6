"""Owns: Laya's model: transformers' Mixtral with a router that is a module of its own, and losses taken per layer.

What is Mixtral's stays Mixtral's (attention, norms, packed experts and their implementations, generation), so that
what works on that family works here, vLLM's Transformers backend included.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mixtral.modeling_mixtral import (
    MixtralAttention,
    MixtralDecoderLayer,
    MixtralExperts,
    MixtralForCausalLM,
    MixtralModel,
    MixtralPreTrainedModel,
)
from transformers.utils.output_capturing import OutputRecorder

from laya.modeling.balance import load_balancing_loss, router_z_loss
from laya.modeling.config import LayaConfig
from laya.modeling.router import ExpertRouter, make_router
from laya.modeling.selection import select


class LayaSparseMoeBlock(nn.Module):
    """A layer's router and its experts."""

    def __init__(self, config: LayaConfig) -> None:
        super().__init__()
        self.gate = make_router(
            config.router_type, config.hidden_size, config.gate_rule, **(config.router_options or {})
        )
        self.experts = MixtralExperts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = self.gate(x)
        mixed: Tensor = self.experts(x, routed.expert_ids.long(), routed.weights.to(x.dtype))
        return mixed.view(hidden_states.shape)


class LayaDecoderLayer(MixtralDecoderLayer):  # type: ignore[misc]
    """Mixtral's, with Laya's experts block."""

    def __init__(self, config: LayaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = LayaSparseMoeBlock(config)


class LayaPreTrainedModel(MixtralPreTrainedModel):  # type: ignore[misc]
    """What transformers asks of each of its models."""

    config_class = LayaConfig
    config: LayaConfig
    _no_split_modules = ["LayaDecoderLayer"]
    _can_record_outputs = {
        "router_logits": OutputRecorder(ExpertRouter, index=0),
        "hidden_states": LayaDecoderLayer,
        "attentions": MixtralAttention,
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Transformers looks for its decorator in this file; the experts that have it are Mixtral's."""
        return True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExpertRouter) and not any(
            getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()
        ):
            module.reset_parameters()


class LayaModel(LayaPreTrainedModel, MixtralModel):  # type: ignore[misc]
    """The decoder without its head."""

    def __init__(self, config: LayaConfig) -> None:
        MixtralModel.__init__(self, config)
        self.layers = nn.ModuleList([LayaDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.post_init()


class LayaForCausalLM(LayaPreTrainedModel, MixtralForCausalLM):  # type: ignore[misc]
    """The language model. While it trains, the losses of the router count whenever their coefficients do."""

    def __init__(self, config: LayaConfig) -> None:
        MixtralForCausalLM.__init__(self, config)
        self.model = LayaModel(config)
        self.post_init()

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> MoeCausalLMOutputWithPast:
        """As MixtralForCausalLM. `aux_loss`: the router's losses, weighed by their coefficients, which `loss` includes.

        labels: [batch, sequence], -100 where no token is to be learnt.
        """
        balances = self.training and labels is not None and self._weighs_balance()
        wants_logits = kwargs.pop("output_router_logits", None)
        wants_logits = self.config.output_router_logits if wants_logits is None else wants_logits
        mask = kwargs.get("attention_mask")
        outputs = self.model(*args, output_router_logits=balances or wants_logits, **_model_arguments(kwargs))
        keep = kwargs.get("logits_to_keep", 0)
        hidden = outputs.last_hidden_state
        logits = self.lm_head(hidden[:, -keep:] if isinstance(keep, int) and keep else hidden)
        loss: Tensor | None = None
        aux_loss: Tensor | None = None
        if labels is not None:
            language_loss: Tensor = self.loss_function(logits, labels, self.config.vocab_size)
            aux_loss = self.balance_loss(outputs.router_logits, mask) if balances else None
            loss = language_loss if aux_loss is None else language_loss + aux_loss
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits if wants_logits else None,
        )

    def _weighs_balance(self) -> bool:
        return bool(self.config.router_aux_loss_coef or self.config.router_z_loss_coef)

    def balance_loss(self, router_logits: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
        """Weighed mean over layers of the balance and z losses. router_logits: a layer's each, [tokens, n_experts]."""
        total = router_logits[0].new_zeros(())
        for layer, logits in zip(self.model.layers, router_logits, strict=True):
            gate: Any = layer.mlp.gate  # type: ignore[union-attr]
            flat = logits.reshape(-1, logits.shape[-1])
            ids = select(flat.float(), gate.rule, getattr(gate, "choice_bias", None))[1]
            total = total + self.config.router_aux_loss_coef * load_balancing_loss(flat, ids, mask)
            total = total + self.config.router_z_loss_coef * router_z_loss(flat, mask)
        return total / len(router_logits)


def _model_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "logits_to_keep"}


AutoConfig.register("laya", LayaConfig)
AutoModel.register(LayaConfig, LayaModel)
AutoModelForCausalLM.register(LayaConfig, LayaForCausalLM)
