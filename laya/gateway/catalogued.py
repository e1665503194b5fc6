"""Owns: the plan of a catalogue model whose file is not on this disk: from its shape, never too kind.

The meeting place of the models room, which has the catalogue, and the memory room, which plans. Offline.
"""

from __future__ import annotations

from laya.memory import Budget, ModelShape, plan_before_download
from laya.memory.rates import MachineRates
from laya.models import CatalogueEntry, Shape
from laya.types import AskedSettings, Plan


def plan_entry(entry: CatalogueEntry, asked: AskedSettings, budget: Budget, rates: MachineRates | None) -> Plan:
    """What it would need, and how it would be started inside this budget: an upper bound. Raises ConfigError."""
    shape = model_shape(entry.shape)
    return plan_before_download(
        shape, entry.file_bytes, entry.weights_type, asked, budget, model_id=entry.id, rates=rates
    )


def model_shape(shape: Shape) -> ModelShape:
    """The catalogue's shape in the planner's terms: every layer alike."""
    return ModelShape(
        architecture=shape.architecture,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        n_head=(shape.n_head,) * shape.n_layer,
        n_head_kv=(shape.n_head_kv,) * shape.n_layer,
        head_dim_k=shape.head_dim,
        head_dim_v=shape.head_dim,
        n_ff=shape.n_ff,
        n_vocab=shape.n_vocab,
        n_ctx_train=shape.n_ctx_train,
        n_expert=shape.n_expert,
        n_expert_used=shape.n_expert_used,
        n_ff_expert=shape.n_ff_expert,
    )
