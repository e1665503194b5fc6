"""Owns: the weights of a model by where they may lie: one row for each layer, with its experts apart."""

from __future__ import annotations

from typing import NamedTuple

INPUT_LAYER = -1


class WeightGroup(NamedTuple):
    """Weights that lie on one device: those of one layer, with or without its experts."""

    layer: int  # INPUT_LAYER for embeddings, n_layer for the output
    is_expert: bool
    n_bytes: int
    largest_bytes: int  # of its largest tensor
