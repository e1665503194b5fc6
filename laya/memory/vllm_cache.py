"""Owns: vLLM's KV cache: which blocks a layer takes, how layers share a pool, and how many sequences a pool holds.

The figures are the ones vLLM logs ("GPU KV cache size", "Maximum concurrency"), from the same rules: layers of one
kind form groups of equal size, groups share blocks of equal bytes, and a sequence takes the blocks of each group that
its kind asks for. Knows no weights and no budget. Sources: vllm/v1/core/kv_cache_utils.py and kv_cache_interface.py;
see docs/memory.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from laya.errors import ConfigError, nearest
from laya.memory.layers import LayerShape
from laya.memory.shape import ModelShape
from laya.types import MIB

KV_BYTES = {"auto": 0, "f16": 2, "bf16": 2, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SPARSE_LATENT_FP8_BYTES = 656  # a token of sparse latent attention in fp8, with its scales
INDEX_SCALE_ELEMENTS = 128  # an indexer's keys are fp8 with a 4-byte scale for each so many
GROUP_TOLERANCE = 1.5  # kinds whose layer counts differ by less are padded to the larger


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM is started with beside the settings that every engine has."""

    gpu_memory_utilization: float = 0.92
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_num_batched_tokens: int = 8192
    block_size: int = 16  # tokens
    enforce_eager: bool = False  # no CUDA graphs
    grammar_cache_bytes: int = 64 * MIB  # of compiled schemas
    computes_in_single: bool = False  # by `args: {dtype: float32}`; else single precision is loaded as half
    n_speculative_tokens: int = 0  # drafted by the model's own layers
    hybrid_kv_cache: bool = True  # False (--disable-hybrid-kv-cache-manager): windows keep every token


Kind = Literal["full", "window", "chunk", "state"]


class _Row(msgspec.Struct, frozen=True):
    """What one cache of one layer takes on one GPU; equal rows are of one kind."""

    kind: Kind
    n_bytes: int  # of a token, or of a sequence's whole state
    reach: int = 0  # tokens that a window or chunk looks back


