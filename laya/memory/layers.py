"""Owns: what one layer keeps of the tokens it has seen, and how rows of layers are made from a model's figures.

A model's memory beside its weights is a sum over these rows, whatever its family: attention over all tokens, a window
or a chunk, latent attention, an indexer, cross attention, recurrent state, or nothing. Knows no file format, no bytes
and no settings. Sources of the formulas: llama.cpp's hparams; see docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer keeps. Widths in elements, lengths in tokens; all 0 = it keeps nothing."""

    n_head_kv: int = 0
    head_k: int = 0
    head_v: int = 0  # 0 where values are read back from the keys (latent attention)
    window: int = 0  # tokens it looks back; 0 = all
    is_chunked: bool = False  # the window is a chunk that starts anew, not one that slides
    index: int = 0  # elements of a token's row in the indexer's own cache
    n_cross: int = 0  # tokens of the other side that cross attention keeps, whatever the context
    conv: int = 0  # f32 elements a sequence keeps for a convolution or token shift
    state: int = 0  # f32 elements a sequence keeps of a recurrence

    @property
    def k(self) -> int:
        """Elements of one token's K row."""
        return self.n_head_kv * self.head_k

    @property
    def v(self) -> int:
        """Elements of one token's V row."""
        return self.n_head_kv * self.head_v

    def with_index(self, width: int) -> LayerShape:
        """The same layer with an indexer whose keys are `width` wide."""
        return msgspec.structs.replace(self, index=width)


class RecurrentShape(msgspec.Struct, frozen=True, kw_only=True):
    """The widths recurrent state is made of, 0 where a family has none."""

    conv_kernel: int = 0
    inner: int = 0
    state: int = 0
    groups: int = 0
    head_size: int = 0  # RWKV
    token_shift: int = 0  # RWKV
    l_cache: int = 0  # LFM2
    kda_head_dim: int = 0  # Kimi Linear
    lightning_head_dim: int = 0  # MiniMax-01

    def layer(self, n_embd: int, n_head: int) -> LayerShape:
        """The state of one recurrent layer: the first family whose widths are there.

        Mamba 1 and 2 and the gated delta net share the last row.
        """
        conv = max(self.conv_kernel - 1, 0)
        if self.head_size:
            return LayerShape(conv=self.token_shift * n_embd, state=n_embd * self.head_size)
        if self.l_cache:
            return LayerShape(conv=(self.l_cache - 1) * n_embd)
        if self.kda_head_dim:
            width = n_head * self.kda_head_dim
            return LayerShape(conv=3 * conv * width, state=self.kda_head_dim * width)
        if self.lightning_head_dim:
            return LayerShape(state=self.lightning_head_dim**2 * n_head)
        return LayerShape(conv=conv * (self.inner + 2 * self.groups * self.state), state=self.state * self.inner)


def attention_layers(n_head_kv: Sequence[int], head_k: int, head_v: int) -> tuple[LayerShape, ...]:
    """Rows of full attention; a layer without KV heads keeps nothing."""
    return tuple(LayerShape(n_head_kv=n, head_k=head_k, head_v=head_v) if n else LayerShape() for n in n_head_kv)


def windowed(
    layers: Sequence[LayerShape],
    is_windowed: Sequence[bool],
    window: int,
    *,
    head_k: int | None = None,
    head_v: int | None = None,
    is_chunked: bool = False,
) -> tuple[LayerShape, ...]:
    """The same rows, those marked looking back `window` tokens; their heads may have another width."""
    return tuple(
        msgspec.structs.replace(
            layer,
            window=window,
            is_chunked=is_chunked,
            head_k=layer.head_k if head_k is None else head_k,
            head_v=layer.head_v if head_v is None else head_v,
        )
        if marked and layer.n_head_kv
        else layer
        for layer, marked in zip(layers, is_windowed, strict=True)
    )


def with_recurrent(
    layers: Sequence[LayerShape], is_recurrent: Sequence[bool], row: LayerShape, *, keeps_attention: bool = False
) -> tuple[LayerShape, ...]:
    """The same rows with recurrent state where marked, in place of attention or (Falcon-H1) beside it."""
    return tuple(
        layer
        if not marked
        else msgspec.structs.replace(layer, conv=row.conv, state=row.state)
        if keeps_attention
        else row
        for layer, marked in zip(layers, is_recurrent, strict=True)
    )


def pattern(n_layer: int, period: int, *, dense_first: bool = False) -> tuple[bool, ...]:
    """Which layers have a window, where one layer in `period` sees everything: its last, or its first. 0 = all have."""
    if period == 0:
        return (True,) * n_layer
    return tuple(il % period != 0 if dense_first else il % period < period - 1 for il in range(n_layer))
