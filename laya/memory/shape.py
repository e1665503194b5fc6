"""Owns: the figures of a model that decide its memory, whatever the file they come from.

`read_shape` (gguf_shape.py) makes one from GGUF metadata, hf.py from a config.json, params.py from a description. What
each layer keeps is its row in `layers`; the other figures size the graph. Knows no bytes and no settings.
"""

from __future__ import annotations

import msgspec

from laya.memory.layers import LayerShape, RecurrentShape, attention_layers


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs of an architecture. Counts; lengths in elements, context in tokens."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]  # per layer
    n_head_kv: tuple[int, ...]  # per layer; 0 = the layer keeps no attention cache
    head_dim_k: int  # of the widest layers, as their cache holds it
    head_dim_v: int
    n_ff: int  # of the widest layer
    n_vocab: int
    n_ctx_train: int
    layers: tuple[LayerShape, ...] = ()  # what each layer keeps; not given = full attention by the figures above
    has_rope_scaling: bool = False
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    n_embd_per_layer: int = 0  # width of a layer's own embedding (gemma3n, gemma4 E), 0 = none
    kv_lora_rank: int = 0  # of latent attention
    head_dim_k_mla: int = 0  # of latent attention, decompressed
    head_dim_v_mla: int = 0
    n_index_head: int = 0  # of an indexer (DSA)
    n_layer_nextn: int = 0  # layers for multi-token prediction, beyond n_layer: their cache is the draft's
    recurrent: RecurrentShape = RecurrentShape()
    is_length_known: bool = True  # False: n_ctx_train is no more than a ceiling for what may be asked
    bound: str | None = None  # why the figures are an upper bound; None = they were measured
    is_causal: bool = True  # False: an encoder; it keeps no tokens and has no logits
    pooling: str | None = None
    chat_template: str | None = None
    file_type: str = "unknown"
    name: str | None = None

    def __post_init__(self) -> None:
        if not self.is_causal:
            msgspec.structs.force_setattr(self, "layers", (LayerShape(),) * self.n_layer)
        elif not self.layers:
            dense = attention_layers(self.n_head_kv, self.head_dim_k, self.head_dim_v)
            msgspec.structs.force_setattr(self, "layers", dense)
        assert len(self.layers) == self.n_layer, "a row for each layer"

    @property
    def window(self) -> int:
        """Tokens the windowed layers look back; 0 where no layer has a window."""
        return max((layer.window for layer in self.layers), default=0)

    @property
    def is_recurrent(self) -> bool:
        return any(layer.conv or layer.state for layer in self.layers)