class _Group(msgspec.Struct, frozen=True):
    """Layers of one kind that share a block table."""

    row: _Row
    block: int  # tokens of one block
    layers: tuple[int, ...]  # numbers of the layers


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's KV cache of one model under one configuration."""

    groups: tuple[_Group, ...]
    settings: VllmSettings
    stage_block_bytes: tuple[int, ...]  # of one block on each GPU of a pipeline stage

    def blocks_per_sequence(self, max_model_len: int) -> int:
        """Blocks that a sequence at its longest takes, over all groups."""
        return sum(self._blocks(group, max_model_len) for group in self.groups)

    def _blocks(self, group: _Group, max_model_len: int) -> int:
        row, batched = group.row, self.settings.max_num_batched_tokens
        if row.kind == "state":
            return 2 + self.settings.n_speculative_tokens  # the running state, and one that a prefix may go on from
        if row.kind == "window":
            # A window need not begin where a block does.
            return _ceil(min(row.reach - 1 + batched, max_model_len), group.block) + 1
        tokens = min(row.reach + batched, max_model_len) if row.kind == "chunk" else max_model_len
        return _ceil(tokens, group.block)

    def bytes_for(self, n_seqs: int, max_model_len: int) -> tuple[int, ...]:
        """Bytes on each GPU of each stage that hold `n_seqs` sequences at their longest, and the block nobody gets."""
        n_blocks = n_seqs * self.blocks_per_sequence(max_model_len) + 1
        return tuple(n_blocks * n_bytes for n_bytes in self.stage_block_bytes)

    def capacity(self, available_bytes: Sequence[int], max_model_len: int) -> KvCapacity:
        """What these bytes, one figure a stage, hold: vLLM's own two log lines."""
        counts = [
            room // n_bytes for room, n_bytes in zip(available_bytes, self.stage_block_bytes, strict=True) if n_bytes
        ]
        n_blocks = max(0, min(counts, default=0))
        each = self.blocks_per_sequence(max_model_len)
        concurrency = n_blocks / each if each else float("inf")
        return KvCapacity(
            n_blocks=n_blocks,
            tokens=int(concurrency * max_model_len) if each else 0,
            max_concurrency=concurrency,
        )

    def longest(self, available_bytes: Sequence[int], limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that these bytes hold; 0 where not even one token fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            needed = self.blocks_per_sequence(middle)
            fits = all(needed * n <= room for n, room in zip(self.stage_block_bytes, available_bytes, strict=True))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


class KvCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM logs of its KV cache."""

    n_blocks: int
    tokens: int  # "GPU KV cache size"
    max_concurrency: float  # "Maximum concurrency": sequences at their longest


def kv_cache(
    shape: ModelShape, settings: VllmSettings, kv_cache_dtype: str, *, dtype_bytes: int, state_bytes: int = 4
) -> KvCache:
    """The KV cache of a model. dtype_bytes: of its weights, which "auto" follows. Raises ConfigError for a dtype."""
    element = kv_bytes(kv_cache_dtype) or dtype_bytes
    per_layer = [_rows(layer, settings, element, dtype_bytes, state_bytes, shape) for layer in shape.layers]
    kinds = Counter(row for rows in per_layer for row in rows)
    stages = stage_layers(shape.n_layer, settings.pipeline_parallel_size)
    if not kinds:
        return KvCache(groups=(), settings=settings, stage_block_bytes=(0,) * len(stages))
    if len({(row.kind, row.reach) for row in kinds}) == 1 and next(iter(kinds)).kind != "state":
        return _uniform(per_layer, kinds, settings, stages)
    return _hybrid(per_layer, kinds, settings, stages)


def kv_bytes(name: str) -> int:
    """Bytes of an element of the KV cache, 0 = as the weights. Raises ConfigError naming the nearest known one."""
    found = KV_BYTES.get(name.lower())
    if found is None:
        close = nearest(name.lower(), KV_BYTES)
        hint = f"did you mean {close}?" if close else "vLLM knows " + ", ".join(KV_BYTES) + "."
        raise ConfigError(f"kv_cache_dtype {name!r} is none of vLLM's; {hint}", param="kv_cache_dtype")
    return found


def stage_layers(n_layer: int, n_stages: int) -> list[range]:
    """The layers of each pipeline stage: equal parts, what is left over spread from the last but one backwards."""
    sizes = [n_layer // n_stages] * n_stages
    for extra in range(n_layer % n_stages):
        sizes[-2 - extra if n_stages > 1 else 0] += 1
    stages, first = [], 0
    for size in sizes:
        stages.append(range(first, first + size))
        first += size
    return stages


def _rows(
    layer: LayerShape, settings: VllmSettings, element: int, dtype_bytes: int, state_bytes: int, shape: ModelShape
) -> list[_Row]:
    """The caches of one layer on one GPU."""
    share = settings.tensor_parallel_size
    rows = []
    if layer.n_head_kv and not layer.head_v:  # latent: every GPU holds the compressed row whole
        is_sparse = bool(layer.index or shape.n_index_head) and element == 1
        rows.append(_Row("full", SPARSE_LATENT_FP8_BYTES if is_sparse else layer.k * element))
    elif layer.n_head_kv:
        heads = max(1, layer.n_head_kv // share)
        n_bytes = heads * (layer.head_k + layer.head_v) * element
        if layer.window and settings.hybrid_kv_cache:
            rows.append(_Row("chunk" if layer.is_chunked else "window", n_bytes, layer.window))
        else:
            rows.append(_Row("full", n_bytes))
    if layer.index:
        rows.append(_Row("full", layer.index + 4 * _ceil(layer.index, INDEX_SCALE_ELEMENTS)))
    if layer.conv or layer.state:
        rows.append(_Row("state", _ceil(layer.conv, share) * dtype_bytes + _ceil(layer.state, share) * state_bytes))
    return rows


def _uniform(
    per_layer: Sequence[Sequence[_Row]], kinds: Counter[_Row], settings: VllmSettings, stages: Sequence[range]
) -> KvCache:
    """Layers that all need the same tokens: one group, whose block is the sum over its layers."""
    row, block = next(iter(kinds)), settings.block_size
    group = _Group(row, block, tuple(il for il, rows in enumerate(per_layer) if rows))
    per_stage = tuple(sum(block * row.n_bytes for il in stage for row in per_layer[il]) for stage in stages)
    return KvCache(groups=(group,), settings=settings, stage_block_bytes=per_stage)


def _hybrid(
    per_layer: Sequence[Sequence[_Row]], kinds: Counter[_Row], settings: VllmSettings, stages: Sequence[range]
) -> KvCache:
    """Layers of several kinds: groups of equal size, whose blocks have equal bytes."""
    blocks = _block_tokens(kinds, settings.block_size)
    page = max(_page_bytes(row, blocks[row]) for row in kinds)
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < fewest * GROUP_TOLERANCE else fewest
    groups: list[_Group] = []
    for row, count in kinds.items():
        layers = [il for il, rows in enumerate(per_layer) for own in rows if own == row]
        # A smaller page is made as large as the largest by more tokens in its block.
        block = blocks[row] if row.kind == "state" else blocks[row] * max(1, page // _page_bytes(row, blocks[row]))
        n_groups = _ceil(count, size)
        groups.extend(_Group(row, block, tuple(layers[number::n_groups])) for number in range(n_groups))
    per_stage = tuple(
        page * max((sum(il in stage for il in group.layers) for group in groups), default=0) for stage in stages
    )
    return KvCache(groups=tuple(groups), settings=settings, stage_block_bytes=per_stage)


def _block_tokens(kinds: Counter[_Row], block_size: int) -> dict[_Row, int]:
    """Tokens of a block of each kind. Beside recurrent state, attention's block grows until it is as large as one."""
    state = max((row.n_bytes for row in kinds if row.kind == "state"), default=0)
    token = max((row.n_bytes for row in kinds if row.kind != "state"), default=0)
    block = max(block_size, block_size * _ceil(state, block_size * token)) if token else block_size
    return {row: 1 if row.kind == "state" else block for row in kinds}


def _page_bytes(row: _Row, block: int) -> int:
    return row.n_bytes * block


def _ceil(count: int, step: int) -> int:
    return -(-count // step)
