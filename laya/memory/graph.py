"""Owns: the compute buffers of a GPU: the peak of one graph on one device, and what it needs of host memory.

Not measured here: the widths come from public logs of CUDA runs (tests/memory/memory_cases.json), where this is never
under and at most 1.35 times the logged figure. The CPU's buffers are in buffers.py. Sources: docs/memory.md.
"""

from __future__ import annotations

from laya.memory.ggml import kv_cache_type
from laya.memory.load import Load
from laya.memory.shape import ModelShape
from laya.types import KIB

MARGIN = 1.05  # on the widths, which are fitted to the logs they are tested on
PIPELINE_COPIES = 4  # of the inputs, where several GPUs compute one behind the other
POSITIONS = 4  # of a token, in models that have several
ALLOCATOR_BYTES = 64 * KIB


def gpu_compute(load: Load) -> int:
    """The graph buffer of each GPU that has layers of the model."""
    n_ubatch, shape = load.settings.n_ubatch, load.facts.shape
    is_quantized = kv_cache_type(load.settings.kv_cache_dtype).block > 1
    copy = _dequantized(load) if is_quantized else 0
    attention = 4 * n_ubatch * _attention_width(shape, is_quantized) + copy
    feed_forward = 4 * n_ubatch * max(_dense_width(shape), _expert_width(shape), _recurrent_width(shape))
    per_layer = 4 * n_ubatch * shape.n_embd_per_layer * shape.n_layer
    logits = 4 * load.output_rows * shape.n_vocab
    activations = round(MARGIN * (max(attention, feed_forward, logits) + per_layer))
    copies = PIPELINE_COPIES if load.is_pipelined else 1
    hidden = 4 * n_ubatch * shape.n_embd if len(load.gpus) > 1 else 0  # what the GPU before hands on
    return activations + copies * (_masks(load) + hidden) + ALLOCATOR_BYTES


def host_compute(load: Load) -> int:
    """Host memory for the inputs of a graph that runs on GPUs: masks, positions, and embeddings in and out."""
    return _masks(load) + 4 * load.settings.n_ubatch * (2 * load.facts.shape.n_embd + POSITIONS) + ALLOCATOR_BYTES


def _masks(load: Load) -> int:
    """f16, a batch by the tokens of one stream; layers with a window have a mask of their own."""
    per_stream = load.settings.slot_tokens + load.window_cells // load.n_streams
    return 2 * load.settings.n_ubatch * per_stream


def _dequantized(load: Load) -> int:
    """Attention on CUDA computes in f16: the widest cache of one layer, copied."""
    rows = (load.cells_of(layer) * (layer.k + layer.v) for layer in load.facts.shape.layers)
    return 2 * max(rows, default=0)


def _attention_width(shape: ModelShape, is_quantized: bool) -> int:
    """Elements a token takes in attention; a quantized cache rotates queries, keys and values first."""
    n_head = max(shape.n_head, default=0)
    q = n_head * max(shape.head_dim_k, shape.head_dim_v)
    kv = max((layer.k + layer.v for layer in shape.layers), default=0)
    latent = n_head * (shape.head_dim_k_mla + shape.kv_lora_rank) if shape.kv_lora_rank else 0
    return 4 * shape.n_embd + (4 if is_quantized else 2) * q + kv + latent


def _dense_width(shape: ModelShape) -> int:
    return 5 * shape.n_embd + 3 * shape.n_ff if shape.n_ff else 0


def _expert_width(shape: ModelShape) -> int:
    """Every expert a token uses has a row of its own until they are summed."""
    if not shape.n_expert_used:
        return 0
    row = 2 * shape.n_embd + 3 * shape.n_ff_expert
    return 3 * shape.n_embd + shape.n_expert_used * row + 3 * shape.n_ff_shared


def _recurrent_width(shape: ModelShape) -> int:
    widths = shape.recurrent
    return 2 * shape.n_embd + 4 * (widths.inner + 2 * widths.groups * widths.state)
