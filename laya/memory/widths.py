"""Owns: how wide the graph of a batch gets where a model is more than attention and feed-forward, per token.

Each row was fitted to what the engine reserves for models of that family and is held to it by a test: never under, at
most 1.35 times. Elements of f32. Knows no bytes. Sources: docs/memory.md.
"""

from __future__ import annotations

from laya.memory.load import Load
from laya.memory.shape import ModelShape

# Rows of embeddings that are there beside the widest matrix: the residual, the norms and what is computed aside. More
# beside feed-forward that runs side by side with attention, fewer beside attention in a block normed at its end.
EMBEDDINGS = 5
_BESIDE_FEED_FORWARD = {"cohere2": 6, "cohere2moe": 8, "command-r": 6, "llama4": 7, "plamo": 6, "smallthinker": 7}
_BESIDE_ATTENTION = {"bert": 4, "exaone4": 3, "jina-bert-v3": 4, "nomic-bert": 4, "nomic-bert-moe": 4, "olmo2": 3}
# Encoders some of whose layers look at a window of the batch: they have a mask for each kind.
TWO_MASKS = frozenset({"gemma-embedding", "modern-bert"})
_STREAMS = {"gemma3n": 23}  # embeddings of a model that carries several residual streams
# The engine has no fused attention for these: scores of a batch against all tokens are there, an encoder's among them.
_UNFUSED = frozenset({"grok", "t5"})
_ENCODER_DECODER = "t5"
_DELTA_NETS = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen4exp"})


def beside_feed_forward(shape: ModelShape, is_rotated: bool) -> int:
    """Elements beside feed-forward; the embeddings of all layers, if there are, twice where the cache is rotated."""
    each = shape.n_embd_per_layer * shape.n_layer
    return _BESIDE_FEED_FORWARD.get(shape.architecture, EMBEDDINGS) * shape.n_embd + each * (2 if is_rotated else 1)


def beside_attention(shape: ModelShape) -> int:
    """Elements beside queries, keys and values."""
    each = shape.n_embd_per_layer * shape.n_layer
    return _BESIDE_ATTENTION.get(shape.architecture, EMBEDDINGS) * shape.n_embd + each


def beyond_dense(load: Load) -> int:
    """Elements of one token at the widest point that attention with whole keys and feed-forward do not reach."""
    shape = load.facts.shape
    return max(_latent(load), _recurrent(load), _unfused(load), _per_layer_embedding(shape), _streams(shape))


def _latent(load: Load) -> int:
    """Queries, and queries and values in the compressed space; an indexer scores every token of the context."""
    shape = load.facts.shape
    if not shape.head_dim_k_mla:
        return 0
    n_head = max(shape.n_head, default=0)
    # Values may be wider than the keys' part without a position (GLM-4.7-Flash: 256 of 192).
    expanded = max(shape.head_dim_k_mla, shape.head_dim_v_mla + shape.head_dim_k - shape.kv_lora_rank)
    each = expanded + shape.kv_lora_rank + shape.head_dim_k
    rotated = n_head * (shape.head_dim_k - shape.kv_lora_rank)
    index = max((layer.index for layer in shape.layers), default=0)
    scores = 2 * shape.n_index_head * index + load.settings.slot_tokens * 8 // 5 + 640 if index else 0
    # Rotated queries are laid where an embedding was, if they fit there.
    return n_head * each + (rotated if rotated > shape.n_embd else 0) + 5 * shape.n_embd + scores


def _recurrent(load: Load) -> int:
    """The mixer of a recurrent layer, and its state twice for each sequence of the batch."""
    shape, n_seqs = load.facts.shape, load.settings.max_num_seqs
    kept = max((layer.conv + layer.state for layer in shape.layers), default=0)
    if not kept:
        return 0
    states = -(-2 * n_seqs * kept // load.settings.n_ubatch)
    return _mixer(shape, load.settings.n_ubatch // n_seqs) + states


def _mixer(shape: ModelShape, tokens_each: int) -> int:
    widths, n_head = shape.recurrent, max(shape.n_head, default=0)
    groups = 2 * widths.groups * widths.state
    if widths.head_size:
        return 20 * shape.n_embd
    if widths.kda_head_dim:
        return 13 * n_head * widths.kda_head_dim + 2 * shape.n_embd
    if widths.lightning_head_dim:
        return 10 * shape.n_embd + 3 * n_head * tokens_each
    if widths.l_cache:
        return 0  # a short convolution is narrower than the feed-forward beside it
    if shape.architecture in _DELTA_NETS:
        return 4 * (widths.inner + groups) + 4 * shape.n_embd
    return 8 * widths.inner + 3 * groups + shape.n_embd


def _unfused(load: Load) -> int:
    """Scores of every head; of an encoder-decoder also keys and values of the longest text that could be encoded."""
    shape = load.facts.shape
    if shape.architecture not in _UNFUSED:
        return 0
    encoded = shape.n_ctx_train if shape.architecture == _ENCODER_DECODER else 0
    scores = max(shape.n_head, default=0) * (load.settings.slot_tokens + encoded)
    return scores + -(-7 * encoded * shape.n_embd // (2 * load.settings.n_ubatch)) + 8 * shape.n_embd


def _per_layer_embedding(shape: ModelShape) -> int:
    """The embeddings of all layers, projected at once before the first."""
    each = shape.n_embd_per_layer * shape.n_layer
    return 4 * each + 5 * shape.n_embd if each else 0


def _streams(shape: ModelShape) -> int:
    n = _STREAMS.get(shape.architecture, 0)
    return n * shape.n_embd + 3 * shape.n_ff if n else 0
