"""Owns: a dense layer as one with experts, and both of them run on the same text, layer after layer.

One layer is in memory at a time, and equal experts are one tensor seen several times, so that a model is made and
measured in little more memory than its parent's largest layer and embeddings take. Knows no files and no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from laya.modeling.balance import expert_counts
from laya.modeling.config import LayaConfig
from laya.modeling.model import LayaDecoderLayer
from laya.training.parent import Parent, layer_state
from laya.training.router_fit import factors_of, fit_router

_WINDOWS_AT_ONCE = 4


class Recipe(NamedTuple):
    """What is made of a parent."""

    n_experts: int
    top_k: int
    perturb: float
    n_steps: int
    seed: int


class Texts(NamedTuple):
    """Ids, [windows, tokens]."""

    training: Tensor
    held_out: Tensor
    check: Tensor
    """Where parent and model are compared before training."""


class LayerDone(NamedTuple):
    """state: the layer's tensors by their names within it. counts: assignments of held-out tokens, [n_experts]."""

    layer: int
    state: dict[str, Tensor]
    counts: Tensor


class Measured(NamedTuple):
    """Of whole models, nats a token."""

    max_kl_before: float
    parent_loss: float
    loss: float


def laya_config(config: LlamaConfig, recipe: Recipe) -> LayaConfig:
    """The parent's settings, and Laya's router as wide as there are experts, which loses nothing."""
    taken = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
        *("rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    return LayaConfig(
        **{name: getattr(config, name) for name in taken},
        num_local_experts=recipe.n_experts,
        num_experts_per_tok=recipe.top_k,
        router_options={"projection_size": recipe.n_experts},
    )


class Upcycling:
    """Iterate over `layers()` to the end, then ask for `measured()`."""

    def __init__(self, parent: Parent, recipe: Recipe, texts: Texts) -> None:
        self.parent = parent
        self.recipe = recipe
        self.texts = texts
        self.config = laya_config(parent.config, recipe)
        for config in (parent.config, self.config):
            config._attn_implementation = "sdpa"
        self.config._experts_implementation = "eager"  # the one that takes equal experts as one tensor
        embeddings = parent.tensor("model.embed_tokens.weight")
        self._training, self._parent_held, self._parent_check = (functional.embedding(ids, embeddings) for ids in texts)
        self._held, self._check = self._parent_held, self._parent_check
        rotary = LlamaRotaryEmbedding(parent.config)
        self._positions = rotary(self._training, torch.arange(texts.training.shape[1])[None])

    def layers(self) -> Iterator[LayerDone]:
        for index in range(self.config.num_hidden_layers):
            yield self._layer(index)

    @torch.no_grad()
    def _layer(self, index: int) -> LayerDone:
        recipe = self.recipe
        dense_state = layer_state(self.parent, index)
        dense = _dense(self.parent.config, index, dense_state)
        draw = torch.Generator().manual_seed(recipe.seed * 100_003 + index)
        state = _with_experts(dense_state, recipe, draw)
        untrained = torch.randn(recipe.n_experts, self.config.hidden_size, generator=draw)
        untrained /= self.config.hidden_size**0.5

        layer = _sparse(self.config, index, state | _gate(untrained))
        self._check = self._whole(layer, self._check)
        self._parent_check = self._whole(dense, self._parent_check)
        self._parent_held = self._whole(dense, self._parent_held)

        residual, normed = self._attend(dense, self._training)
        with torch.enable_grad():
            router = fit_router(
                normed, recipe.n_experts, recipe.top_k, n_steps=recipe.n_steps, seed=recipe.seed + index
            )
        state |= _gate(router)
        layer = _sparse(self.config, index, state)
        # Equal experts give what the dense block gives, in half the time.
        self._training = residual + _in_pieces(layer.mlp if recipe.perturb else dense.mlp, normed)

        residual, normed = self._attend(layer, self._held)
        self._held = residual + _in_pieces(layer.mlp, normed)
        counts = expert_counts(layer.mlp.gate(normed.flatten(0, 1)).expert_ids, recipe.n_experts)
        return LayerDone(index, state, counts)

    def _whole(self, layer: Any, states: Tensor) -> Tensor:
        return _in_pieces(lambda piece: layer(piece, position_embeddings=self._positions), states)

    def _attend(self, layer: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts' output is added to, and what they get."""

        def attended(piece: Tensor) -> Tensor:
            normed = layer.input_layernorm(piece)
            out: Tensor = layer.self_attn(
                hidden_states=normed, position_embeddings=self._positions, attention_mask=None
            )[0]
            return piece + out

        residual = _in_pieces(attended, states)
        return residual, layer.post_attention_layernorm(residual)

    @torch.no_grad()
    def measured(self) -> Measured:
        head = self.parent.tensor("model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight")
        norm = self.parent.tensor("model.norm.weight")

        def log_probabilities(states: Tensor) -> Tensor:
            normed = functional.rms_norm(states, norm.shape, norm, self.config.rms_norm_eps)
            return functional.linear(normed, head).double().log_softmax(dim=-1)

        def loss(states: Tensor) -> float:
            losses = [
                functional.nll_loss(log_probabilities(of_window[:-1]), ids[1:])
                for of_window, ids in zip(states, self.texts.held_out, strict=True)
            ]
            return float(torch.stack(losses).mean())

        most = 0.0
        for parents, ours in zip(self._parent_check, self._check, strict=True):
            of_parent = log_probabilities(parents)
            kl = (of_parent.exp() * (of_parent - log_probabilities(ours))).sum(dim=-1)
            most = max(most, float(kl.max()))
        return Measured(max_kl_before=most, parent_loss=loss(self._parent_held), loss=loss(self._held))


def _in_pieces(run: Any, states: Tensor) -> Tensor:
    return torch.cat([run(piece) for piece in torch.split(states, _WINDOWS_AT_ONCE)])


def _with_experts(dense: dict[str, Tensor], recipe: Recipe, draw: torch.Generator) -> dict[str, Tensor]:
    """The layer's tensors, the block's as experts: [n_experts, ...] over one tensor, or noisy copies of it."""
    state = {name: tensor for name, tensor in dense.items() if not name.startswith("mlp.")}
    gate_up = torch.cat([dense["mlp.gate_proj.weight"], dense["mlp.up_proj.weight"]])
    for name, matrix in (("gate_up_proj", gate_up), ("down_proj", dense["mlp.down_proj.weight"])):
        experts = matrix.expand(recipe.n_experts, *matrix.shape)
        if recipe.perturb:
            experts = experts + torch.randn(experts.shape, generator=draw) * (recipe.perturb * matrix.std())
        state[f"mlp.experts.{name}"] = experts
    return state


def _gate(weight: Tensor) -> dict[str, Tensor]:
    return {f"mlp.gate.{name}": tensor for name, tensor in factors_of(weight).items()}


def _dense(config: LlamaConfig, index: int, state: dict[str, Tensor]) -> Any:
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, index)
    layer.load_state_dict(state, assign=True)
    return layer.eval()


def _sparse(config: LayaConfig, index: int, state: dict[str, Tensor]) -> Any:
    with torch.device("meta"):
        layer = LayaDecoderLayer(config, index)
    layer.load_state_dict(state, assign=True)
    return layer.eval().requires_grad_(False)
