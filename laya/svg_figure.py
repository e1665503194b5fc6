"""Owns: a figure of matplotlib as SVG for a page: text stays text, and the same figure gives the same bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg_of(figure: Figure) -> str:
    """Without the XML that goes before it. Needs matplotlib, as whoever has a figure does."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "laya"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
