"""Owns: what planning a model of a terabyte costs: its headers are written in full, its weights are holes.

    python -m laya.bench.plan_terabyte          one JSON line: seconds and peak MiB of a fresh process

A DeepSeek-like model: 61 layers of latent attention, 384 experts, a vocabulary of 150 000 entries, 30 files.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from laya.bench.fresh_plan import report
from laya.memory.ggml import type_named

N_LAYER, N_EXPERT, N_SHARDS, N_VOCAB = 61, 384, 30, 150_000
N_EMBD, N_FF_EXPERT, N_HEAD, Q_RANK, KV_RANK, ROPE = 7168, 2048, 128, 1536, 512, 64
ALIGNMENT = 32
_U16, _U32, _STRING, _ARRAY = 2, 4, 8, 9


class Row(NamedTuple):
    """A row of the tensor table. `shape` in ggml's order."""

    name: str
    type_name: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        ggml_type, elements = type_named(self.type_name), 1
        assert ggml_type is not None
        for size in self.shape:
            elements *= size
        return -(-ggml_type.row_bytes(elements) // ALIGNMENT) * ALIGNMENT


def write_model(folder: Path) -> Path:
    """Write the files and return the first; on a disk they take what their headers take."""
    rows = [Row("token_embd.weight", "Q8_0", (N_EMBD, N_VOCAB)), Row("output.weight", "Q8_0", (N_EMBD, N_VOCAB))]
    rows += [Row("output_norm.weight", "F32", (N_EMBD,)), *(row for il in range(N_LAYER) for row in _layer(il))]
    share = -(-len(rows) // N_SHARDS)
    paths = [folder / f"terabyte-{part + 1:05d}-of-{N_SHARDS:05d}.gguf" for part in range(N_SHARDS)]
    for part, path in enumerate(paths):
        with path.open("wb") as file:
            _write_file(file, part, rows[part * share : (part + 1) * share])
    return paths[0]


def _layer(il: int) -> Iterator[Row]:
    latent = {"attn_q_a": (N_EMBD, Q_RANK), "attn_q_b": (Q_RANK, N_HEAD * 192), "attn_output": (N_HEAD * 128, N_EMBD)}
    latent |= {"attn_kv_a_mqa": (N_EMBD, KV_RANK + ROPE)}
    heads = {"attn_k_b": (128, KV_RANK, N_HEAD), "attn_v_b": (KV_RANK, 128, N_HEAD)}
    norms = {"attn_norm": (N_EMBD,), "attn_q_a_norm": (Q_RANK,), "attn_kv_a_norm": (KV_RANK,), "ffn_norm": (N_EMBD,)}
    experts = {"ffn_gate_exps": (N_EMBD, N_FF_EXPERT, N_EXPERT), "ffn_up_exps": (N_EMBD, N_FF_EXPERT, N_EXPERT)}
    experts |= {"ffn_down_exps": (N_FF_EXPERT, N_EMBD, N_EXPERT)}
    shared = {"ffn_gate_shexp": (N_EMBD, N_FF_EXPERT), "ffn_up_shexp": (N_EMBD, N_FF_EXPERT)}
    shared |= {"ffn_down_shexp": (N_FF_EXPERT, N_EMBD)}
    for name, shape in {**norms, "ffn_gate_inp": (N_EMBD, N_EXPERT)}.items():
        yield Row(f"blk.{il}.{name}.weight", "F32", shape)
    for name, shape in {**latent, **heads, **experts, **shared}.items():
        yield Row(f"blk.{il}.{name}.weight", "Q8_0", shape)


def _write_file(file: BinaryIO, part: int, rows: list[Row]) -> None:
    entries = [_entry("split.no", _U16, part), _entry("split.count", _U16, N_SHARDS), *(_model() if part == 0 else ())]
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(entries)) + b"".join(entries))
    offset = 0
    for row in rows:
        file.write(_text(row.name) + struct.pack("<I", len(row.shape)) + struct.pack(f"<{len(row.shape)}Q", *row.shape))
        ggml_type = type_named(row.type_name)
        assert ggml_type is not None
        file.write(struct.pack("<IQ", ggml_type.id, offset))
        offset += row.n_bytes
    start = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    file.truncate(start + offset)


def _model() -> Iterator[bytes]:
    yield _text("general.architecture") + struct.pack("<I", _STRING) + _text("deepseek2")
    figures = {"block_count": N_LAYER, "context_length": 163840, "embedding_length": N_EMBD, "expert_used_count": 8}
    figures |= {"feed_forward_length": 18432, "expert_count": N_EXPERT, "expert_feed_forward_length": N_FF_EXPERT}
    figures |= {"expert_shared_count": 1, "attention.head_count": N_HEAD, "attention.head_count_kv": 1}
    figures |= {"attention.key_length": KV_RANK + ROPE, "attention.value_length": KV_RANK, "rope.dimension_count": ROPE}
    figures |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": KV_RANK}
    for key, value in figures.items():
        yield _entry(f"deepseek2.{key}", _U32, value)
    yield _texts("tokenizer.ggml.tokens", (f"token{n}" for n in range(N_VOCAB)), N_VOCAB)
    yield _texts("tokenizer.ggml.merges", (f"mer{n} ges{n}" for n in range(2 * N_VOCAB)), 2 * N_VOCAB)


def _entry(key: str, kind: int, value: int) -> bytes:
    return _text(key) + struct.pack("<I", kind) + struct.pack({_U16: "<H", _U32: "<I"}[kind], value)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _texts(key: str, values: Iterator[str], length: int) -> bytes:
    return _text(key) + struct.pack("<IIQ", _ARRAY, _STRING, length) + b"".join(map(_text, values))


def main() -> int:
    """Print the median of some plans as one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        print(report("plan_terabyte", write_model(Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
