"""Owns: the picture of how experts are used: layers by experts, a panel for all of the text and one for each topic."""

from __future__ import annotations

import io
import math

from matplotlib.figure import Figure

from laya.experts.balance import Balance
from laya.experts.use import ExpertUse

_MOST_ANNOTATED = 128  # cells of a panel
_TOP = 2.0  # of the fair share: the colour scale's end
_COLUMNS = 3


def draw(use: ExpertUse, title: str) -> Figure:
    """Colour is share / fair share: white is fair, red more, blue less."""
    parts = use.parts
    n_columns = min(_COLUMNS, len(parts))
    n_rows = math.ceil(len(parts) / n_columns)
    width, height = min(12.0, 2 + 0.45 * use.n_experts), min(9.0, 1.4 + 0.32 * len(use.layers))
    figure = Figure(figsize=(min(30.0, width * n_columns), min(30.0, height * n_rows)), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    fair = 1 / use.n_experts
    for axes, part in zip(grid.flat, parts, strict=False):
        shares = [Balance.of(part.layers[layer]).share for layer in use.layers]
        cells = [[share / fair for share in row] for row in shares]
        image = axes.imshow(cells, cmap="RdBu_r", vmin=0, vmax=_TOP, aspect="auto", interpolation="nearest")
        axes.set_title(f"{part.topic} ({part.n_tokens} tokens)", fontsize=9)
        axes.set_xlabel("expert", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        step = max(1, len(use.layers) // 24)
        axes.set_yticks(range(0, len(use.layers), step), [str(layer) for layer in use.layers[::step]], fontsize=7)
        axes.set_xticks(range(0, use.n_experts, max(1, use.n_experts // 16)))
        axes.tick_params(axis="x", labelsize=7)
        if len(use.layers) * use.n_experts <= _MOST_ANNOTATED:
            for y, row in enumerate(shares):
                for x, share in enumerate(row):
                    is_dark = abs(share / fair - 1) > 0.6
                    axes.text(
                        x, y, f"{100 * share:.1f}", ha="center", va="center", fontsize=6, color="w" if is_dark else "k"
                    )
    for axes in grid.flat[len(parts) :]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=grid, extend="max", shrink=0.8)
    bar.set_label(f"share / fair share ({100 * fair:.3g} %)", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def png(figure: Figure) -> bytes:
    room = io.BytesIO()
    figure.savefig(room, format="png", dpi=120)  # a Figure alone draws by Agg: no display is asked for
    return room.getvalue()
