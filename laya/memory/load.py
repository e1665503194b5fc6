"""Owns: one model as it would be loaded: what every memory term is computed from. Knows no formula."""

from __future__ import annotations

import msgspec

from laya.memory.engine_facts import EngineFacts
from laya.memory.facts import ModelFacts
from laya.memory.layers import LayerShape
from laya.memory.placement import CPU, layer_devices
from laya.types import PlannedSettings

SLOT_PADDING = 256  # llama.cpp rounds the context of a slot, of the pool and of a window up to this


def padded(tokens: int) -> int:
    """Tokens as llama.cpp allocates them."""
    return -(-tokens // SLOT_PADDING) * SLOT_PADDING


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One model as it would be loaded."""

    facts: ModelFacts
    settings: PlannedSettings
    engine: EngineFacts
    draft: ModelFacts | None = None
    projector_bytes: int = 0  # of the projector's file
    gpu_free_bytes: tuple[int, ...] = ()  # of each GPU that may be used; layers are shared out in proportion
    # What the built-in engine is not started with, so that a plan of it says 0; another engine's defaults differ.
    swa_full: bool = False  # layers with a window keep every token all the same
    n_rollback: int = 0  # recurrent states kept beside the current one, to undo a draft's tokens
    mtp: bool = False  # the model's own layers for multi-token prediction draft
    prompt_cache_bytes: int = 0
    n_checkpoints: int = 0  # per sequence

    @property
    def layer_devices(self) -> tuple[str, ...]:
        """The device of each layer and, last, of the output."""
        shares = self.settings.tensor_split if any(self.settings.tensor_split) else self.gpu_free_bytes
        return layer_devices(self.facts.shape.n_layer, self.settings.gpu_layers, shares)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that have a layer."""
        return tuple(dict.fromkeys(device for device in self.layer_devices if device != CPU))

    @property
    def is_pipelined(self) -> bool:
        """Whether GPUs compute batches one behind the other, each with copies of its inputs.

        llama.cpp does where every layer lies on one of several, whole.
        """
        is_whole = self.settings.gpu_layers > self.facts.shape.n_layer and not self.settings.experts_on_cpu
        return len(self.gpus) > 1 and is_whole

    @property
    def n_streams(self) -> int:
        """Separate caches: one a sequence, or one for all when they share a pool."""
        return 1 if self.settings.kv_unified else self.settings.max_num_seqs

    @property
    def cells(self) -> int:
        """Tokens of cache the engine allocates in all."""
        return self.settings.slot_tokens * self.n_streams

    @property
    def window_cells(self) -> int:
        """Tokens of cache in a layer with the model's widest window; 0 where no layer has one."""
        return max((self.cells_of(layer) for layer in self.facts.shape.layers if layer.window), default=0)

    def cells_of(self, layer: LayerShape) -> int:
        """Tokens of cache the engine allocates in this layer: with a window, the window and the batch that enters."""
        if not layer.window or self.swa_full:
            return self.cells
        n_seqs = self.settings.max_num_seqs if self.settings.kv_unified else 1
        wanted = layer.window * n_seqs + self.settings.n_ubatch
        return padded(min(self.settings.slot_tokens, wanted)) * self.n_streams

    @property
    def output_rows(self) -> int:
        """Rows of logits computed at once: one a sequence, or the whole batch where embeddings are asked for."""
        if not self.facts.shape.is_causal:
            return 0
        return self.settings.max_num_seqs if self.settings.task == "chat" else self.settings.n_batch
