"""Owns: what is written down of a folder of 4-bit weights: from what, how, by what, what it cost, what was left.

The same twice: card.json for programs, README.md for people. Knows no tensor library.
"""

from __future__ import annotations

import re

import msgspec

import laya
from laya.models import size_text

_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that made the folder told of it. Figures are over a text of `n_tokens`, both in float32."""

    bits: int
    model_type: str
    max_logit_difference_of_form: float | None
    """Of a Laya model's Mixtral form to it."""
    tuned_on_tokens: int
    peak_bytes: int
    versions: dict[str, str]
    quantized: dict[str, int]
    quantized_bytes: int
    quantized_weights: int
    routers: int
    kept: dict[str, str]
    text: str
    n_tokens: int
    mean_kl: float
    max_kl: float
    same_top_share: float
    reference_perplexity: float
    perplexity: float


class FolderCard(msgspec.Struct, frozen=True, kw_only=True):
    """`quantized_share_of_f16`: what the quantized tensors take of what they would in F16."""

    folder: str
    kind: str
    group_size: int
    is_symmetric: bool
    file_bytes: int
    sha256: str
    quantized_share_of_f16: float
    source: str
    source_bytes: int
    source_sha256: str
    recipe: str
    calibration: str | None
    calibration_sha256: str | None
    made: Made
    made_at: str
    version: int = 1


def as_json(card: FolderCard) -> bytes:
    return msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"


def quality_text(made: Made) -> str:
    """What quantizing cost, in a line."""
    return (
        f"mean KL {made.mean_kl:.3g}, largest {made.max_kl:.3g}; the same likeliest token for "
        f"{made.same_top_share:.1%}; perplexity {made.perplexity:.2f}, was {made.reference_perplexity:.2f} "
        f"({made.n_tokens} tokens of '{made.text}', against the source in float32)"
    )


def kept_groups(kept: dict[str, str]) -> list[str]:
    """`model.layers.*.input_layernorm.weight x 4: F32`: one line for what is in every layer."""
    groups: dict[tuple[str, str], int] = {}
    for name, dtype in kept.items():
        key = _LAYER.sub(r"\1layers.*.", name), dtype
        groups[key] = groups.get(key, 0) + 1
    return [f"{name} x {count}: {dtype}" for (name, dtype), count in groups.items()]


def as_markdown(card: FolderCard) -> str:
    """README.md of the folder."""
    made = card.made
    counts = ", ".join(f"{count} of {name}" for name, count in made.quantized.items())
    versions = {"laya": laya.__version__} | made.versions
    rows = {
        "size": f"{size_text(card.file_bytes)}; {made.bits} bits a weight, in groups of {card.group_size}",
        "zero points": "none, symmetric" if card.is_symmetric else "one a group",
        "quantized": f"{counts}; {card.quantized_share_of_f16:.3f} of what they take in F16",
        "recipe": card.recipe,
        "cost": quality_text(made),
        "sha256": f"`{card.sha256}`",
        "source": f"{card.source}, {size_text(card.source_bytes)}, `{card.source_sha256}`",
        "calibration": f"{card.calibration}, `{card.calibration_sha256}`" if card.calibration else "none",
        "made": f"{card.made_at} by " + ", ".join(f"{name} {text}" for name, text in versions.items()),
    }
    lines = [f"# {card.folder}", "", f"{card.source} in 4 bits ({card.kind.upper()}), by `laya quantize`.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())]
    lines += ["", f"Not quantized, {len(made.kept)} tensors, {made.routers} of them routers:", ""]
    return "\n".join([*lines, *(f"- {text}" for text in kept_groups(made.kept))]) + "\n"
