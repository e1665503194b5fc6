"""Owns: what training a recipe takes of memory and disk, worked out from its shape before anything is made."""

from __future__ import annotations

from pathlib import Path

from laya.modeling.config import LayaConfig
from laya.modeling.room import check_disk, check_memory
from laya.training.recipe import Recipe
from laya.training.upcycle_memory import n_parameters

_FLOAT_BYTES = 4
_WEIGHT_COPIES = 4
"""Weights, gradients, and AdamW's two moments."""
_LOGIT_COPIES = 3
"""Logits, their softmax's logarithm, its gradient."""


def need_bytes(recipe: Recipe, config: LayaConfig) -> int:
    """At least, beside what this process holds already."""
    shape, tokens = recipe.model, recipe.train.step_tokens
    experts = 4 * shape.num_experts_per_tok * shape.intermediate_size
    layer = 12 * shape.hidden_size + experts + 2 * shape.num_local_experts
    kept = tokens * (shape.num_hidden_layers * layer + _LOGIT_COPIES * shape.vocab_size)
    return _FLOAT_BYTES * (_WEIGHT_COPIES * n_parameters(config) + kept)


def disk_bytes(config: LayaConfig) -> int:
    """Of a run's folder: two checkpoints while one replaces the other, each weights and AdamW's moments; the model."""
    return _FLOAT_BYTES * (2 * 3 + 1) * n_parameters(config)


def check_room(recipe: Recipe, config: LayaConfig, out: Path) -> None:
    """Raises InsufficientMemory and InsufficientDisk with the figures."""
    check_memory(
        need_bytes(recipe, config),
        f"Training {recipe.name}",
        ["a smaller model", "train.sequences_per_step with fewer"],
    )
    check_disk(disk_bytes(config), out, f"Training {recipe.name}")
