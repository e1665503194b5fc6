"""Owns: what is written down of a quantized file: from what it was made, how, by what, and what of it to know.

The same twice: card.json for programs, README.md for people. Knows no store.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

import laya
from laya.models import size_text
from laya.quantization.ggml_api import ggml_version
from laya.quantization.job import Job


class ImatrixCard(msgspec.Struct, frozen=True, kw_only=True):
    """Of an importance matrix. text_*: of the calibration text, where it was computed here."""

    name: str
    sha256: str
    n_tensors: int
    n_chunks: int
    text_name: str | None = None
    text_sha256: str | None = None
    text_tokens: int | None = None
    unseen_experts: dict[str, tuple[int, ...]] = {}


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """`kept` are the tensors no quantization may touch; `recipe`: class of tensors -> type -> how many."""

    file: str
    file_bytes: int
    sha256: str
    kind: str
    bits_per_weight: float
    quantized_share_of_f16: float | None
    source: str
    source_file: str
    source_type: str
    source_bytes: int
    source_sha256: str
    recipe: dict[str, dict[str, int]]
    types: dict[str, dict[str, int]]
    kept: dict[str, str]
    fallbacks: dict[str, str]
    requantized: bool
    imatrix: ImatrixCard | None
    warnings: tuple[str, ...]
    versions: dict[str, str]
    made_at: str
    version: int = 1


def card_of(
    job: Job, path: Path, *, file_name: str, sha256: str, source_sha256: str, imatrix: ImatrixCard | None, made_at: str
) -> Card:
    """path: where the result lies now, which gets `file_name`."""
    recipe: dict[str, dict[str, int]] = defaultdict(dict)
    types: dict[str, dict[str, int]] = {}
    for target in job.targets:
        of_class = recipe[target.tensor_class]
        of_class[target.type.name] = of_class.get(target.type.name, 0) + 1
        of_type = types.setdefault(target.type.name, {"count": 0, "bytes": 0})
        of_type["count"] += 1
        of_type["bytes"] += target.n_bytes
    return Card(
        file=file_name,
        file_bytes=path.stat().st_size,
        sha256=sha256,
        kind=job.kind,
        bits_per_weight=round(job.bits_per_weight, 3),
        quantized_share_of_f16=None if (share := job.quantized_share_of_f16) is None else round(share, 4),
        source=job.name,
        source_file=job.sources[0].name,
        source_type=job.source_type,
        source_bytes=job.source_bytes,
        source_sha256=source_sha256,
        recipe=dict(sorted(recipe.items())),
        types=types,
        kept={target.tensor.name: target.type.name for target in job.targets if target.is_protected},
        fallbacks={t.tensor.name: f"{t.wanted.name} -> {t.type.name}" for t in job.targets if t.why == "fallback"},
        requantized=job.is_requantized,
        imatrix=imatrix,
        warnings=job.warnings,
        versions={
            "laya": laya.__version__,
            "xllamacpp": importlib.metadata.version("xllamacpp"),
            "ggml": ggml_version(),
        },
        made_at=made_at,
    )


def as_json(card: Card) -> bytes:
    return msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"


def as_markdown(card: Card) -> str:
    """README.md of the file."""
    lines = [f"# {card.file}", "", f"{card.source} as {card.kind}, made by `laya quantize`.", ""]
    share = card.quantized_share_of_f16
    lines += _table(
        ("", ""),
        [
            ("size", f"{size_text(card.file_bytes)}, {card.bits_per_weight:.2f} bits a weight"),
            ("quantized tensors", "none" if share is None else f"{share:.3f} of what they take in F16"),
            ("sha256", f"`{card.sha256}`"),
            ("source", f"{card.source_file}, {card.source_type}, {size_text(card.source_bytes)}"),
            ("source's sha256", f"`{card.source_sha256}`"),
            ("importance matrix", _imatrix_text(card.imatrix)),
            ("made", f"{card.made_at} by " + ", ".join(f"{name} {text}" for name, text in card.versions.items())),
        ],
    )
    if card.warnings:
        lines += ["", "## To know", "", *(f"- {text}" for text in card.warnings)]
    rows = [
        (name, ", ".join(f"{kind} x {count}" for kind, count in kinds.items())) for name, kinds in card.recipe.items()
    ]
    lines += ["", "## Types", "", *_table(("tensors", "type"), rows)]
    lines += ["", f"Never quantized, {len(card.kept)} routers, norms and vectors:", ""]
    lines += [f"- {text}" for text in kept_lines(card.kept)]
    return "\n".join(lines) + "\n"


def kept_lines(kept: dict[str, str]) -> list[str]:
    """`blk.*.ffn_norm.weight x 30: F32`, one line for what is in every layer."""
    groups: dict[tuple[str, str], int] = {}
    for name, kind in kept.items():
        head, _, rest = name.partition(".")
        layer, _, own = rest.partition(".")
        key = (f"blk.*.{own}" if head == "blk" and layer.isdigit() else name, kind)
        groups[key] = groups.get(key, 0) + 1
    return [f"{name} x {count}: {kind}" for (name, kind), count in groups.items()]


def _imatrix_text(imatrix: ImatrixCard | None) -> str:
    if imatrix is None:
        return "none"
    text = f"{imatrix.name}, {imatrix.n_tensors} tensors, `{imatrix.sha256}`"
    if imatrix.text_name:
        text += f"; computed on {imatrix.text_tokens} tokens of {imatrix.text_name}, `{imatrix.text_sha256}`"
    return text


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
